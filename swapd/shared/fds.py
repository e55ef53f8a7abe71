"""File descriptors: their owners, and sending them to another process.

No protocol knowledge: a packet is bytes plus descriptors.
"""

import errno
import os
import resource
import socket
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType

#: Most descriptors in one packet. Linux allows 253.
FDS_MAX = 64

#: Numbers left free for short use: the swap log, reading /proc, files on their way to a worker.
RESERVE = 24
#: Fewest descriptors with which a daemon can serve.
LEAST = 96

#: Errors of a resource that is exhausted for now: the caller made no mistake.
EXHAUSTED = frozenset(
    (
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC),
        *(errno.EAGAIN, errno.ETOOMANYREFS),
    )
)

_INT = struct.Struct("i")


class OwnedFd:
    """A descriptor that is closed exactly once: by `close`, or by the caller of `take`.

    A forked child does not close it: the number may be another file's by then.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<OwnedFd {self._fd}>" if self._fd >= 0 else "<OwnedFd closed>"

    def __enter__(self) -> "OwnedFd":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # `os` may be gone by then
        if self._fd >= 0 and self._process == getpid():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2)
            self.close()

    def fileno(self) -> int:
        """The descriptor; this object still owns it."""
        if self._fd < 0:
            raise ValueError("descriptor is closed")
        return self._fd

    def take(self) -> int:
        """Give up the descriptor: the caller closes it."""
        fd, self._fd = self.fileno(), -1
        return fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self.take())


class ReceivedFd(OwnedFd):
    """Of a file that may be another process's: what fails when it is closed (EIO of a network disk)
    is of no use here, and the number is free in any case."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def allow(count: int) -> int:
    """Let this process open `count` more descriptors than it has, up to its hard limit.

    Returns the limit that this needs (`ulimit -n`). It is over the hard limit if that is too low.
    """
    needed = len(os.listdir("/proc/self/fd")) + count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return needed


def raise_limit() -> int:
    """Raise the limit of descriptors to the hard limit; return that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def limit() -> int:
    """How many descriptors this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def make_sure(count: int) -> None:
    """Check that this process can open so many more just now. Raises: OSError."""
    with ExitStack() as opened:
        for _ in range(count):
            opened.enter_context(OwnedFd(os.eventfd(0, os.EFD_CLOEXEC)))


def share(most: int, of_limit: int) -> int:
    """`most`, or less where the limit is low: one `of_limit`-th of the limit."""
    return min(most, limit() // of_limit)


def has_room(fd: int, spare: int = 0) -> bool:
    """Whether keeping a new descriptor leaves the RESERVE, and `spare` more, free.

    The kernel gives out the lowest free number. While no owner keeps one of the last numbers,
    these are always free for short use in any thread.
    """
    return fd < limit() - RESERVE - spare


def exhausted() -> str:
    """The message of a refusal for lack of descriptors."""
    return (
        f"the daemon may have {limit()} open files, and has none left for this: raise its "
        "`ulimit -n` (LimitNOFILE in a unit), or close sessions"
    )


def keep(fd: OwnedFd, spare: int = 0) -> OwnedFd:
    """`fd`, if there is room to keep it; else close it. Raises: OSError (EMFILE)."""
    if has_room(fd.fileno(), spare):
        return fd
    fd.close()
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def reopen_read_only(fd: int) -> OwnedFd:
    """A new open file description of the same memory that cannot be mapped for writing."""
    return OwnedFd(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))


def send_packet(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one packet on a SEQPACKET socket. The caller keeps the descriptors.

    Blocking: as the socket is set. Raises: OSError; BlockingIOError if it would block.
    """
    socket.send_fds(sock, [data], list(fds))


def recv_packet(
    sock: socket.socket, max_bytes: int, most: int = FDS_MAX
) -> tuple[bytes, list[OwnedFd]]:
    """Receive one packet, with up to `most` descriptors; empty data: the other side is gone.

    The caller owns the descriptors. Raises: OSError; ValueError if the packet or its
    descriptors were cut short; then it closes them all.
    """
    # not socket.recv_fds: it drops its flags, so executed programs would inherit the descriptors
    data, ancillary, flags, _ = sock.recvmsg(
        max_bytes, socket.CMSG_LEN(most * _INT.size), socket.MSG_CMSG_CLOEXEC
    )
    fds: list[OwnedFd] = [ReceivedFd(fd) for fd in _descriptors(ancillary)]
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            fd.close()
        if flags & socket.MSG_TRUNC:
            raise ValueError("packet too long")
        raise ValueError(
            f"more descriptors in a packet than {most}, or than this process may still have, "
            f"which is {limit()} in all (`ulimit -n`)"
        )
    return data, fds


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end when it connected, or began to listen."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> Iterator[int]:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) // _INT.size * _INT.size
            yield from (fd for (fd,) in _INT.iter_unpack(data[:whole]))


def is_shortage(error: BaseException | None) -> bool:
    """Whether the machine lacked a resource for a moment, without a mistake of the caller."""
    return isinstance(error, OSError) and error.errno in EXHAUSTED


def why_none(error: OSError) -> str:
    """The message of a refusal for this shortage."""
    return exhausted() if error.errno == errno.EMFILE else f"{error.strerror}: try again later"
