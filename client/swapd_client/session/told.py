"""The daemon's messages to this process about waiting acquires."""

from collections.abc import Callable


class Told:
    """Written by the lifeline's thread, read by any."""

    def __init__(self) -> None:
        #: Names that acquires wait for, and may have now.
        self.wanted: set[str] = set()
        #: Whether any acquire waits for memory that leases may hold: then unused leases are not
        #: kept.
        self.hurried = False
        self._listeners: list[Callable[[], None]] = []

    def when_wanted(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the lifeline's thread when `wanted` grows, or `hurried` becomes true.

        It must not block.
        """
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
