"""The demo: build, run without swapd, run the same with it, compare every bit."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

import swapd_client
from swapd import spawn
from swapd.demo import stages, worker
from swapd.demo.wire import unpack
from swapd.shared.units import size

#: 15 % more than the largest stage, and less than half of the three together.
BUDGET_BYTES = 168 << 20
SEED = 7


class DemoError(Exception):
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
    """A worker process that runs one stage."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self._connection = connection
        self.waited_s = 0.0

    def ask(self, command: worker.Run | worker.Join) -> bytes:
        """Send a command; return the outputs, encoded. Raises: DemoError."""
        self._connection.send_bytes(msgspec.msgpack.encode(command))
        ran = self._answer()
        assert isinstance(ran, worker.Ran)
        self.waited_s += ran.waited_s
        return ran.outputs

    def built(self) -> int:
        """Wait until the stage is built; return its weights' bytes. Raises: DemoError."""
        built = self._answer()
        assert isinstance(built, worker.Built)
        return built.nbytes

    def _answer(self) -> worker.Built | worker.Ran:
        try:
            answer: worker.Built | worker.Ran | worker.Failed = worker.read_answer(
                self._connection.recv_bytes()
            )
        except EOFError:
            raise DemoError(f"{self.name}: its process ended") from None
        if isinstance(answer, worker.Failed):
            raise DemoError(f"{self.name}: {answer.why}")
        return answer


def run(
    prompt: bytes,
    rounds: int,
    wav: Path,
    say: Callable[[str], None],
    watch: Callable[[Path], None],
) -> Summary:
    """Run the demo and write `wav`.

    `say` gets the next step; `watch` gets the daemon's folder, to follow its log.
    Blocks for the whole run. Raises: DemoError, SpawnError.
    """
    budget = BUDGET_BYTES
    with spawn.daemon(budget=budget) as daemon, _workers(str(daemon.folder)) as workers:
        watch(daemon.folder)  # before the workers connect, which takes them a while
        say("Building thinker, talker and token2wav, each in its own process")
        sizes = {stage.name: stage.built() for stage in workers}
        say(", ".join(f"{name} {size(n)}" for name, n in sizes.items()))
        say(f"First {rounds} rounds without swapd: all {size(sum(sizes.values()))} in memory")
        baseline, baseline_s = _rounds(workers, prompt, rounds)
        say(f"Now on a device of {size(budget)}: two stages never fit together")
        for stage in workers:
            stage.ask(worker.Join())
        swapped, total_s = _rounds(workers, prompt, rounds)
        with swapd_client.connect(daemon.folder, label="demo") as client:
            status = client.status()
        stages.write_wav(wav, unpack(swapped[-1])["waveform"])
        return Summary(
            bit_identical=baseline == swapped,
            evictions=status.evictions,
            loads=status.loads,
            bytes_in=status.bytes_in,
            bytes_out=status.bytes_out,
            peak_bytes=status.peak_bytes,
            budget_bytes=status.budget_bytes,
            sum_bytes=sum(sizes.values()),
            wait_seconds=sum(stage.waited_s for stage in workers),
            total_seconds=total_s,
            baseline_seconds=baseline_s,
        )


def _rounds(workers: list[StageProcess], prompt: bytes, rounds: int) -> tuple[list[bytes], float]:
    outputs = []
    started = time.perf_counter()
    for number in range(rounds):
        asked = prompt + f" ({number})".encode() if number else prompt
        passed = b""
        for stage in workers:
            passed = stage.ask(worker.Run(prompt=asked, sound_seed=number, inputs=passed))
            outputs.append(passed)
    return outputs, time.perf_counter() - started


@contextmanager
def _workers(endpoint: str) -> Iterator[list[StageProcess]]:
    spawned = multiprocessing.get_context("spawn")
    processes = []
    connections = []
    try:
        for name in stages.STAGES:
            ours, theirs = spawned.Pipe()
            process = spawned.Process(target=worker.main, args=(theirs, name, SEED, endpoint))
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        yield [StageProcess(n, c) for n, c in zip(stages.STAGES, connections, strict=True)]
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
