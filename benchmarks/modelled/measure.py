"""The two measurements, each with daemons and workers as processes on a stub with costs."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from swapd import spawn
from swapd.shared.units import size
from tests import fakecuda

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Costs:
    """The cost of calls for each allocation, and the rate of copies.

    Measured on an H200 with driver 580.159.04, by allocations of 64 MiB: benchmarks/results. Its
    bus is PCIe 5.
    """

    map_us: float = 6.0
    access_us: float = 28.0
    unmap_us: float = 22.0
    gbps: float = 55.2


@dataclass(frozen=True)
class Measured:
    """Lower quartiles, because other work on the machine raises the upper ones.

    `bare_ms`: one copy of as many bytes; `calls_ms`: the stub's charges for setting access and
    unmapping; `calls`: calls in the worker in each turn, by name.
    """

    chunk: str
    ms: float
    bare_ms: float
    calls_ms: float
    calls: dict[str, float]


class _Worker:
    """A process that executes commands, one a line."""

    def __init__(self, endpoint: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.modelled.worker", str(endpoint)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # it ends with its input

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, *arguments: object) -> Any:
        """Execute a command, and return its answer. Raises: RuntimeError if the worker ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([do, *arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a worker ended with {self._process.wait()} when told to {do}")
        return json.loads(answer)


class _Scene:
    """A daemon and workers on a GPU of their own, with a count of the workers' driver calls."""

    def __init__(self, stack: ExitStack, costs: Costs, budget: int, flags: dict[str, str]) -> None:
        knobs = dict(vars(costs), total=4 * budget, hollow=True)
        fake = stack.enter_context(fakecuda.machine(**knobs))
        self._trace = fake.memory / "trace"
        inherited = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}  # noqa: TID251
        self._environment = {**inherited, **fake.environment()}
        self._stack = stack
        self._daemon = stack.enter_context(_serving(self._environment, budget, flags))

    def worker(self) -> _Worker:
        environment = {**self._environment, "FAKECUDA_TRACE": str(self._trace)}
        self._trace.touch()
        return self._stack.enter_context(_Worker(self._daemon.folder, environment))

    def calls(self, worker: _Worker) -> dict[str, int]:
        """Number of its mapping and unmapping calls."""
        counted: dict[str, int] = {}
        for line in self._trace.read_text().splitlines():
            pid, _, name = line.split()[:3]
            if int(pid) == worker.pid and name in ("cuMemMap", "cuMemUnmap", "cuMemSetAccess"):
                counted[name] = counted.get(name, 0) + 1
        return counted

    def forget_calls(self) -> None:
        self._trace.write_text("")


@contextmanager
def _scene(costs: Costs, budget: int, **flags: str) -> Iterator[_Scene]:
    with ExitStack() as stack:
        yield _Scene(stack, costs, budget, flags)


@contextmanager
def _serving(
    environment: dict[str, str], budget: int, flags: dict[str, str]
) -> Iterator[spawn.Spawned]:
    quick = {"residency_factor": 0, "residency_bound": 0}
    before = dict(os.environ)  # noqa: TID251
    os.environ.update(environment)  # noqa: TID251
    try:
        serving = spawn.daemon(device="cuda:0", budget=budget, **quick, **flags)
        with serving as daemon:
            yield daemon
    finally:
        os.environ.clear()  # noqa: TID251
        os.environ.update(before)  # noqa: TID251


def swap_ins(costs: Costs, chunk: str, nbytes: int, rounds: int) -> Measured:
    """Two components of `nbytes` with room for one: each is loaded in the place of the other."""
    with _scene(costs, nbytes, chunk=chunk) as scene:
        worker = scene.worker()
        chunk_bytes = worker.ask("start")
        for name in "ab":
            worker.ask("register", name, nbytes)
        worker.ask("swap", 3)
        scene.forget_calls()
        taken = worker.ask("swap", rounds)
        calls = {name: n / (2 * rounds) for name, n in scene.calls(worker).items()}
        bare = worker.ask("bare_copies", nbytes, rounds)
    return _measured(costs, chunk_bytes, nbytes, taken, bare, calls)


def evictions(costs: Costs, chunk: str, nbytes: int, rounds: int) -> Measured:
    """Two workers with `nbytes` each and room for one, under strict isolation.

    Measures the processor time of one worker to release, and to lose, its component: unmapping is
    work, and no worker computes in the meantime.
    """
    spent = []
    # a budget for which `auto` makes large chunks, with room for one
    with _scene(costs, nbytes + nbytes // 32, chunk=chunk, isolation="strict") as scene:
        loses, takes = scene.worker(), scene.worker()
        chunk_bytes = loses.ask("start")
        takes.ask("start")
        for worker, name in ((loses, "a"), (takes, "b")):
            worker.ask("scratch", name, nbytes)
        for number in range(rounds + 1):
            if number == 1:
                scene.forget_calls()
            loses.ask("hold", "a")
            loses.ask("let_go", "a")
            takes.ask("hold", "b")
            takes.ask("let_go", "b")
            spent.append(loses.ask("spent_ms"))
        calls = {name: n / rounds for name, n in scene.calls(loses).items()}
    return _measured(costs, chunk_bytes, nbytes, spent[1:], [0.0, 0.0], calls)


def _measured(
    costs: Costs,
    chunk_bytes: int,
    nbytes: int,
    taken: list[float],
    bare: list[float],
    calls: dict[str, float],
) -> Measured:
    handles = -(-nbytes // chunk_bytes)
    charged = handles * (costs.access_us + costs.unmap_us) / 1e3
    return Measured(size(chunk_bytes), _quartile(taken), _quartile(bare), charged, calls)


def _quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0]
