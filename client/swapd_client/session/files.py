"""Descriptors that the daemon sends to this process: of its device's memory, and of host copies.

The lifeline's thread adds them; others wait for those that they need. Both classes are thread-safe.
"""

import threading
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Files as Message
from swapd.shared.protocol import Master
from swapd_client.errors import DaemonGone
from swapd_client.session.life import Life

#: Seconds that a file may take that the daemon has sent before the grant that needs it.
FILE_S = 30.0
#: Seconds that a daemon may take to send a promised host copy.
MASTER_S = 30.0

K = TypeVar("K", bound=Hashable)


class _Coming(Generic[K]):
    """Descriptors by key, owned here until they are taken."""

    def __init__(self) -> None:
        self._fds: dict[K, OwnedFd] = {}
        # `with` takes this one: `Condition.__enter__` is Python, which an interrupt leaves locked
        self._lock = threading.RLock()
        self._came = threading.Condition(self._lock)
        self._ended = False

    def _await(self, key: K, timeout_s: float) -> bool:
        """Whether it has come. Under the lock, released meanwhile."""
        self._came.wait_for(lambda: key in self._fds or self._ended, timeout_s)
        return key in self._fds

    def end(self) -> None:
        """No more will come: end every wait."""
        with self._lock:
            self._ended = True
            self._came.notify_all()

    def close(self) -> None:
        """Close those that are left. After `end`."""
        for fd in self._fds.values():
            fd.close()
        self._fds.clear()


class Files(_Coming[tuple[int, bool]]):
    """One descriptor for each (file, writable). A grant may be read before its files have come."""

    def __init__(self, chunks_per_file: int) -> None:
        super().__init__()
        self.chunks_per_file = chunks_per_file

    def __repr__(self) -> str:
        return f"<Files {sorted(self._fds)}>"

    def add(self, message: Message, fds: Sequence[OwnedFd]) -> None:
        """Take over the descriptors that came with `message`."""
        with self._lock:
            for number, fd in zip(message.numbers, fds, strict=True):
                if self._fds.setdefault((number, message.writable), fd) is not fd:
                    fd.close()
            self._came.notify_all()

    def get(self, number: int, *, writable: bool) -> OwnedFd:
        """The descriptor, still owned here. Blocks until it has come. Raises: DaemonGone."""
        with self._lock:
            return self._fds[self._arrived(number, writable)]

    def take(self, number: int, *, writable: bool) -> OwnedFd:
        """The descriptor, which the caller then owns. Blocks and raises as `get`."""
        with self._lock:
            return self._fds.pop(self._arrived(number, writable))

    def give(self, number: int, fd: OwnedFd, *, writable: bool) -> None:
        """Take back a taken descriptor that could not be used."""
        self.add(Message((number,), writable), [fd])

    def drop(self, numbers: Iterable[int]) -> None:
        """Close these if they have come: the daemon sends them again when they are needed."""
        with self._lock:
            for key in [(n, writable) for n in numbers for writable in (False, True)]:
                if fd := self._fds.pop(key, None):
                    fd.close()

    def drop_all(self, but: Collection[int]) -> None:
        """Close all that have come but these."""
        with self._lock:
            self.drop({number for number, _ in self._fds}.difference(but))

    def _arrived(self, number: int, writable: bool) -> tuple[int, bool]:
        if self._await(key := (number, writable), FILE_S):
            return key
        raise DaemonGone(
            f"the daemon did not send file {number} of its memory within {FILE_S:g} s, so the "
            "components there cannot be mapped: see its log. Close this client, then "
            "connect again"
        )


class Masters(_Coming[int]):
    """Host copies by request."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self._life = life
        self._said: dict[int, Master] = {}
        #: Requests given up before their host copy came.
        self._unwanted: set[int] = set()

    def add(self, master: Master, fd: OwnedFd) -> None:
        with self._lock:
            if master.request in self._unwanted:
                self._unwanted.discard(master.request)
                fd.close()
            else:
                self._said[master.request], self._fds[master.request] = master, fd
                self._came.notify_all()

    def take(self, request: int) -> tuple[Master, OwnedFd]:
        """Wait for a host copy; the caller then owns its descriptor. Raises: SessionEnded."""
        with self._lock:
            if self._await(request, MASTER_S) and not self._ended:
                return self._said.pop(request), self._fds.pop(request)
        self._life.check()
        raise DaemonGone(
            f"the daemon did not send the host copy for request {request} within "
            f"{MASTER_S:g} s: its log may say why. Close this client, then connect again"
        )

    def forget(self, request: int) -> None:
        """Close a host copy that is not needed, now or when it comes."""
        with self._lock:
            if fd := self._fds.pop(request, None):
                self._said.pop(request, None)
                fd.close()
            else:
                self._unwanted.add(request)
