"""A Unix socket that lets in no more than there is room for. Knows no messages.

Who connects is a guest until it has shown that it belongs to a session. There are only so many
guests at a time, and they may stay only so long; where there are too many, the oldest of the
process that has most has to go: so a process that connects without end turns out itself. The
last descriptors are let to nobody.
"""

import asyncio
import logging
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from swapd.shared import fds
from swapd.shared.protocol import Code

log = logging.getLogger("swapd.daemon.door")

#: Connections that the kernel keeps until they are let in.
WAITING_MAX = 128
#: How long to wait before letting in others when there was no room.
PAUSE_S = 0.2
#: Guests of one door at a time, and how much of all descriptors they may have.
GUESTS_MAX = 64
GUESTS_SHARE = 24
#: How long a guest may take to show what it is.
GUEST_S = 5.0


class Guest(Protocol):
    """A connection, in the order of `pid`s of processes that made it."""

    pid: int

    def turn_out(self, why: str) -> None:
        """Close it, and leave the door's list. `why` is for people."""


class Guests:
    """Who has connected and is nobody yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stay_s: float) -> None:
        self._loop = loop
        self._stay_s = stay_s
        self._here: dict[Guest, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._here)

    def enter(self, guest: Guest) -> None:
        """It stays until `leave`, or until it is turned out."""
        why = f"was nobody's connection for {self._stay_s:g} s"
        self._here[guest] = self._loop.call_later(self._stay_s, guest.turn_out, why)
        if len(self._here) > fds.share(GUESTS_MAX, GUESTS_SHARE):
            self.make_room()

    def stay(self, guest: Guest) -> None:
        """It may stay until there are too many."""
        if guest in self._here:
            self._here[guest].cancel()

    def leave(self, guest: Guest) -> None:
        timer = self._here.pop(guest, None)
        if timer is not None:
            timer.cancel()

    def make_room(self) -> bool:
        """Turn out one of those that crowd the door; whether there was one."""
        if not self._here:
            return False
        count = Counter(guest.pid for guest in self._here)
        most = max(count.values())
        guest = next(guest for guest in self._here if count[guest.pid] == most)
        guest.turn_out(f"{len(self._here)} connections belong to no session; one has to go")
        return True


class Door:
    """Listens at `path` and calls `on_entry(sock, pid)` for each that is let in.

    The socket is then the callee's, does not block, and is of this user.
    """

    def __init__(
        self,
        path: Path,
        kind: socket.SocketKind,
        loop: asyncio.AbstractEventLoop,
        on_entry: Callable[[socket.socket, int], None],
        make_room: Callable[[], bool],
        refuse: Callable[[socket.socket, Code, str], None] = lambda sock, code, why: None,
    ) -> None:
        """`make_room()` turns out somebody, if that can be. `refuse(sock, code, why)` may tell
        who is not let in; the door closes `sock`."""
        self._loop = loop
        self._on_entry = on_entry
        self._make_room = make_room
        self._refuse = refuse
        self._pause: asyncio.TimerHandle | None = None
        self._sock = socket.socket(socket.AF_UNIX, kind)
        self._sock.setblocking(False)
        self._sock.bind(str(path))
        os.chmod(path, 0o600)
        self._sock.listen(WAITING_MAX)
        loop.add_reader(self._sock.fileno(), self._accept)

    def close(self) -> None:
        """Let in nobody any more. A second time does nothing."""
        if self._sock.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except (OSError, MemoryError) as exc:
            log.error("cannot let in another (%s); again in %g s", exc, PAUSE_S)
            self._make_room()
            self._loop.remove_reader(self._sock.fileno())
            self._pause = self._loop.call_later(PAUSE_S, self._resume)
            return
        sock.setblocking(False)
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(*_CREDENTIALS))
        if uid != os.getuid():
            log.warning("refused process %d of user %d", pid, uid)
            self._turn_away(sock, "bad_request", "this daemon serves another user")
        elif fds.has_room(sock.fileno()):
            self._on_entry(sock, pid)
        elif self._make_room() and (lower := _renumbered(sock)) is not None:
            self._on_entry(lower, pid)
        else:
            log.warning("refused process %d: %s", pid, fds.exhausted())
            self._turn_away(sock, "limit", fds.exhausted())

    def _turn_away(self, sock: socket.socket, code: Code, why: str) -> None:
        self._refuse(sock, code, why)
        sock.close()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock.fileno(), self._accept)


def _renumbered(sock: socket.socket) -> socket.socket | None:
    """It was let in by one of the last numbers; a lower one is free by now, unless a thread has it
    for a moment. Closes the first, or does nothing."""
    try:
        lower = sock.dup()
    except OSError:
        return None
    if not fds.has_room(lower.fileno()):
        lower.close()
        return None
    sock.close()
    return lower


_CREDENTIALS = (socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
