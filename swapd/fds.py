"""File descriptors: who owns one, and how it crosses a process border.

No protocol knowledge: a packet is bytes plus descriptors.
"""

import os
import socket
import warnings
from collections.abc import Sequence
from types import TracebackType

#: Most descriptors in one packet. Linux allows 253.
FDS_MAX = 64


class OwnedFd:
    """A descriptor that is closed exactly once: by `close`, or by whoever `take`s it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __repr__(self) -> str:
        return f"<OwnedFd {self._fd}>" if self._fd >= 0 else "<OwnedFd closed>"

    def __enter__(self) -> "OwnedFd":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._fd >= 0:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2)
            self.close()

    def fileno(self) -> int:
        """The descriptor; still owned here."""
        if self._fd < 0:
            raise ValueError("descriptor is closed")
        return self._fd

    def take(self) -> int:
        """Give the descriptor away: the caller closes it."""
        fd, self._fd = self.fileno(), -1
        return fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self.take())


def reopen_read_only(fd: int) -> OwnedFd:
    """A new open file description of the same memory that cannot be mapped for writing."""
    return OwnedFd(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))


def send_packet(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one packet on a SEQPACKET socket. The caller keeps its descriptors.

    Blocking: as the socket is set. Raises: OSError, BlockingIOError when it would block.
    """
    socket.send_fds(sock, [data], list(fds))


def recv_packet(sock: socket.socket, max_bytes: int) -> tuple[bytes, list[OwnedFd]]:
    """Receive one packet; empty data means the other side is gone.

    The caller owns the descriptors. Raises: OSError; ValueError if the packet or its
    descriptors were cut short, in which case none are kept.
    """
    data, raw, flags, _ = socket.recv_fds(sock, max_bytes, FDS_MAX)
    fds = [OwnedFd(fd) for fd in raw]
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            fd.close()
        raise ValueError("packet too long, or too many descriptors in it")
    return data, fds
