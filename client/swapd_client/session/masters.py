"""The masters that the daemon sends, from when they come until somebody takes them."""

import threading

from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Master
from swapd_client.errors import DaemonGone
from swapd_client.session.life import Life

#: How long a daemon may take to send a master it has promised.
MASTER_S = 30.0


class Masters:
    """By the request they were made for. Thread-safe; owns the descriptors until they are taken."""

    def __init__(self, life: Life) -> None:
        self._life = life
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

    def take(self, request: int) -> tuple[Master, OwnedFd]:
        """Wait for one; its descriptor is the caller's. Raises: SessionEnded."""
        with self._came:
            self._came.wait_for(lambda: request in self._masters or self._ended, MASTER_S)
            if not self._ended and request in self._masters:
                return self._masters.pop(request)
        self._life.check()
        raise DaemonGone(
            f"the daemon did not send the host copy that it made for request {request}, within "
            f"{MASTER_S:g} s: its log may say why. Close this client, then connect again"
        )

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
