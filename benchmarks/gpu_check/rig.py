"""A daemon on the GPU, and worker processes that execute commands.

Everything here ends with its block; processes that survive it end with the section.
"""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import swapd_client
from benchmarks.gpu_check.settings import ROOT, Settings, fitting
from swapd import spawn
from swapd.spawn import Spawned
from swapd_client import Client

#: Seconds; longer than any answer takes.
PATIENCE_S = 40.0
#: Seconds within which a dead process's memory is free.
SETTLE_S = 10.0

_SERVES_AS_USUAL = all(importlib.util.find_spec(name) for name in ("uvloop", "typer", "rich"))
PROGRAM = spawn.SERVE if _SERVES_AS_USUAL else ("-m", "benchmarks.gpu_check.plain_daemon")


@contextmanager
def serving(settings: Settings, budget: int, **flags: object) -> Iterator[Spawned]:
    """A daemon with `budget` bytes of the GPU. Evicts soon and often, unless flags differ."""
    quick = {"residency_factor": 0, "residency_bound": 0, "eviction": "lru"}
    chunk = settings.chunk_bytes
    flags = {"device": settings.device, "budget": budget, "chunk": chunk} | quick | flags
    with spawn.daemon(PROGRAM, **flags) as daemon:
        yield daemon


def chunks_of(nbytes: int, settings: Settings) -> int:
    """`nbytes` in whole chunks, bytes."""
    return -(-nbytes // settings.chunk_bytes) * settings.chunk_bytes


def room_for(settings: Settings, wanted: int, *, of: float, host_copies: float) -> int:
    """Bytes of one component, of which `of` fit on the card, beside the processes' contexts."""
    free = free_bytes(settings)
    return fitting(wanted, settings.chunk_bytes, device_free=free, host_copies=host_copies, of=of)


def free_bytes(settings: Settings) -> int:
    """The driver's free bytes, after it has freed the memory of processes that have just ended.

    Asked in another process, so that none keeps a context.
    """
    command = [sys.executable, "-c", _FREE, str(settings.index)]
    return int(subprocess.check_output(command, text=True, timeout=PATIENCE_S))


#: Checks until nothing more is freed in a tenth of a second, for some seconds at most.
_FREE = """
import sys, time
from swapd.device.driver import Driver
driver = Driver(int(sys.argv[1]))
with driver.current():
    free = -1
    for _ in range(50):
        before, free = free, driver.memory()[0]
        if free <= before:
            break
        time.sleep(0.1)
print(free)
"""


def comes_true(what: Callable[[], bool], within_s: float = SETTLE_S) -> bool:
    """Whether the condition comes true within that; checked again and again."""
    until = time.monotonic() + within_s
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


class WorkerError(Exception):
    """A worker answered with an error, or was gone. The message names it."""


class Worker:
    """A process with a client and torch. `ask("turn", ...)` runs that method of its `Work`.

    `module`: another program of this package that takes the same arguments and commands.
    """

    def __init__(
        self, settings: Settings, endpoint: Path, label: str, module: str = "worker"
    ) -> None:
        self._label = label
        command = [sys.executable, "-m", f"benchmarks.gpu_check.{module}"]
        self.process = subprocess.Popen(
            [*command, settings.encode(), str(endpoint), label],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._heard = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def tell(self, do: str, *arguments: object, **options: object) -> None:
        """Send a command; `answer` returns its result, in order."""
        assert self.process.stdin is not None
        command = {"do": do, "arguments": arguments, "options": options}
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, within_s: float = PATIENCE_S) -> Any:
        """The next result. Raises: WorkerError, also if there is none in time."""
        answer: dict[str, Any] = json.loads(self._line(time.monotonic() + within_s))
        if "event" in answer:
            return answer["event"]
        if "error" in answer:
            raise WorkerError(f"{self._label}: {answer['error']}")
        return answer["ok"]

    def _line(self, until: float) -> bytes:
        """The worker's next line; reads the pipe directly, because `select` sees no buffers."""
        assert self.process.stdout is not None
        while b"\n" not in self._heard:
            left = max(until - time.monotonic(), 0)
            if not select.select([self.process.stdout], [], [], left)[0]:
                raise WorkerError(f"{self._label} did not answer in time")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise WorkerError(f"{self._label} has ended: {self.ending()}")
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def ask(self, do: str, *arguments: object, **options: object) -> Any:
        self.tell(do, *arguments, **options)
        return self.answer()

    def ending(self, within_s: float = PATIENCE_S) -> str:
        """How the process ended; waits for it."""
        code = self.process.wait(within_s)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


@contextmanager
def workers(
    settings: Settings, endpoint: Path, *labels: str, **options: object
) -> Iterator[list[Worker]]:
    """Some workers at once, because each takes seconds to load torch and a context.

    `options`: those of `connect`.
    """
    started = [Worker(settings, endpoint, label) for label in labels]
    try:
        for worker in started:
            worker.ask("start", **options)
        yield started
    finally:
        for worker in started:
            worker.__exit__()


def registered(
    *models: tuple[Worker, str], nbytes: int, layers: int, first_seed: int = 0, **options: object
) -> dict[str, str]:
    """Build and register a model of `nbytes` in each worker, each of its own seed; the digests of
    their outputs."""
    made = {}
    for seed, (worker, name) in enumerate(models, first_seed):
        made[name] = worker.ask("build", name, nbytes, layers, seed)
        worker.ask("register", name, **options)
    return made


@contextmanager
def watching(daemon: Spawned) -> Iterator[Client]:
    """A client of this process."""
    with swapd_client.connect(daemon.folder, label="gpu-check") as client:
        yield client


def footprint(pid: int) -> dict[str, int]:
    """Descriptors and resident bytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    resident = int(fields["VmRSS"].split()[0]) * 1024
    return {"fds": len(os.listdir(f"/proc/{pid}/fd")), "rss": resident}
