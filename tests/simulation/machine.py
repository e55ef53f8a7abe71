"""The machine of a simulation: its device, processes, sockets and disk, all of which may fail.

It knows what each worker has mapped, and checks each access of the daemon to the device against
that. `installed` puts it in the place of what the daemon's modules take from the system.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from swapd.core import Residency
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.daemon import (
    daemon,
    dispatch,
    door,
    host_copies,
    host_copy_orders,
    lending,
    lifeline,
    mover,
    router,
    statuses,
)
from swapd.device import base
from swapd.device.base import ChunksMissing, DeviceError, DeviceLost, numbers
from swapd.log import swap_log
from swapd.shared import vm
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Ranges, Runs
from tests.core.check import check
from tests.simulation.loop import Pool, Signal, SimulatedLoop, Steps, Strand, pause

CHUNK, PER_FILE = 16, 2
#: What is in memory whose contents are undefined.
GARBAGE = b"\xaa" * CHUNK


class Mapped:
    """Chunks that a worker can reach; `held` by so many leases."""

    def __init__(self, pid: int, name: str, runs: Runs, writable: bool) -> None:
        self.pid, self.name, self.writable = pid, name, writable
        self.chunks = numbers(runs)
        self.held = 0


class Machine:
    """`has(pid)`: the daemon has a session of that process; `imports(file)`: a worker has that file
    of the device's memory. `unanswered(pid)`: the requests that the daemon has not answered."""

    has: Callable[[int], bool]
    unanswered: Callable[[int], set[int]]
    imports: Callable[[int], bool]

    def __init__(self, loop: SimulatedLoop, folder: Path, told: bool) -> None:
        self.loop, self.rng, self.folder = loop, loop.rng, folder
        #: (time, who, what), if somebody wants to read it.
        self.story: list[tuple[float, str, str]] | None = [] if told else None
        self.problem = ""
        #: Whether nothing fails any more; clocks jumped; the daemon was told to stop meanwhile.
        self.calm = self.jumped = self.stopped = False
        #: The core checks itself after one event of so many.
        self.checked_one_in = 1
        #: Chance of a failure, by operation; and those that failed.
        self.chances: dict[str, float] = {}
        self.failed: set[str] = set()
        self.slow = self.rng.choice((1, 1, 20))
        #: By process: whether it is ending, and a descriptor that tells of its end.
        self.ending: set[int] = set()
        self.ends: dict[int, int] = {}
        self.ended: set[int] = set()
        self.connecting: dict[str, list[int]] = {}
        self.mapped: list[Mapped] = []
        self.host: dict[int, int] = {}
        few = host_copies.RESERVE_BYTES + 300
        self.host_bytes = self.rng.choice((1 << 40, 1 << 40, few))
        self.lines: list[bytes] = []

    def note(self, who: object, what: object) -> None:
        if self.story is not None:
            said = str(what).replace(str(self.folder), "/run/swapd")
            self.story.append((self.loop.time(), str(who), said))

    def fail(self, why: str) -> None:
        """A promise is broken: the simulation ends."""
        self.problem = self.problem or why
        self.loop.stop()

    def unlucky(self, what: str) -> bool:
        chance = 0 if self.calm else self.chances.get(what, 0)
        bad = chance > 0 and self.rng.random() < chance
        if bad:
            self.failed.add(what)
            self.note("machine", f"{what} fails")
        return bad

    def need(self, what: str, number: int) -> None:
        if self.unlucky(what):
            raise OSError(number, os.strerror(number))

    def open_pidfd(self, pid: int) -> OwnedFd | None:
        self.need("descriptor", errno.EMFILE)
        return None if pid in self.ended else OwnedFd(os.dup(self.ends[pid]))

    def write(self, fd: int, data: bytes) -> int:
        """To the disk of the swap log."""
        full = self.unlucky("disk")
        if full and self.rng.random() < 0.5:
            raise OSError(errno.ENOSPC, "disk full")
        return os.write(fd, data[: len(data) // 2] if full else data)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        self.need("memory", errno.ENOMEM)
        os.posix_fallocate(fd, offset, nbytes)

    def dup(self, fd: int) -> int:
        self.need("descriptor", errno.EMFILE)
        return os.dup(fd)

    def map_shared(self, fd: int, offset: int, nbytes: int, *, writable: bool) -> int:
        address = vm.map_shared(fd, offset, nbytes, writable=writable)
        self.host[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        assert self.host.pop(address) == nbytes, "a host copy is unmapped in part"
        vm.free(address, nbytes)


class Listener(socket.socket):
    machine: Machine

    def bind(self, path: Any) -> None:
        self._pids = self.machine.connecting[Path(path).name] = []
        super().bind(path)

    def accept(self) -> tuple[socket.socket, Any]:
        fd, _ = self._accept()  # type: ignore[attr-defined]
        sock = Accepted(self.family, self.type, 0, fileno=fd)
        sock.machine, sock.pid = self.machine, self._pids.pop(0)
        if self.machine.rng.random() < 0.2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return sock, None


class Accepted(socket.socket):
    """The daemon's end of a connection."""

    machine: Machine
    pid: int

    def getsockopt(self, *which: int) -> Any:
        return struct.pack("3i", self.pid, os.getuid(), 0)

    def sendmsg(self, *args: Any) -> int:
        self.machine.need("send", errno.ENOBUFS)
        return super().sendmsg(*args)


class CheckedCore(Residency):
    machine: Machine
    _handled = 0

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        self.machine.note("event", event)
        done = super().handle(event)
        for action in done:
            self.machine.note("action", action)
        self._handled += 1
        if self._handled % self.machine.checked_one_in == 0:
            check(self)
        return done


class SimulatedDevice:
    """See `swapd.device.base.Device`. A copy takes time, and stands still between its pieces."""

    name, uuid, chunk_bytes, chunks_per_file = "sim", "", CHUNK, PER_FILE

    def __init__(self, machine: Machine, chunks: int, *, strict: bool) -> None:
        rng = machine.rng
        self.chunks, self.strict = chunks, strict
        self.outlasts, self.read_only_pins = rng.random() < 0.3, rng.random() < 0.8
        self.memory = bytearray(chunks * CHUNK)
        self.lost = False
        #: Chunks that are lent; and those that work of an ended process may still write to.
        self.missing: Runs = ((chunks - 1, 1),) if rng.random() < 0.1 else ()
        self.lent = set(numbers(self.missing))
        self.haunted: set[int] = set()
        self._machine = machine
        self._busy: set[int] = set()
        self._copying: set[int] = set()
        self.pins: dict[int, int] | None = {} if rng.random() < 0.5 else None

    def export(self, file: int, *, writable: bool) -> OwnedFd:
        self._machine.need("export", errno.EMFILE)
        return OwnedFd(os.eventfd(0, os.EFD_CLOEXEC))

    def pin(self, address: int, nbytes: int, *, writable: bool) -> None:
        self._works("pin")
        assert address in self._machine.host, "pinned, and not mapped"
        if self.pins is not None:
            self.pins[address] = nbytes

    def unpin(self, address: int) -> None:
        assert address not in self._copying, "unpinned in a copy"
        (self.pins or {}).pop(address, None)

    def pinned(self) -> base.Pinned | None:
        return None if self.pins is None else base.Pinned(sum(self.pins.values()))

    def copy_in(
        self,
        runs: Runs,
        source: int,
        nbytes: int,
        *,
        only: Ranges | None = None,
        start: int = 0,
        landed: base.Landed | None = None,
    ) -> None:
        assert landed is not None
        with self._copy(runs, source, "overwritten"):
            if not start:
                self.spoil(numbers(runs))
            for piece, inside in self._pieces(runs, nbytes, only):
                end = piece.done + piece.nbytes
                if end > start:
                    self._step("copy_in")
                    data = ctypes.string_at(source + piece.done, piece.nbytes) if inside else b""
                    self.put(piece.offset, data.ljust(piece.nbytes, b"\0"))
                    landed(end)

    def copy_out(self, runs: Runs, target: int, nbytes: int, *, only: Any = None) -> None:
        with self._copy(runs, target, "saved"):
            for piece, inside in self._pieces(runs, nbytes, only):
                if inside:
                    ctypes.memset(target + piece.done, GARBAGE[0], piece.nbytes)
                    self._step("copy_out")
                    data = bytes(self.memory[piece.offset : piece.offset + piece.nbytes])
                    ctypes.memmove(target + piece.done, data, piece.nbytes)

    def lend(self, runs: Runs) -> None:
        self._works("lend")
        self._check(numbers(runs), "lent")
        for file in base.whole_files(runs, PER_FILE):
            assert not self._machine.imports(file), f"lent, and a session still has file {file}"
        self.haunted -= set(numbers(runs))
        self.lent |= set(numbers(runs))
        self.spoil(numbers(runs))

    def reclaim(self, runs: Runs) -> None:
        if self.lost:
            raise DeviceLost("lost")
        wanted = [c for c in numbers(runs) if c in self.lent]
        late = bool(wanted) and self._machine.unlucky("reclaim")
        back = wanted[: self._machine.rng.randrange(len(wanted))] if late else wanted
        self.lent -= set(back)
        if late:
            still = base.runs_of(wanted[len(back) :])
            raise ChunksMissing("others have it", base.runs_of(back), still)

    def use(self) -> base.MemoryUse:
        self._works("use")
        return base.MemoryUse(1 << 30, 1 << 20, (), ())

    def close(self) -> None:
        """Nothing is left to free."""

    def put(self, offset: int, data: bytes) -> None:
        self.memory[offset : offset + len(data)] = data

    def spoil(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self.put(chunk * CHUNK, GARBAGE)

    def haunt(self, chunks: set[int]) -> None:
        """Work of a process that has ended still writes there."""
        self.haunted |= chunks
        for after_s in (0.01, 1.0):
            self._machine.loop.call_later(after_s, lambda: self.spoil(chunks & self.haunted))

    def _pieces(self, runs: Runs, nbytes: int, only: Any) -> Iterator[tuple[base.Piece, bool]]:
        for marked, inside in base.mark(base.cut(runs, nbytes, CHUNK), only):
            yield from ((piece, inside) for piece in base.split([marked], CHUNK))

    def _step(self, what: str) -> None:
        pause(self._machine.rng.choice((1e-5, 0.001, 0.02)) * self._machine.slow)
        self._works(what)

    def _works(self, what: str) -> None:
        self.lost = self.lost or self._machine.unlucky("lost")
        if self.lost:
            raise DeviceLost("lost")
        if self._machine.unlucky(what):
            raise DeviceError(f"injected: {what}")

    @contextmanager
    def _copy(self, runs: Runs, address: int, what: str) -> Iterator[None]:
        chunks = set(numbers(runs))
        self._check(chunks, what)
        assert address in self._machine.host or not address, "a copy of memory that is not mapped"
        self._busy |= chunks
        self._copying.add(address)
        try:
            yield
        finally:
            self._busy -= chunks
            self._copying.discard(address)

    def _check(self, chunks: Iterable[int], what: str) -> None:
        """Nobody else has these chunks."""
        others = self._busy | self.lent | (self.haunted if what != "lent" else set())
        assert others.isdisjoint(chunks), f"{what}: chunks of others, {others & set(chunks)}"
        for one in self._machine.mapped:
            strict = self.strict and what != "saved"
            reached = one.writable or ((one.held or strict) and self._machine.has(one.pid))
            if reached and not set(chunks).isdisjoint(one.chunks):
                raise AssertionError(f"{what}: chunks of {one.name}, mapped by worker {one.pid}")


def _like(module: Any, **other: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(module), **other})


@contextmanager
def installed(machine: Machine) -> Iterator[None]:
    """The daemon's modules see this machine instead of the system."""
    loop, tokens = machine.loop, Random(machine.rng.random())
    clock = SimpleNamespace(monotonic=loop.time, time=lambda: 1.7e9 + loop.time(), sleep=pause)

    class Thread:
        """Of the swap log."""

        def __init__(self, target: Callable[[], object], **_: object) -> None:
            self.start = lambda: setattr(self, "strand", Strand(loop, target))

        def join(self, timeout: float) -> None:
            while not self.strand.ended:  # type: ignore[attr-defined]
                self.strand.resume()  # type: ignore[attr-defined]

        def is_alive(self) -> bool:
            return False

    def pool(count: int, name: str) -> Pool:
        return Pool(loop, count)

    def signal() -> Signal:
        return Signal(loop)

    with ExitStack() as undo:

        def put(module: Any, **names: Any) -> None:
            for name, fake in names.items():
                undo.enter_context(patch.object(module, name, fake))

        listener = type("Listener", (Listener,), {"machine": machine})
        core = type("Core", (CheckedCore,), {"machine": machine})
        threads = SimpleNamespace(Thread=Thread, Condition=signal, Lock=nullcontext)
        memory = _like(vm, map_shared=machine.map_shared, free=machine.free)
        put(dispatch, time=clock)
        put(router, time=clock)
        put(mover, time=clock, SimpleQueue=lambda: Steps(loop))
        put(mover, start=lambda thread: Strand(loop, thread.run))
        put(host_copies, time=clock, Threads=pool, wait=Pool.wait, threading=threads, vm=memory)
        put(host_copies, available_bytes=lambda: machine.host_bytes)
        put(host_copies, os=_like(os, posix_fallocate=machine.allocate))
        put(host_copy_orders, Threads=pool, os=_like(os, dup=machine.dup))
        put(lending, Threads=pool, open_pidfd=machine.open_pidfd)
        put(lending, has_ended=machine.ended.__contains__)
        put(lending, is_alive=lambda pid: pid not in machine.ending)
        put(statuses, Threads=pool, private_bytes=lambda pid, name: 0)
        put(lifeline, secrets=SimpleNamespace(token_bytes=tokens.randbytes))
        put(door, socket=_like(socket, socket=listener))
        put(swap_log, time=clock, os=_like(os, write=machine.write), threading=threads)
        put(swap_log, system=SimpleNamespace(start=lambda thread: thread.start()))
        put(daemon, has_terminal=lambda: False, Residency=core)
        put(daemon, start=lambda thread: loop.call_soon(thread.run))
        yield
