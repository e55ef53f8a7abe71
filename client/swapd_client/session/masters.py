"""The masters that the daemon sends, from when they come until somebody takes them."""

import threading

from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Master

#: How long a daemon may take to send a master it has promised.
MASTER_S = 30.0


class Masters:
    """By the request they were made for. Thread-safe; owns the descriptors until they are taken."""

    def __init__(self) -> None:
        self._came = threading.Condition()
        self._masters: dict[int, tuple[Master, OwnedFd]] = {}
        #: Those that were given up before they came.
        self._unwanted: set[int] = set()
        self._ended = False

    def add(self, master: Master, fd: OwnedFd) -> None:
        """One has come."""
        with self._came:
            if master.request in self._unwanted:
                self._unwanted.discard(master.request)
                fd.close()
            else:
                self._masters[master.request] = master, fd
                self._came.notify_all()

    def take(self, request: int) -> tuple[Master, OwnedFd] | None:
        """Wait for one, and own its descriptor; None if none comes any more, or not in time."""
        with self._came:
            self._came.wait_for(lambda: request in self._masters or self._ended, MASTER_S)
            return None if self._ended else self._masters.pop(request, None)

    def forget(self, request: int) -> None:
        """Nobody will take it: close it, now or when it comes."""
        with self._came:
            if request in self._masters:
                self._masters.pop(request)[1].close()
            else:
                self._unwanted.add(request)

    def end(self) -> None:
        """None comes any more: end every wait."""
        with self._came:
            self._ended = True
            self._came.notify_all()

    def close(self) -> None:
        """Close those that nobody took. After `end`."""
        for _, fd in self._masters.values():
            fd.close()
