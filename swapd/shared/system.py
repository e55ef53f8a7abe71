"""Services of the operating system: ends of processes, systemd's notifications."""

import logging
import os
import select
import socket
from contextlib import suppress
from pathlib import Path

from swapd.shared.config import notify_socket
from swapd.shared.fds import OwnedFd, is_shortage

log = logging.getLogger("swapd.shared.system")


def open_pidfd(pid: int) -> OwnedFd | None:
    """A descriptor that becomes readable when the process has ended; None if it has already.

    By then all its threads have ended, and its own files are closed. Raises: OSError if no
    descriptor is left.
    """
    try:
        fd = OwnedFd(os.pidfd_open(pid))
    except OSError as exc:
        if is_shortage(exc):
            raise
        return None  # gone, or in another pid namespace, where EOF is the only sign
    poll = select.poll()
    poll.register(fd.fileno(), select.POLLIN)
    if poll.poll(0):
        fd.close()
        return None
    return fd


def has_ended(pid: int) -> bool:
    """Whether a process has ended, with all its threads. False if the system does not say.

    A first thread without memory proves nothing: other threads may run for a while.
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
    """Whether a process still runs, for status only: it may be ending. True if the system does not
    say."""
    return not has_ended(pid) and _has_memory(pid)


def private_bytes(pid: int, name: str) -> int:
    """Bytes of memfds of this name that a process has mapped privately; 0 if it is gone or not
    readable."""
    total, memfd = 0, f"/memfd:{name}".encode()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
            if memfd not in line:
                continue  # most of thousands of lines, which are slow to parse in Python
            span, access, _, _, _, *path = line.split(maxsplit=5)
            if path and access.endswith(b"p") and path[0].startswith(memfd):
                start, end = span.split(b"-")
                total += int(end, 16) - int(start, 16)
    return total


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped until a SIGCONT."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] in b"tT"
    except OSError:
        return False


def has_terminal() -> bool:
    """Whether this process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def notify_systemd(state: str) -> None:
    """Send systemd a state, if it listens: "READY=1", "WATCHDOG=1", "STOPPING=1"."""
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
    """Whether a process has memory, as its first thread shows it.

    A killed process gives up its memory first, then its sockets, and exists a moment longer. A
    status need not wait for that.
    """
    try:
        return Path(f"/proc/{pid}/statm").read_bytes().split()[0] != b"0"
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True  # unknown: `has_ended` decides
