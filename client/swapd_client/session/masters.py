"""Host copies that the daemon sends, until the session takes them."""

import threading

from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Master
from swapd_client.errors import DaemonGone
from swapd_client.session.life import Life

#: Seconds that a daemon may take to send a promised host copy.
MASTER_S = 30.0


class Masters:
    """Host copies by request. Thread-safe; owns the descriptors until they are taken."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._came = threading.Condition()
        self._masters: dict[int, tuple[Master, OwnedFd]] = {}
        #: Requests given up before their host copy came.
        self._unwanted: set[int] = set()
        self._ended = False

    def add(self, master: Master, fd: OwnedFd) -> None:
        """A host copy has come."""
        with self._came:
            if master.request in self._unwanted:
                self._unwanted.discard(master.request)
                fd.close()
            else:
                self._masters[master.request] = master, fd
                self._came.notify_all()

    def take(self, request: int) -> tuple[Master, OwnedFd]:
        """Wait for a host copy; the caller then owns its descriptor. Raises: SessionEnded."""
        with self._came:
            self._came.wait_for(lambda: request in self._masters or self._ended, MASTER_S)
            if not self._ended and request in self._masters:
                return self._masters.pop(request)
        self._life.check()
        raise DaemonGone(
            f"the daemon did not send the host copy for request {request} within "
            f"{MASTER_S:g} s: its log may say why. Close this client, then connect again"
        )

    def forget(self, request: int) -> None:
        """Close a host copy that is not needed, now or when it comes."""
        with self._came:
            if request in self._masters:
                self._masters.pop(request)[1].close()
            else:
                self._unwanted.add(request)

    def end(self) -> None:
        """No more will come: end every wait."""
        with self._came:
            self._ended = True
            self._came.notify_all()

    def close(self) -> None:
        """Close the remaining ones. After `end`."""
        for _, fd in self._masters.values():
            fd.close()
