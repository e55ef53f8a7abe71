"""What is asked of the system: when a process ends, when a time is over, systemd's ear."""

import ctypes
import logging
import os
import select
import socket
from contextlib import suppress
from pathlib import Path

from swapd.shared.config import notify_socket
from swapd.shared.fds import OwnedFd, is_shortage

log = logging.getLogger("swapd.shared.system")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


_CLOCK_MONOTONIC = 1
_libc = ctypes.CDLL(None, use_errno=True)
_set_timer = _libc.timerfd_settime


class Alarm:
    """Wakes the one thread that sleeps in `wait`; to set it wakes nobody.

    A timerfd: a condition would wake that thread each time it is told a new time. To set it is
    a system call all the same, and in a virtual machine that has slept many a microsecond.
    """

    def __init__(self) -> None:
        """Raises: OSError."""
        fd = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._fd = OwnedFd(fd)

    def set(self, after_s: float) -> None:
        """Go off so much later, at once if that is past; not when it was set to before."""
        after = _Timespec(*divmod(max(int(after_s * 1e9), 1), 10**9))
        _set_timer(self._fd.fileno(), 0, ctypes.byref(_Itimerspec(value=after)), None)

    def ring(self) -> None:
        """Go off now."""
        self.set(0.0)

    def wait(self) -> None:
        """Block until it goes off. Once is enough for any number of times."""
        os.read(self._fd.fileno(), 8)

    def close(self) -> None:
        """Only when nobody waits."""
        self._fd.close()


def open_pidfd(pid: int) -> OwnedFd | None:
    """A descriptor that becomes readable when the process has ended; None if it has.

    Then all its threads have ended, and what it alone had open is closed. Raises: OSError if no
    descriptor is left.
    """
    try:
        fd = OwnedFd(os.pidfd_open(pid))
    except OSError as exc:
        if is_shortage(exc):
            raise
        return None  # gone, or in another pid namespace: then EOF is all there is
    poll = select.poll()
    poll.register(fd.fileno(), select.POLLIN)
    if poll.poll(0):
        fd.close()
        return None
    return fd


def has_ended(pid: int) -> bool:
    """Whether a process has ended, with all its threads. One that cannot be asked after has not.

    It says nothing that its first thread has no memory any more: others may go on for a while.
    """
    try:
        watch = open_pidfd(pid)
    except OSError:
        return False
    if watch is None:
        return True
    watch.close()
    return False


def is_alive(pid: int) -> bool:
    """Whether a process does anything yet, for those who only ask it. One that cannot be asked
    after does."""
    return not has_ended(pid) and _has_memory(pid)


def private_bytes(pid: int, name: str) -> int:
    """How much of memfds of this name a process has mapped as memory of its own; 0 if it is gone,
    or nobody may know."""
    total, memfd = 0, f"/memfd:{name}".encode()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
            if memfd not in line:
                continue  # as most of thousands, which Python would take long to look at
            span, access, _, _, _, *path = line.split(maxsplit=5)
            if path and access.endswith(b"p") and path[0].startswith(memfd):
                start, end = span.split(b"-")
                total += int(end, 16) - int(start, 16)
    return total


def is_stopped(pid: int) -> bool:
    """Whether a process does nothing until somebody sends it SIGCONT."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] in b"tT"
    except OSError:
        return False


def has_terminal() -> bool:
    """Whether this process has a terminal that controls it, and that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def notify_systemd(state: str) -> None:
    """Tell systemd, if it wants to hear: "READY=1", "WATCHDOG=1", "STOPPING=1"."""
    address = notify_socket()
    if address is None:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(state.encode(), address)
        except OSError as exc:
            log.warning("cannot tell systemd %s: %s", state, exc.strerror)


def _has_memory(pid: int) -> bool:
    """Whether a process has memory as far as its first thread knows.

    One that was killed gives up its memory first, then its sockets, and is a process for a
    moment longer: who only asks it need not wait for that.
    """
    try:
        return Path(f"/proc/{pid}/statm").read_bytes().split()[0] != b"0"
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True  # nobody can say; who is to wait for it does
