"""The daemon's messages to this process about waiting acquires."""

from collections.abc import Callable

from swapd.shared import protocol


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

    def hear(self, message: protocol.Wanted | protocol.Hurry) -> None:
        if isinstance(message, protocol.Hurry):
            self.hurried = grown = message.waits
        elif grown := message.wanted:
            self.wanted.add(message.name)
        else:
            self.wanted.discard(message.name)
        if grown:
            for listener in self._listeners:
                listener()
