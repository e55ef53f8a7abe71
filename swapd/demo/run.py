"""Runs the stages without swapd, then with it, and compares every bit of the outputs."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from safetensors.torch import load

import swapd_client
from swapd import spawn
from swapd.demo import stages, worker
from swapd.demo.architectures import ARCHITECTURES
from swapd.shared.errors import UserError
from swapd.shared.units import size

#: 15 % more than the largest stage, and less than half of the three together.
BUDGET_BYTES = 168 << 20

T = TypeVar("T")


class DemoError(UserError):
    """A stage failed; the message is its error."""


class Summary(msgspec.Struct, frozen=True):
    """The output of `swapd demo --json`. Bytes and seconds."""

    bit_identical: bool
    evictions: int
    loads: int
    bytes_in: int
    bytes_out: int
    peak_bytes: int
    budget_bytes: int
    sum_bytes: int
    wait_seconds: float
    total_seconds: float
    baseline_seconds: float


class StageProcess:
    def __init__(self, name: str, pool: ProcessPoolExecutor) -> None:
        self.name = name
        self.submit = pool.submit
        with spawn.without_interrupts():  # the first call starts the process
            self.building = pool.submit(worker.build, name)

    def answer(self, asked: Future[T]) -> T:
        """Raises: DemoError."""
        try:
            return asked.result()
        except BrokenProcessPool:
            raise DemoError(f"{self.name}: its process ended") from None
        except Exception as exc:
            raise DemoError(f"{self.name}: {type(exc).__name__}: {exc}") from exc


def run(
    prompt: bytes,
    rounds: int,
    wav: Path,
    say: Callable[[str], None],
    watch: Callable[[Path], None],
) -> Summary:
    """Run the demo and write `wav`.

    `say` gets the next step; `watch` gets the daemon's folder, to follow its log. Blocks for the
    whole run. Raises: DemoError, SpawnError.
    """
    with spawn.daemon(budget=BUDGET_BYTES) as daemon, _workers() as workers:
        watch(daemon.folder)  # before the workers connect
        say("Building thinker, talker and token2wav, each in its own process")
        sizes = {stage.name: stage.answer(stage.building) for stage in workers}
        say(", ".join(f"{name} {size(n)}" for name, n in sizes.items()))
        say(f"First {rounds} rounds without swapd: all {size(sum(sizes.values()))} in memory")
        baseline, baseline_s, _ = _rounds(workers, prompt, rounds)
        say(f"Now on a device of {size(BUDGET_BYTES)}: two stages never fit together")
        for stage in workers:
            stage.answer(stage.submit(worker.join, str(daemon.folder)))
        swapped, total_s, waited_s = _rounds(workers, prompt, rounds)
        with swapd_client.connect(daemon.folder, label="demo") as client:
            status = client.status()
        stages.write_wav(wav, load(swapped[-1])["waveform"])
        return Summary(
            bit_identical=baseline == swapped,
            evictions=status.evictions,
            loads=status.loads,
            bytes_in=status.bytes_in,
            bytes_out=status.bytes_out,
            peak_bytes=status.peak_bytes,
            budget_bytes=status.budget_bytes,
            sum_bytes=sum(sizes.values()),
            wait_seconds=waited_s,
            total_seconds=total_s,
            baseline_seconds=baseline_s,
        )


def _rounds(
    workers: list[StageProcess], prompt: bytes, rounds: int
) -> tuple[list[bytes], float, float]:
    """Return the outputs of every stage, as safetensors; the time; and the waits for leases."""
    outputs, waited_s = [], 0.0
    started = time.perf_counter()
    for number in range(rounds):
        asked = prompt + f" ({number})".encode() if number else prompt
        passed = b""
        for stage in workers:
            passed, waited = stage.answer(stage.submit(worker.run, asked, number, passed))
            outputs.append(passed)
            waited_s += waited
    return outputs, time.perf_counter() - started, waited_s


@contextmanager
def _workers() -> Iterator[list[StageProcess]]:
    spawned = multiprocessing.get_context("spawn")
    with ExitStack() as pools:
        try:
            yield [
                StageProcess(
                    name, pools.enter_context(ProcessPoolExecutor(1, spawned, worker.begin))
                )
                for name in ARCHITECTURES
            ]
        except BaseException:  # a pool would wait for what its stage builds or computes
            for process in multiprocessing.active_children():
                process.kill()
            raise
