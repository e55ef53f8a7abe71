"""How long a session lasts, and why it ended."""

import os
import select
import threading
from collections.abc import Callable

from swapd.shared.fds import OwnedFd
from swapd_client.errors import ForkedClient, SwapdError


class Life:
    """Of one session. `check` may be called by any thread, and costs next to nothing."""

    def __init__(self) -> None:
        #: Whether requests make sense; if not, `check` says why.
        self.usable = True
        #: Why the session ended, or None.
        self.error: SwapdError | None = None
        #: Becomes readable, for good, when the session ends.
        self.ended = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        #: Guards what is registered and leased. Who holds it sees no half of the session's end. A
        #: signal handler that closes may have interrupted somebody under it.
        self.lock = threading.RLock()
        self._process = os.getpid()
        self._left_to_parent = False
        self._listeners: list[Callable[[SwapdError], None]] = []

    def check(self) -> None:
        """Raise if requests make no sense any more, saying why."""
        if self._left_to_parent:
            raise ForkedClient(
                "this process was forked from one that uses swapd: sessions and weights stay "
                "with the parent. Connect in the child, or start it with spawn"
            )
        if self.error is not None:
            # it is raised again and again: its traceback would keep all that had asked
            raise self.error.with_traceback(None)

    @property
    def forked(self) -> bool:
        """Whether this is another process than the one that connected."""
        return os.getpid() != self._process

    @property
    def left_to_parent(self) -> bool:
        """The same, as far as this process has been told: its locks may be held for good."""
        return self._left_to_parent

    def when_ended(self, listener: Callable[[SwapdError], None]) -> None:
        """Call `listener` with why, in the thread that ends the session."""
        self._listeners.append(listener)

    def end(self, error: SwapdError) -> None:
        """The session has ended for this reason. Once; under the lock."""
        self.error = error
        self.usable = False

    def tell(self, error: SwapdError) -> None:
        """Wake every wait, and tell those that listen. Not under the lock."""
        os.eventfd_write(self.ended.fileno(), 1)
        for listener in self._listeners:
            listener(error)

    def await_end(self) -> None:
        """Block until the session has ended. Not under the lock."""
        while self.error is None:
            select.select([self.ended.fileno()], [], [])

    def leave_to_parent(self) -> None:
        """This is a child of the process that connected."""
        self._left_to_parent = True
        self.usable = False
