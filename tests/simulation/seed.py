"""One seed: a daemon and its workers from the start to the end, and the checks of what is left."""

import asyncio
import gc
import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from swapd.daemon.daemon import Daemon
from swapd.log.records import parse
from swapd.log.replay import replay
from swapd.shared import vm
from swapd.shared.config import Config
from tests.simulation.loop import SimulatedLoop
from tests.simulation.machine import CHUNK, Machine, SimulatedDevice, installed
from tests.simulation.worker import Worker

#: Virtual seconds in which all waits end, once nobody does anything new.
END_S = 2700.0
FAILURES = (
    *("copy_in", "copy_out", "lend", "reclaim", "pin", "use", "export"),
    *("disk", "send", "descriptor", "memory"),
)
CHANGES = ({"ack_timeout": 5.0}, {"overtake": 1}, {"host_memory": 200})


class Outcome(NamedTuple):
    """`problem`: the broken promise, or "". `trace`: a hash of all that the daemon recorded."""

    seed: int
    problem: str
    trace: str
    records: int
    story: list[tuple[float, str, str]]


class Simulation:
    def __init__(self, seed: int, folder: Path, told: bool) -> None:
        self.rng = rng = Random(seed)
        self.loop = SimulatedLoop(rng, rng.choice((0.0, 0.3, 0.7)))
        self.machine = Machine(self.loop, folder, told)
        some = [what for what in FAILURES if rng.random() < 0.3]
        self.machine.chances = {what: rng.choice((0.02, 0.2)) for what in some}
        self.machine.chances["lost"] = 0.1 if rng.random() < 0.03 else 0.0
        self.is_thorough = seed % 8 == 0
        self.machine.checked_one_in = 1 if self.is_thorough else 16
        chunks = rng.choice((6, 8, 10))
        self.config = Config(
            budget=chunks * CHUNK,
            isolation=rng.choice(("strict", "relaxed")),
            ack_timeout=2.0,
            host_memory=rng.choice((None, None, 300)),
            swap_log=str(folder / "swap-log.jsonl"),
            stop_timeout=5.0,
            patience=rng.choice((0.5, 30.0)),
            overtake=rng.choice((0, 2, 16)),
        )
        strict = self.config.isolation == "strict"
        self.device = SimulatedDevice(self.machine, chunks, strict=strict)
        self.shared: list[str] = []
        self.workers: list[Worker] = []

    def run(self) -> None:
        """Play it; `machine.problem` is the result."""
        machine, loop = self.machine, self.loop
        loop.set_exception_handler(
            lambda _, said: machine.fail(f"{said['message']}: {said.get('exception')!r}")
        )
        with installed(machine):
            try:
                loop.run_until_complete(self._main())
            except Exception as exc:  # noqa: BLE001 - whatever ends it is the result
                machine.problem = machine.problem or repr(exc)
                for task in asyncio.all_tasks(loop):
                    task.cancel()
                loop.call_soon(loop.stop)
                loop.run_forever()
            finally:
                loop.close()

    async def _main(self) -> None:
        machine, rng, loop = self.machine, self.rng, self.loop
        folder: Any = SimpleNamespace(
            path=machine.folder, inside=machine.folder, remove_sockets=lambda: None
        )
        self.daemon = Daemon(self.config, self.device, folder, lambda: self.config)
        ready = asyncio.Event()
        served = loop.create_task(self._serve(ready.set))
        await ready.wait()
        chaos = loop.create_task(self._chaos())
        lives = [loop.create_task(self._life(n)) for n in range(1, rng.choice((3, 4, 5)))]
        playing = asyncio.gather(*lives)
        await asyncio.wait((served, playing), return_when="FIRST_COMPLETED", timeout=END_S)
        chaos.cancel()
        if not playing.done() and not served.done():
            waits = [f"{w} for {w.pending or 'its end'}" for w in self.workers if not w.leaving]
            machine.fail(f"waits for ever: {waits}")
        await playing
        machine.calm = True
        for after_s in (0.1, 1.0, 10.0, 300.0):
            await asyncio.wait((served,), timeout=after_s)
            if served.done() or not (left := self._left()):
                break
        else:
            machine.fail(f"left when all workers are gone: {left}")
        self.daemon.stop()
        await served

    async def _serve(self, ready: Callable[[], None]) -> None:
        def begin() -> None:
            machine, connections = self.machine, self.daemon._connections

            def of(pid: int) -> Any:
                return next((c for c in connections.values() if c.lifeline.pid == pid), None)

            self.daemon._swap_log._publish = machine.lines.extend
            machine.has = lambda pid: of(pid) is not None
            machine.unanswered = lambda pid: set(getattr(of(pid), "unanswered", ()))
            machine.imports = lambda file: any(
                worker.imports(file) for worker in self.workers if of(worker.pid)
            )
            ready()

        await self.daemon.run(begin)
        for worker in self.workers:
            worker.check_saved()
        self._check_log()

    async def _life(self, number: int) -> None:
        worker = Worker(self.machine, self.device, number, self.shared)
        self.workers.append(worker)
        await worker.nap(2.0)
        living = self.loop.create_task(worker.live(self.rng.choice((4, 8, 16))))
        if self.rng.random() < 0.4:
            await asyncio.wait((living,), timeout=self.rng.random() * 8)
            if not living.done():
                worker.die()
                living.cancel()
        await living
        await worker.leave()

    async def _chaos(self) -> None:
        """What happens to the machine, until the workers have done their steps."""
        rng, machine = self.rng, self.machine
        for _ in range(rng.choice((0, 0, 1, 3))):
            await asyncio.sleep(rng.random() * 5)
            what = rng.random()
            if what < 0.3:
                machine.jumped = True
                self.loop.jump(rng.choice((0.5, 3.0, 100.0)))
            elif what < 0.8:
                self.config = msgspec.structs.replace(self.config, **rng.choice(CHANGES))
                self.daemon._on_hangup(False)
            elif what < 0.85:
                machine.stopped = True
                self.daemon.stop()
        await asyncio.sleep(60)
        machine.calm = True

    def _left(self) -> dict[str, Any]:
        """What the daemon has without a worker."""
        daemon, ledger, lent = self.daemon, self.daemon._core.ledger, self.daemon._lender
        sessions, dispatch, copies = daemon._sessions, daemon._dispatch, daemon._copies
        found = {
            "components": ledger.components,
            "chunks": ledger.pool.total - ledger.pool.free,
            "waiters": list(ledger.queue),
            "moves": ledger.moves,
            "sessions": ledger.sessions,
            "host copies": copies._copies,
            "bytes": copies.total_bytes or copies._unallocated_bytes or copies.to_pin_bytes,
            "mapped": self.machine.host,
            "pinned": self.device.pins,
            "progress": daemon._copy_orders.progress,
            "connections": daemon._connections,
            "causes": dispatch._causes,
            "traces": dispatch.traces.open,
            "quarantined": sessions._quarantine._processes,
            "loans": (*lent._missing, *lent.notes(), *self.device.lent, *self.device.haunted),
            "peers": (*sessions._router._sessions, *sessions._router._behind),
            "settled peers": [peer for peer in sessions._router._all if peer.session],
            "lifelines": sessions._server._lifelines,
            "tasks": dispatch._tasks,
        }
        if self.device.lost:
            for what in ("chunks", "loans", "quarantined", "moves", "tasks"):
                del found[what]
        return {what: _named(some) for what, some in found.items() if some}

    def _check_log(self) -> None:
        """After the daemon's end: its file has all records but those it counts, and replays."""
        file, log = Path(self.config.swap_log_path), self.daemon._swap_log
        on_disk = file.read_bytes().splitlines() if file.exists() else []
        dropped = [parse(line).dropped for line in on_disk]
        lost, total = sum(dropped) + log._file._dropped, log.counted()[0]
        if dropped.count(0) + lost != total:
            self.machine.fail(f"{total} records: {dropped.count(0)} in the file, {lost} dropped")
        if self.is_thorough and not lost:
            for step in replay(on_disk):
                if step.actions != step.recorded:
                    self.machine.fail(f"{step.event} replays to {step.actions}")


def _named(some: Any) -> Any:
    """Of what is left, the keys, or the number: no addresses, which each process has of its own."""
    if isinstance(some, int):
        return some
    small = (key for key in some if not isinstance(key, int) or key < 1 << 32)
    keys = [key for key in small if isinstance(key, str | tuple | int)]
    return keys or len(some)


def play(seed: int, *, told: bool = False) -> Outcome:
    """Play one seed. `told`: with its story."""
    folder = Path(f"/dev/shm/swapd-simulation-{os.getpid()}")
    folder.mkdir()
    log = logging.getLogger("swapd")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    before = len(os.listdir("/proc/self/fd"))
    simulation = Simulation(seed, folder, told)
    machine = simulation.machine
    try:
        simulation.run()
    finally:
        log.setLevel(level)
        shutil.rmtree(folder)
    for worker in simulation.workers:
        worker.close_files()
        os.close(machine.ends[worker.pid])
    for address, nbytes in machine.host.items():
        vm.free(address, nbytes)
    left = len(os.listdir("/proc/self/fd")) - before
    if left and not machine.stopped:
        machine.problem = machine.problem or f"{left} descriptors are left"
    trace = hashlib.sha256(b"\n".join(machine.lines)).hexdigest()[:16]
    outcome = Outcome(seed, machine.problem, trace, len(machine.lines), machine.story or [])
    if outcome.problem or machine.stopped:  # a daemon that stops leaves much to the system
        del simulation, machine, worker
        gc.collect()
    return outcome
