"""File descriptors: owning them, limiting them, and sending them to another process."""

import errno
import os
import resource
import select
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

#: Errors of a resource that is exhausted for now, without a mistake of the caller.
EXHAUSTED = frozenset(
    (
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC),
        *(errno.EAGAIN, errno.ETOOMANYREFS),
    )
)

_INT = struct.Struct("i")
_POLL_MS_MAX = 2**31 - 1


class OwnedFd:
    """A descriptor that is closed exactly once: by `close`, or by the caller of `take`.

    A forked child does not close it, because the number may be another file's by then.
    """

    _fd = -1  # an interrupt may come before it has one

    def __init__(self, fd: int) -> None:
        self._process = os.getpid()
        self._fd = fd

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
        """The object keeps the descriptor."""
        if self._fd < 0:
            raise ValueError("descriptor is closed")
        return self._fd

    def await_readable(self, within_s: float | None = None) -> bool:
        """Block until there is something to read; return whether there is.

        `select.select` refuses numbers from 1024 on, which a server's process soon has.
        """
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return bool(poll.poll(None if within_s is None else min(within_s * 1000, _POLL_MS_MAX)))

    def take(self) -> int:
        """Return the descriptor for the caller to close."""
        fd, self._fd = self.fileno(), -1
        return fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self.take())


class ReceivedFd(OwnedFd):
    """A descriptor of a file that may be another process's. Errors of `close` (EIO of a network
    disk) are ignored: the number is free in any case."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def allow(count: int) -> int:
    """Let this process open `count` more descriptors, up to its hard limit.

    Returns the limit that this needs (`ulimit -n`), which may be over the hard limit.
    """
    needed = len(os.listdir("/proc/self/fd")) + count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return needed


def raise_limit() -> int:
    """Raise the limit of descriptors to the hard limit, which is returned."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def make_sure(count: int) -> None:
    """Raise OSError unless this process can open `count` more descriptors now."""
    with ExitStack() as opened:
        for _ in range(count):
            opened.enter_context(OwnedFd(os.eventfd(0, os.EFD_CLOEXEC)))


def share(most: int, of_limit: int) -> int:
    """Return `most`, but at most one `of_limit`-th of the limit of descriptors."""
    return min(most, limit() // of_limit)


def has_room(fd: int, spare: int = 0) -> bool:
    """Return whether keeping a new descriptor leaves RESERVE, and `spare` more, free. The kernel
    gives out the lowest free number: while no owner keeps one of the last, these are free for short
    use in any thread."""
    return fd < limit() - RESERVE - spare


def exhausted() -> str:
    return (
        f"the daemon may have {limit()} open files, and has none left for this: raise its "
        "`ulimit -n` (LimitNOFILE in a unit), or close sessions"
    )


def keep(fd: OwnedFd, spare: int = 0) -> OwnedFd:
    """Return `fd` if there is room to keep it; else close it. Raises: OSError (EMFILE)."""
    if has_room(fd.fileno(), spare):
        return fd
    fd.close()
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def reopen_read_only(fd: int) -> OwnedFd:
    """Return a new open file description of the same memory that cannot be mapped for writing."""
    return OwnedFd(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))


def send_packet(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one packet on a SEQPACKET socket. The caller keeps the descriptors.

    Blocks if the socket does. Raises: OSError; BlockingIOError if it would block.
    """
    socket.send_fds(sock, [data], list(fds))


def recv_packet(
    sock: socket.socket, max_bytes: int, most: int = FDS_MAX
) -> tuple[bytes, list[OwnedFd]]:
    """Receive one packet, with up to `most` descriptors. Empty data: the other side is gone.

    The caller owns the descriptors. Raises: OSError; ValueError if the packet or its descriptors
    were cut short, after closing all of them.
    """
    # Not socket.recv_fds, which drops its flags: executed programs would inherit the descriptors.
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
    """Return the process and user at the other end, as of when it connected or began to listen."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> Iterator[int]:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) // _INT.size * _INT.size
            yield from (fd for (fd,) in _INT.iter_unpack(data[:whole]))


def is_shortage(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in EXHAUSTED


def why_none(error: OSError) -> str:
    return exhausted() if error.errno == errno.EMFILE else f"{error.strerror}: try again later"
