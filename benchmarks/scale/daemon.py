"""How long an honest session waits for small requests while others have, or do, much.

Real processes: a daemon, sessions of `worker.py`, and this process as the honest session. Each
figure stands beside the same one without the others.
"""

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

import swapd_client
from swapd import spawn

MIB = 1 << 20
#: Bytes of the honest session's own component.
SMALL = 4096


class Wait(msgspec.Struct, frozen=True):
    """Seconds that an honest session waited, alone and beside others.

    The median, the 99th percentile, and the maximum.
    """

    what: str
    alone_s: tuple[float, float, float]
    beside_s: tuple[float, float, float]
    count: int
    #: Beside a process that does similar work without swapd: the machine's own share.
    machine_s: tuple[float, float, float] | None = None


class Worker:
    """A process of `worker.py`."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.scale.worker", str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.wait()

    def ask(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def wait(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ok\n":
            raise RuntimeError("a worker of the benchmark failed; see above")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def _workers(folder: Path, count: int) -> Iterator[list[Worker]]:
    workers = [Worker(folder) for _ in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def measure(sessions: int, owned: int, large: int) -> list[Wait]:
    """Beside `sessions` with `owned` components each; then `large` bytes are registered."""
    with (
        spawn.daemon(budget=large + 64 * MIB) as daemon,
        swapd_client.connect(daemon.folder, label="honest") as client,
        _workers(daemon.folder, sessions) as workers,
    ):
        client.register("own", {"data": bytearray(SMALL)})
        for worker in workers:
            worker.ask(f"own {owned}")
        for worker in workers:
            worker.wait()
        return [
            _beside_status(client, workers[0]),
            _beside_the_end(client, workers[-1]),
            _beside_large(client, workers[0], large),
        ]


def _beside_status(client: swapd_client.Client, worker: Worker) -> Wait:
    ask = _asking(client)
    alone = [ask() for _ in range(2000)]
    worker.ask("status 10")
    beside = _until(worker, ask)
    return _wait("an answer, while status is asked", alone, beside)


def _beside_the_end(client: swapd_client.Client, worker: Worker) -> Wait:
    ask = _asking(client)
    alone = [ask() for _ in range(2000)]
    before = len(client.status().sessions)
    worker.process.kill()
    beside: list[float] = []
    while len(beside) < 2000 or len(client.status().sessions) == before:
        beside += [ask() for _ in range(500)]
    return _wait("an answer, while a session with much is killed", alone, beside)


def _beside_large(client: swapd_client.Client, worker: Worker, large: int) -> Wait:
    number = 0

    def register() -> float:
        nonlocal number
        number += 1
        began = time.perf_counter()
        client.register(f"small-{number}", {"data": bytearray(SMALL)})
        took = time.perf_counter() - began
        client.unregister(f"small-{number}")
        return took

    alone = [register() for _ in range(200)]
    worker.ask(f"plain {large}")
    machine = _until(worker, register)
    worker.ask(f"big {large}")
    beside = _until(worker, register)
    return _wait("register 4 KiB, while another registers much", alone, beside, machine)


def _asking(client: swapd_client.Client) -> Callable[[], float]:
    """A request that the loop answers at once, because the component is resident."""

    def ask() -> float:
        began = time.perf_counter()
        client.prefetch("own")
        return time.perf_counter() - began

    return ask


def _until(worker: Worker, act: Callable[[], float]) -> list[float]:
    """Results of `act`, called until the worker has completed its command."""
    done = threading.Event()

    def wait() -> None:
        worker.wait()
        done.set()

    threading.Thread(target=wait, name="wait", daemon=True).start()
    found = []
    while not done.is_set():
        found.append(act())
    return found


def _wait(
    what: str, alone: list[float], beside: list[float], machine: list[float] | None = None
) -> Wait:
    return Wait(what, _of(alone), _of(beside), len(beside), _of(machine) if machine else None)


def _of(times: list[float]) -> tuple[float, float, float]:
    ordered = sorted(times)
    return statistics.median(ordered), ordered[len(ordered) * 99 // 100], ordered[-1]
