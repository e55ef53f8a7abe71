"""File descriptors: who owns one, and how it crosses a process border.

No protocol knowledge: a packet is bytes plus descriptors.
"""

import errno
import os
import resource
import socket
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType

#: Most descriptors in one packet. Linux allows 253.
FDS_MAX = 64

#: Numbers that nobody keeps: the swap log, what is asked of /proc, files on their way to a worker.
RESERVE = 24
#: With fewer a daemon can serve nobody.
LEAST = 96

#: What a resource that ran out says, for now: whoever asked did nothing wrong.
EXHAUSTED = frozenset(
    (
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC),
        *(errno.EAGAIN, errno.ETOOMANYREFS),
    )
)

_INT = struct.Struct("i")


class OwnedFd:
    """A descriptor that is closed exactly once: by `close`, or by whoever `take`s it.

    Dropped in a forked child it is not closed there: the number may be another file's by then.
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


def allow(count: int) -> int:
    """Let this process open `count` more descriptors than it has, as far as it may.

    Returns the limit that takes (`ulimit -n`), which is more than the process may have if that
    was not enough.
    """
    needed = len(os.listdir("/proc/self/fd")) + count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return needed


def raise_limit() -> int:
    """Let this process have as many descriptors as it may; return how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def limit() -> int:
    """How many descriptors this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def make_sure(count: int) -> None:
    """Check that this process may open so many more just now. Raises: OSError."""
    with ExitStack() as opened:
        for _ in range(count):
            opened.enter_context(OwnedFd(os.eventfd(0, os.EFD_CLOEXEC)))


def share(most: int, of_limit: int) -> int:
    """`most`, or less where this process may have few descriptors: one `of_limit`-th of them."""
    return min(most, limit() // of_limit)


def has_room(fd: int, spare: int = 0) -> bool:
    """Whether a new descriptor that is to be kept leaves the RESERVE, and so many more, alone.

    The lowest number that is free is given out: while nobody keeps one of the last numbers, there
    are always these for what is open for a moment only, in whatever thread.
    """
    return fd < limit() - RESERVE - spare


def exhausted() -> str:
    """Why what needs a descriptor is refused, and what to do."""
    return (
        f"the daemon may have {limit()} open files, and has none left for this: raise its "
        "`ulimit -n` (LimitNOFILE in a unit), or close what is not needed"
    )


def keep(fd: OwnedFd, spare: int = 0) -> OwnedFd:
    """`fd`, if there is room to keep it; else it is closed. Raises: OSError (EMFILE)."""
    if has_room(fd.fileno(), spare):
        return fd
    fd.close()
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


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
    # not socket.recv_fds: it forgets its flags, and all that is executed would inherit these
    data, ancillary, flags, _ = sock.recvmsg(
        max_bytes, socket.CMSG_LEN(FDS_MAX * _INT.size), socket.MSG_CMSG_CLOEXEC
    )
    fds = [OwnedFd(fd) for fd in _descriptors(ancillary)]
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            fd.close()
        if flags & socket.MSG_TRUNC:
            raise ValueError("packet too long")
        raise ValueError(
            f"more descriptors in a packet than {FDS_MAX}, or than this process may still have, "
            f"which is {limit()} in all (`ulimit -n`)"
        )
    return data, fds


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> Iterator[int]:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) // _INT.size * _INT.size
            yield from (fd for (fd,) in _INT.iter_unpack(data[:whole]))


def is_shortage(error: BaseException | None) -> bool:
    """Whether the machine lacked something for a moment; nobody made a mistake then."""
    return isinstance(error, OSError) and error.errno in EXHAUSTED


def why_none(error: OSError) -> str:
    """Why what the system has none of is refused."""
    return exhausted() if error.errno == errno.EMFILE else f"{error.strerror}: try again later"
