"""A Unix socket that accepts no more connections than there is room for. Knows no messages.

A connection is a guest until it shows that it belongs to a session. Guests are limited in number
and time, and never get the last descriptors. Beyond the limit, the oldest guest of the process with
the most goes, so that a process that connects endlessly closes its own connections.
"""

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from swapd.shared import fds
from swapd.shared.protocol import Code

log = logging.getLogger("swapd.daemon.door")

#: Listen backlog.
WAITING_MAX = 128
#: Pause after a failed accept.
PAUSE_S = 0.2
#: Limit of guests at one door, and their share of all descriptors.
GUESTS_MAX = 64
GUESTS_SHARE = 24
#: How long a guest may take to show its session.
GUEST_S = 5.0


class Guest(Protocol):
    """A connection that belongs to no session yet. Process `pid` made it."""

    pid: int

    def turn_out(self, why: str) -> None:
        """Close the connection, and call `Door.leave`. `why` is for people."""


class Door:
    """Listens at `path`, and calls `on_entry(sock, pid)` for each connection of this user's
    processes. The callee owns the socket, which is non-blocking. Has the guests, oldest first."""

    def __init__(
        self,
        path: Path,
        kind: socket.SocketKind,
        loop: asyncio.AbstractEventLoop,
        on_entry: Callable[[socket.socket, int], None],
        refuse: Callable[[socket.socket, Code, str], None] = lambda sock, code, why: None,
    ) -> None:
        """`refuse(sock, code, why)` may tell a refused client why; the door closes `sock`."""
        self._loop = loop
        self._on_entry = on_entry
        self._refuse = refuse
        self._pause: asyncio.TimerHandle | None = None
        self._guests: dict[Guest, asyncio.TimerHandle] = {}
        self._sock = socket.socket(socket.AF_UNIX, kind)
        self._sock.setblocking(False)
        self._sock.bind(str(path))
        os.chmod(path, 0o600)
        self._sock.listen(WAITING_MAX)
        loop.add_reader(self._sock.fileno(), self._accept)

    def close(self) -> None:
        """May be called more than once."""
        if self._sock.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    # --- guests --------------------------------------------------------------------------

    def enter(self, guest: Guest) -> None:
        """Add a guest, and turn it out after GUEST_S."""
        why = f"belonged to no session for {GUEST_S:g} s"
        self._guests[guest] = self._loop.call_later(GUEST_S, guest.turn_out, why)
        if len(self._guests) > fds.share(GUESTS_MAX, GUESTS_SHARE):
            self.make_room()

    def stay(self, guest: Guest) -> None:
        """Let a guest stay beyond GUEST_S, until there are too many."""
        if guest in self._guests:
            self._guests[guest].cancel()

    def leave(self, guest: Guest) -> None:
        timer = self._guests.pop(guest, None)
        if timer is not None:
            timer.cancel()

    def make_room(self) -> bool:
        """Turn out the oldest guest of the process with the most; return False without guests."""
        if not self._guests:
            return False
        count = Counter(guest.pid for guest in self._guests)
        most = max(count.values())
        guest = next(guest for guest in self._guests if count[guest.pid] == most)
        guest.turn_out(f"{len(self._guests)} connections belong to no session; one has to go")
        return True

    # --- entries -------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except (OSError, MemoryError) as exc:
            log.error("cannot let in another connection (%s); again in %g s", exc, PAUSE_S)
            self.make_room()
            fd, loop = self._sock.fileno(), self._loop
            loop.remove_reader(fd)
            self._pause = loop.call_later(PAUSE_S, loop.add_reader, fd, self._accept)
            return
        sock.setblocking(False)
        pid, uid = fds.peer_of(sock)
        if uid != os.getuid():
            log.warning("refused process %d of user %d", pid, uid)
            self._turn_away(sock, "bad_request", "this daemon serves another user")
        elif fds.has_room(sock.fileno()):
            self._on_entry(sock, pid)
        elif self.make_room() and (lower := _renumbered(sock)) is not None:
            self._on_entry(lower, pid)
        else:
            log.warning("refused process %d: %s", pid, fds.exhausted())
            self._turn_away(sock, "limit", fds.exhausted())

    def _turn_away(self, sock: socket.socket, code: Code, why: str) -> None:
        self._refuse(sock, code, why)
        sock.close()


def _renumbered(sock: socket.socket) -> socket.socket | None:
    """Move a socket from one of the last descriptors to a lower one, and close `sock`. Return None,
    and leave `sock` open, if none is free: another thread may briefly have it."""
    try:
        lower = sock.dup()
    except OSError:
        return None
    if not fds.has_room(lower.fileno()):
        lower.close()
        return None
    sock.close()
    return lower
