"""What the daemon has told this process of those that wait for memory."""

from collections.abc import Callable


class Told:
    """Written by the lifeline's thread, read by any."""

    def __init__(self) -> None:
        #: Names whose memory somebody waits for, and is to have now.
        self.wanted: set[str] = set()
        #: Whether anybody waits for what leases may hold: none is kept that is not used.
        self.hurried = False
        self._listeners: list[Callable[[], None]] = []

    def when_wanted(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the lifeline's thread when `wanted` grows, or somebody begins to wait
        for what leases hold. It must not block."""
        self._listeners.append(listener)

    def set_wanted(self, name: str, *, wanted: bool) -> None:
        if wanted:
            self.wanted.add(name)
            self._tell()
        else:
            self.wanted.discard(name)

    def set_hurried(self, *, hurried: bool) -> None:
        self.hurried = hurried
        if hurried:
            self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
