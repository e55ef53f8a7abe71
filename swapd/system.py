"""What the daemon asks of the system it runs on: when a process ends, and systemd's ear."""

import logging
import os
import select
import socket
from pathlib import Path

from swapd.config import notify_socket

log = logging.getLogger("swapd.system")


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it is as good as gone.

    The caller closes it.
    """
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None  # gone, or in another pid namespace: then EOF is all there is
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if poll.poll(0) or not _has_memory(pid):
        os.close(fd)
        return None
    return fd


def notify_systemd(state: str) -> None:
    """Tell systemd, if it wants to hear: "READY=1", "STOPPING=1"."""
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
    """Whether a process can still touch anything.

    One that was killed gives up its memory first, then its sockets, and is a process for a
    moment longer: nobody need wait for that.
    """
    try:
        return Path(f"/proc/{pid}/statm").read_bytes().split()[0] != b"0"
    except (FileNotFoundError, ProcessLookupError):
        return False
