"""The state of a session, and the reason for its end."""

import os
import select
import threading
from collections.abc import Callable

from swapd.shared import protocol
from swapd.shared.fds import OwnedFd
from swapd_client.errors import ClientClosed, SwapdError


class Life:
    """The life of one session. `check` may be called in any thread, and costs next to nothing."""

    def __init__(self) -> None:
        #: Whether requests are possible; if not, `check` raises the reason.
        self.usable = True
        #: The reason for the session's end, or None.
        self.error: SwapdError | None = None
        #: Becomes readable, for good, when the session ends.
        self.ended = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        #: Guards registrations and leases. Its holder never sees half of the session's end.
        #: Re-entrant: a signal handler that closes may have interrupted the holder.
        self.lock = threading.RLock()
        self._process = os.getpid()
        #: `forked`, once this process was told of its fork: its locks may be held for good.
        self.left_to_parent = False
        self._listeners: list[Callable[[SwapdError], None]] = []
        #: Whether `tell` is done.
        self.told = False

    def check(self) -> None:
        """Raise the reason if requests are not possible any more."""
        if self.left_to_parent:
            raise ClientClosed(
                "this process was forked from one that uses swapd: sessions and weights stay "
                "with the parent. Connect in the child, or start it with spawn"
            )
        if self.error is not None:
            # raised again and again: its traceback would keep the frames of all callers
            raise self.error.with_traceback(None)

    @property
    def forked(self) -> bool:
        """Whether this is another process than the one that connected."""
        return os.getpid() != self._process

    def when_ended(self, listener: Callable[[SwapdError], None]) -> None:
        """Call `listener` with the reason, in the thread that ends the session."""
        self._listeners.append(listener)

    def end(self, error: SwapdError) -> None:
        """The session has ended for this reason. Once; under the lock."""
        self.error = error
        self.usable = False

    def tell(self, error: SwapdError) -> None:
        """Wake every wait, and call the listeners. Not under the lock."""
        os.eventfd_write(self.ended.fileno(), 1)
        for listener in self._listeners:
            listener(error)
        self.told = True

    def await_end(self) -> None:
        """Block until the session has ended. Not under the lock."""
        while self.error is None:
            select.select([self.ended.fileno()], [], [])

    def leave_to_parent(self) -> None:
        """This is a child of the process that connected."""
        self.left_to_parent = True
        self.usable = False


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
