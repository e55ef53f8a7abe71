"""A model of the client's side of a session: connections, requests, mappings."""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

from swapd.daemon import zmtp
from swapd.device.base import files_of
from swapd.shared import protocol, runtime_dir
from swapd.shared.board import LANDED, ArrivalFailed, Board, word
from swapd.shared.fds import OwnedFd, recv_packet, send_packet
from swapd.shared.protocol import Placement
from tests.simulation.machine import CHUNK, PER_FILE, Machine, Mapped, SimulatedDevice

#: Virtual seconds after which a message that was due is lost.
PATIENCE_S = 600.0


class SessionOver(Exception):
    """The daemon or the process has ended the session."""


class Refusal(Exception):
    pass


class Part:
    """A component of a worker."""

    def __init__(self, register: protocol.Register, content: bytes) -> None:
        self.name, self.nbytes = register.name, register.nbytes
        self.mutable, self.scratch = register.mutable, register.scratch
        #: Its contents, one for each update; and the number of the one that is committed.
        self.versions, self.committed = [content], 0
        self.master: OwnedFd | None = None
        self.slot = 0
        self.place: Placement | None = None
        self.mapped: Mapped | None = None
        #: The newest generation that was mapped; of scratch, the generation of its contents.
        self.newest = self.contents = 0
        self.changing = False

    def on_host(self) -> bytes:
        assert self.master is not None
        return os.pread(self.master.fileno(), self.nbytes, 0)


class Lease:
    """`since`: by name, the oldest version that it may see."""

    def __init__(self, names: tuple[str, ...], since: dict[str, int]) -> None:
        self.names, self.since = names, since
        self.parts: list[Part] = []
        self.mapped: list[Mapped] = []
        #: The generations that it was granted.
        self.granted: dict[str, int] = {}
        self.ended_at = 0.0

    def may_see(self, other: "Lease") -> None:
        shared = self.since.keys() & other.since.keys()
        self.since |= {n: min(self.since[n], other.since[n]) for n in shared}


class Channel:
    """One connection of ZeroMQ."""

    def __init__(self, client: "Client", number: int) -> None:
        self._client = client
        self.sock = client.connect(socket.SOCK_STREAM, runtime_dir.RPC)
        self._decoder = zmtp.Decoder((b"ROUTER",), 1 << 24)
        self.sock.send(zmtp.GREETING + zmtp.ready(b"DEALER", client.token + bytes((number,))))
        client.loop.add_reader(self.sock.fileno(), self.readable)

    def send(self, data: bytes) -> None:
        with suppress(OSError):
            self.sock.send(zmtp.frame(data))

    def readable(self) -> None:
        with suppress(ConnectionError):
            if data := self.sock.recv(1 << 16):
                self._decoder.feed(data)
                while (message := self._decoder.next()) is not None:
                    self._client.on_reply(protocol.decode_reply(message[0]))
                return
        self._client.loop.remove_reader(self.sock.fileno())
        self._client.loop.call_later(PATIENCE_S, self._client.on_lost_channel)


class Client:
    """One session of one process."""

    def __init__(self, machine: Machine, device: SimulatedDevice, pid: int) -> None:
        self.machine, self.device, self.loop, self.pid = machine, device, machine.loop, pid
        self.rng = Random(machine.rng.random())
        machine.ends[pid] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.parts: dict[str, Part] = {}
        self.token = b""
        #: `guilty`: it was late, or broke the protocol, and the daemon may end its session.
        self.over = self.guilty = self.leaving = False
        self.pending: dict[int, asyncio.Future[Any]] = {}
        self.leases: dict[int, Lease] = {}
        self.cancelled: set[int] = set()
        self._broken: set[int] = set()
        #: The connection of each acquire.
        self._asked_at: dict[int, Channel] = {}
        self.masters: dict[int, tuple[protocol.Master, OwnedFd]] = {}
        self._files: set[tuple[int, bool]] = set()
        self._changed = asyncio.Event()
        self.last = 0
        self.channels: list[Channel] = []
        self.board: Board | None = None
        self._goodbye = ""
        self.line: socket.socket | None = None
        self.letting_go: socket.socket | None = None

    def __str__(self) -> str:
        return f"worker {self.pid}"

    def blame(self, why: str) -> None:
        """The daemon has broken a promise, unless this session may have been ended."""
        if not (self.guilty or self.machine.jumped):
            self.machine.fail(f"{self} {why}")

    # --- connections ---------------------------------------------------------------------

    def connect(self, kind: int, name: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, kind)
        sock.setblocking(False)
        self.machine.connecting[name].append(self.pid)
        try:
            sock.connect(str(self.machine.folder / name))
        except OSError as exc:
            self.machine.connecting[name].pop()
            sock.close()
            raise SessionOver from exc
        return sock

    async def join(self) -> None:
        self.line = self.connect(socket.SOCK_SEQPACKET, runtime_dir.LIFELINE)
        await self.nap(0.01)
        self.loop.add_reader(self.line.fileno(), self._on_line)
        self.tell(protocol.Hello(protocol.VERSION, str(self)))
        await self.until(lambda: self.token)
        self.channels = [Channel(self, n) for n in range(self.rng.choice((1, 1, 2)))]

    def deaf(self, seconds: float) -> None:
        """Read nothing from one connection for so long."""
        self.guilty |= seconds > 1
        readers = [(c.sock, c.readable) for c in self.channels]
        sock, reader = self.rng.choice([(self.line, self._on_line), *readers])
        if sock is not None and sock.fileno() >= 0:
            self.loop.remove_reader(sock.fileno())
            self.loop.call_later(seconds, self._hear_again, sock, reader)

    def _hear_again(self, sock: socket.socket, reader: Callable[[], None]) -> None:
        if sock.fileno() >= 0:
            self.loop.add_reader(sock.fileno(), reader)

    async def nap(self, seconds: float) -> None:
        await asyncio.sleep(self.rng.random() * seconds)

    async def until(self, met: Callable[[], object]) -> None:
        """Wait for the lifeline."""
        end = self.loop.time() + PATIENCE_S
        while not met():
            if self.over:
                raise SessionOver
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), PATIENCE_S)
            if self.loop.time() > end:
                self.blame("waits for ever for its lifeline")

    def tell(self, message: protocol.FromClient, fds: tuple[int, ...] = ()) -> None:
        if not self.over and self.line is not None:
            self.machine.note(self, message)
            with suppress(OSError):
                send_packet(self.line, protocol.encode(message), fds)

    def send(self, kind: type, *args: Any, **fields: Any) -> Any:
        """Send a request; return it."""
        if self.over or not self.channels:
            raise SessionOver
        self.last += 1
        request = kind(self.last, *args, **fields)
        self.machine.note(self, request)
        if not isinstance(request, protocol.Release | protocol.Cancel):
            self.pending[request.id] = self.loop.create_future()
        channel = self.rng.choice(self.channels)
        if isinstance(request, protocol.Cancel):  # a thread cancels where it has asked
            channel = self._asked_at.pop(request.acquire)
        elif isinstance(request, protocol.Acquire):
            self._asked_at[request.id] = channel
        channel.send(protocol.encode(request))
        return request

    async def answer(self, request: protocol.Request) -> Any:
        """Its answer. Raises: Refusal, SessionOver."""
        reply = await self.pending[request.id]
        if isinstance(reply, protocol.Refused):
            raise Refusal(reply.code)
        return reply

    async def ask(self, kind: type, *args: Any) -> Any:
        return await self.answer(self.send(kind, *args))

    def on_reply(self, reply: protocol.AnyReply) -> None:
        self.machine.note(self, f"hears {reply}")
        if (future := self.pending.pop(reply.id, None)) is not None:
            if not future.done():
                future.set_result(reply)
        elif reply.id in self.cancelled:
            self.cancelled.discard(reply.id)
        elif not (self.over or getattr(reply, "code", "") in ("no_session", "bad_request")):
            self.machine.fail(f"{self} has no such request open: {reply}")

    def _on_line(self) -> None:
        assert self.line is not None
        try:
            data, fds = recv_packet(self.line, protocol.LIFELINE_MAX_BYTES)
        except ConnectionError:
            return
        if not data:
            self.loop.remove_reader(self.line.fileno())
            return self._on_eof()
        message = protocol.decode_from_daemon(data)
        self.machine.note(self, f"hears {message}")
        self._obey(message, fds)
        for fd in fds:
            fd.close()
        self._changed.set()

    def _obey(self, message: protocol.FromDaemon, fds: list[OwnedFd]) -> None:
        match message:
            case protocol.Welcome():
                self.token, self.board = message.token, Board(fds[0])
            case protocol.Master():
                self.masters[message.request] = message, fds.pop()
            case protocol.Files():
                self._files |= {(n, message.writable) for n in message.numbers}
            case protocol.Revoke():
                self._on_revoke(message)
            case protocol.Drop():
                self._on_drop(message)
            case protocol.Broken():
                self._broken.add(message.generation)
            case protocol.Saved() if not message.anew:
                if (part := self.parts.get(message.name)) and part.scratch != "dropped":
                    is_last = part.newest == message.generation
                    if is_last and (found := part.on_host()) != part.versions[-1]:
                        self.machine.fail(f"{self}: {message}, and it has {found!r}")
            case protocol.Goodbye():
                self._goodbye = message.code
                if message.code not in ("stopping", "limit") and not self.over:
                    self.blame(f"did nothing wrong, and is ended: {message}")

    def on_lost_channel(self) -> None:
        if not self.over:
            self.blame("has no connection for requests, and its session goes on")

    def _on_eof(self) -> None:
        self.machine.note(self, "its lifeline is ended")
        if not (self.over or self._goodbye or self.machine.stopped or self.leaving):
            self.blame("is ended without a word")
        self.end()

    def end(self) -> None:
        """The session is over: others may use the memory of clean components."""
        self.over = True
        self._changed.set()
        for future in self.pending.values():
            if not future.done():
                future.set_exception(SessionOver())
                future.exception()
        self.pending.clear()
        for part in self.parts.values():
            if part.mapped is not None and not part.mapped.writable:
                self.unmap(part)

    # --- memory --------------------------------------------------------------------------

    def _on_revoke(self, revoke: protocol.Revoke) -> None:
        part = self.parts.get(revoke.name)
        generation = revoke.generation
        for lease in self.leases.values():
            if lease.granted.get(revoke.name) == generation and generation not in self._broken:
                self.machine.fail(f"{self} holds {revoke.name}, which is revoked: {revoke}")

        def unmap() -> None:
            if part and part.place and part.place.generation <= generation:
                self.unmap(part)
            if revoke.ack:
                self.tell(protocol.Revoked(revoke.name, generation))

        self._late(unmap)

    def _late(self, call: Callable[..., None], *args: Any) -> None:
        late = 0 if self.machine.calm else self.rng.choice((0, 0, 0.001, 0.05, 0.5, 6))
        self.guilty |= late > 1
        if late:
            self.loop.call_later(late, call, *args)
        else:
            call(*args)

    def _on_drop(self, drop: protocol.Drop) -> None:
        for part in self.parts.values():
            if part.mapped and any(c // PER_FILE in drop.numbers for c in part.mapped.chunks):
                if part.mapped.held:
                    self.machine.fail(f"{self} holds {part.name}, and is to drop it: {drop}")
                self.unmap(part)
        self._files -= {(n, w) for n in drop.numbers for w in (False, True)}
        self._late(self.tell, protocol.Dropped(drop.ticket))

    def imports(self, file: int) -> bool:
        """Whether it has that file of the device's memory."""
        return not self.over and bool(self._files & {(file, False), (file, True)})

    def unmap(self, part: Part) -> None:
        if part.mapped is not None:
            self.machine.mapped.remove(part.mapped)
        part.mapped = part.place = None

    async def map(self, place: Placement, lease: Lease) -> None:
        """Map it for a lease, once it has arrived, if ever."""
        part = self.parts[place.name]
        needed = {(n, part.mutable) for n in files_of(place.runs, PER_FILE)}
        await self.until(lambda: needed <= self._files)
        if not await self._arrived(part, place):
            return
        if part.place is None or part.place.generation != place.generation:
            self.unmap(part)
            part.place, part.newest = place, place.generation
            part.mapped = Mapped(self.pid, part.name, place.runs, part.mutable)
            self.machine.mapped.append(part.mapped)
        assert part.mapped is not None
        part.mapped.held += 1
        lease.mapped.append(part.mapped)
        lease.parts.append(part)
        if part.scratch and part.contents != place.contents:
            if part.scratch == "saved" and part.contents and not self.machine.failed:
                self.machine.fail(f"{self}: the saved contents of {part.name} are gone: {place}")
            part.contents, part.versions = place.contents, [bytes(part.nbytes)]

    async def _arrived(self, part: Part, place: Placement) -> bool:
        """Whether all of it is there; an early grant has to wait."""
        assert self.board is not None
        target = word(place.generation, -(-part.nbytes // CHUNK), LANDED)
        with suppress(ArrivalFailed):
            for tries in range(1000):
                if self.over or place.generation in self._broken:
                    return False
                if self.board.has(part.slot, target, LANDED):
                    return True
                await self.nap(0.002 * tries)
            self.blame(f"has a lease of {part.name}, which never arrives")
        return False

    def read(self, part: Part) -> bytes:
        assert part.mapped is not None
        memory, chunks = self.device.memory, part.mapped.chunks
        return b"".join(memory[c * CHUNK : (c + 1) * CHUNK] for c in chunks)[: part.nbytes]

    def write(self, part: Part) -> None:
        """Other bytes."""
        assert part.mapped is not None
        part.versions[-1] = data = self.rng.randbytes(part.nbytes)
        for i, c in enumerate(part.mapped.chunks):
            self.device.put(c * CHUNK, data[i * CHUNK : (i + 1) * CHUNK])

    def check(self, lease: Lease) -> None:
        """It sees the bytes that it must see."""
        if self.over or self.device.lost or (self.board and self.board.ended):
            return
        for part in lease.parts:
            if part.mapped in lease.mapped and part.mapped is not None:
                found, allowed = self.read(part), part.versions[lease.since[part.name] :]
                if found not in allowed:
                    self.machine.fail(f"{self} sees {found!r} in {part.name}, and not {allowed}")
