"""Descriptors of the device's memory, as the daemon sends them to this process."""

import threading
from collections.abc import Iterable, Sequence

from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Files as Message
from swapd_client.errors import DaemonGone

#: Seconds that a file may take that the daemon has sent before the grant that needs it.
FILE_S = 30.0


class Files:
    """One descriptor for each (file, writable). Thread-safe.

    Filled by the lifeline's thread; a grant may be read before its files have come.
    """

    def __init__(self, chunks_per_file: int) -> None:
        self.chunks_per_file = chunks_per_file
        self._fds: dict[tuple[int, bool], OwnedFd] = {}
        self._came = threading.Condition()
        self._ended = False

    def __repr__(self) -> str:
        return f"<Files {sorted(self._fds)}>"

    def add(self, message: Message, fds: Sequence[OwnedFd]) -> None:
        """Take over the descriptors that came with `message`."""
        with self._came:
            for number, fd in zip(message.numbers, fds, strict=True):
                if (number, message.writable) in self._fds:
                    fd.close()
                else:
                    self._fds[number, message.writable] = fd
            self._came.notify_all()

    def get(self, number: int, *, writable: bool) -> OwnedFd:
        """The descriptor, still owned here. Blocks until it has come. Raises: DaemonGone."""
        with self._came:
            return self._fds[self._await(number, writable)]

    def take(self, number: int, *, writable: bool) -> OwnedFd:
        """The descriptor, which the caller then owns. Blocks and raises as `get`."""
        with self._came:
            return self._fds.pop(self._await(number, writable))

    def give(self, number: int, fd: OwnedFd, *, writable: bool) -> None:
        """Take back a taken descriptor that could not be used."""
        self.add(Message((number,), writable), [fd])

    def drop(self, numbers: Iterable[int]) -> None:
        """Close these if they have come: the daemon sends them again when they are needed."""
        with self._came:
            for key in [(n, writable) for n in numbers for writable in (False, True)]:
                if fd := self._fds.pop(key, None):
                    fd.close()

    def _await(self, number: int, writable: bool) -> tuple[int, bool]:
        key = (number, writable)
        self._came.wait_for(lambda: key in self._fds or self._ended, FILE_S)
        if key not in self._fds:
            raise DaemonGone(
                f"the daemon did not send file {number} of its memory within {FILE_S:g} s, so the "
                "components there cannot be mapped: see its log. Close this client, then "
                "connect again"
            )
        return key

    def end(self) -> None:
        """No more will come."""
        with self._came:
            self._ended = True
            self._came.notify_all()

    def close(self) -> None:
        for fd in self._fds.values():
            fd.close()
        self._fds.clear()
