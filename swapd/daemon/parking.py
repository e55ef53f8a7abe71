"""Parks host copies that no component uses, so that the next daemon gets them.

They are in systemd's descriptor store if the unit has one, else with a keeper (`keeper.py`), which
outlives the daemon and takes the same messages. After `swapd upgrade`, the next program of this
process inherits them.
"""

import logging
import os
import select
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress

from swapd.core.events import HostCopyFound
from swapd.core.ledger import HostCopyIndex
from swapd.daemon import keeper, parked_copies
from swapd.daemon.dispatch import Inbox
from swapd.daemon.host_copies import NAME, HostCopies, HostCopyError
from swapd.daemon.parked_copies import Manifest, ParkedHostCopy
from swapd.device.base import Device
from swapd.shared.config import NOTIFY_VARIABLE, STORE_VARIABLE, variable
from swapd.shared.fds import OwnedFd, peer_of, recv_packet, send_packet
from swapd.shared.runtime_dir import KEEPER, Folder
from swapd.shared.system import notify_systemd
from swapd.shared.units import seconds, size

log = logging.getLogger("swapd.daemon.parking")

#: Time limit for a keeper to hand over what it holds, and to read what it is sent.
ANSWER_S = 2.0
#: First and longest pause before another keeper; doubles while no keeper answers.
AGAIN_S = 1.0
AGAIN_MAX_S = 60.0
_MESSAGE_MAX_BYTES = 4096


class Parking:
    """Used in the loop."""

    def __init__(
        self, host: HostCopyIndex, copies: HostCopies, folder: Folder, inbox: Inbox
    ) -> None:
        self._host = host
        self._copies = copies
        self._folder = folder
        self._inbox = inbox
        self._keeper: socket.socket | None = None
        self._again_s = AGAIN_S
        self._waits = False
        #: Names of parked host copies in the store, by uid.
        self._names: dict[int, str] = {}

    def park(self, uid: int) -> None:
        if uid in self._names or uid not in self._host.kept or self._waits:
            return
        fd = self._copies.fileno(uid)
        if not self._copies.is_adoptable(fd, self._host.owners[uid].nbytes):
            return
        try:
            with self._manifest(uid) as manifest:
                self._tell("FDSTORE=1", name := _name(fd), (fd, manifest.fileno()))
        except OSError as exc:
            return self._lose(str(exc))
        self._names[uid] = name

    def unpark(self, uid: int, *, waits: bool = True) -> OwnedFd | None:
        """Stop parking a host copy. If it was parked and the caller `waits` for its memory, return
        a descriptor that hangs up once the memory is released."""
        if (name := self._names.pop(uid, None)) is None:
            return None
        reader = None
        try:
            self._tell("FDSTOREREMOVE=1", name)
            if waits:
                reader, writer = map(OwnedFd, os.pipe2(os.O_CLOEXEC))
                with writer:
                    self._tell("BARRIER=1", files=(writer.fileno(),))
        except OSError as exc:
            self._lose(str(exc))
        if not self._names:
            self._disconnect()  # ends the keeper
        return reader

    def leave(self) -> None:
        """Leave kept host copies to the next program of this process, see `inherited`."""
        for uid in self._host.kept:
            with suppress(OSError):  # no descriptor is left, but it may be parked
                os.set_inheritable(self._manifest(uid).take(), True)
                os.set_inheritable(self._copies.fileno(uid), True)

    def close(self) -> None:
        """Drop everything parked."""
        for uid in list(self._names):
            self.unpark(uid, waits=False)

    def _manifest(self, uid: int) -> OwnedFd:
        """Raises: OSError."""
        c, inode = self._host.owners[uid], parked_copies.inode(self._copies.fileno(uid))
        now = self._inbox.clock()
        return Manifest(c.name, c.part_of, c.content, c.layout, c.nbytes, inode, now).write()

    def _tell(self, what: str, name: str = "", files: Sequence[int] = ()) -> None:
        """systemd takes a BARRIER=1 with nothing beside it. Raises: OSError."""
        message = f"{what}\nFDNAME={name}" if name else what
        if _has_store():
            return notify_systemd(message, files)
        if self._keeper is None:
            self._start()
            self._use(self._connect())
        assert self._keeper is not None
        try:
            send_packet(self._keeper, message.encode(), files)
        except BlockingIOError:  # hundreds at once, and perhaps the keeper is only starting
            full = select.poll()
            full.register(self._keeper, select.POLLOUT)
            full.poll(ANSWER_S * 1e3)
            send_packet(self._keeper, message.encode(), files)

    # --- the next daemon -----------------------------------------------------------------

    def take_back(self, most: int, device: Device) -> None:
        """Make the core keep up to `most` bytes of what earlier daemons parked, the last parked
        first. Call before the first session."""
        if most and not device.read_only_pins:
            log.warning("--keep-host ends with this daemon: the driver pins no sealed host copies")
        budget = device.chunks * device.chunk_bytes
        inherited, handed = list(parked_copies.inherited()), self._handed_over()
        stored = {_name(fd.fileno()) for fd in (inherited if _has_store() else handed)}
        taken: dict[int, Manifest] = {}
        for number, one in enumerate(parked_copies.sort((*inherited, *handed)), 1):
            if (name := _name(one.fd.fileno())) in stored:
                self._names[-number] = name
            room = most - sum(manifest.nbytes for manifest in taken.values())
            try:
                taken[-number] = self._adopt(-number, one, taken.values(), room, budget)
            except (ValueError, HostCopyError, OSError) as exc:
                log.warning("a kept host copy is dropped: %s", exc)
                one.fd.close()
        for uid in self._names.keys() - taken.keys():
            self.unpark(uid, waits=False)
        if not self._names:
            self._disconnect()
        now = self._inbox.clock()
        for uid, m in reversed(taken.items()):  # the first that was parked is the first to go
            found = HostCopyFound(now, uid, m.name, m.nbytes, m.content, m.layout, m.part_of)
            self._inbox.post(found)

    def _adopt(
        self, uid: int, one: ParkedHostCopy, taken: Collection[Manifest], room: int, budget: int
    ) -> Manifest:
        """Raises: ValueError, HostCopyError, OSError."""
        if (manifest := one.manifest) is None:
            raise ValueError("it has no manifest")
        what, nbytes = f"{manifest.name} ({size(manifest.nbytes)})", manifest.nbytes
        key = manifest.content, manifest.layout, nbytes
        if not self._copies.is_adoptable(one.fd.fileno(), nbytes):
            raise ValueError(f"{what} is cut short, or not sealed")
        if any((t.content, t.layout, t.nbytes) == key for t in taken):
            raise ValueError(f"{what} is there twice")
        if nbytes > budget:
            raise ValueError(f"{what} is larger than the budget")
        if nbytes > room:
            raise ValueError(f"{what} is more than --keep-host has room for")
        for _ in self._copies.adopt(uid, nbytes, one.fd):
            pass
        return manifest

    def _handed_over(self) -> list[OwnedFd]:
        try:
            daemon = self._connect()
        except (FileNotFoundError, ConnectionRefusedError):
            self._remove_socket()
            return []
        daemon.settimeout(ANSWER_S)
        found: list[OwnedFd] = []
        try:
            _check_peer(daemon)
            while True:
                message, files = recv_packet(daemon, _MESSAGE_MAX_BYTES)
                if not message.startswith(b"FDSTORE=1\n"):
                    break
                found += files
            if not message:
                raise OSError("it has ended")
        except (OSError, ValueError) as exc:
            daemon.close()
            for fd in found:
                fd.close()
            self._remove_socket()
            log.warning("the keeper of kept host copies: %s; what it holds is dropped", exc)
            return []
        daemon.setblocking(False)
        self._use(daemon)
        return found

    # --- the keeper ----------------------------------------------------------------------

    def _start(self) -> None:
        """Start a keeper, which reads what was sent before it ran. Raises: OSError."""
        self._remove_socket()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            path = self._folder.inside / KEEPER
            door.bind(str(path))
            path.chmod(0o600)
            door.listen()
            program = [sys.executable, "-I", "-S", keeper.__file__, KEEPER]
            process = subprocess.Popen(
                [*program, str(path.stat().st_ino)],
                stdin=door.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=self._folder.inside,
                start_new_session=True,
            )
        watch = os.pidfd_open(process.pid)

        def ended() -> None:
            self._inbox.loop.remove_reader(watch)
            os.close(watch)
            process.wait()

        self._inbox.loop.add_reader(watch, ended)

    def _connect(self) -> socket.socket:
        """Raises: OSError."""
        daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        daemon.setblocking(False)
        try:
            daemon.connect(str(self._folder.inside / KEEPER))
        except OSError:
            daemon.close()
            raise
        return daemon

    def _use(self, daemon: socket.socket) -> None:
        self._keeper = daemon
        self._inbox.loop.add_reader(daemon.fileno(), self._hear)

    def _disconnect(self) -> None:
        if self._keeper is not None:
            self._inbox.loop.remove_reader(self._keeper.fileno())
            self._keeper.close()
            self._keeper = None
            self._remove_socket()

    def _hear(self) -> None:
        """Handle the keeper's READY=1 or its end; it sends nothing else."""
        assert self._keeper is not None
        with suppress(BlockingIOError, ConnectionError):
            if self._keeper.recv(_MESSAGE_MAX_BYTES):
                self._again_s = AGAIN_S
                return
        self._lose("it has ended")

    def _lose(self, why: str) -> None:
        """Disconnect, and park again later what is still kept then."""
        self._disconnect()
        self._names.clear()
        again = seconds(self._again_s)
        log.warning("the keeper of kept host copies: %s; another starts in %s", why, again)
        if not self._waits:
            self._waits = True
            self._inbox.loop.call_later(self._again_s, self._park_again)
            self._again_s = min(2 * self._again_s, AGAIN_MAX_S)

    def _park_again(self) -> None:
        self._waits = False
        for uid in list(self._host.kept):
            self.park(uid)

    def _remove_socket(self) -> None:
        with suppress(OSError):  # if it stays, starting the next keeper fails
            (self._folder.inside / KEEPER).unlink()


def _has_store() -> bool:
    return None not in (variable(STORE_VARIABLE), variable(NOTIFY_VARIABLE))


def _name(fd: int) -> str:
    return f"{NAME}-{os.fstat(fd).st_ino}"


def _check_peer(daemon: socket.socket) -> None:
    """Raises: OSError if the process at the other end belongs to another user."""
    _, uid = peer_of(daemon)
    if uid != os.getuid():
        raise PermissionError(f"it belongs to user {uid}")
