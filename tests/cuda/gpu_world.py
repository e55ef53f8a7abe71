"""`tests.guarantees.harness` with daemons and workers on a fake GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import fakecuda
from tests.guarantees import harness
from tests.guarantees.harness import MIB, Daemon, Pending, Worker, WorkerDied, WorkerError

PROGRAM = Path(__file__).with_name("worker.py")

__all__ = ["MIB", "PROGRAM", "Daemon", "Pending", "Worker", "WorkerDied", "WorkerError"]


class World:
    """`harness.World` with daemons on the GPU."""

    def __init__(self, made: harness.World, fake: fakecuda.Fake) -> None:
        self._made = made
        self.fake = fake

    def daemon(self, name: str = "d", **settings: object) -> Daemon:
        """A strict one on `cuda:0`, with 16 MiB in chunks of 2 MiB unless `settings` differ."""
        return self._made.daemon(name, **{"device": "cuda:0", "chunk": "2MiB", **settings})

    def workers(self, daemon: Daemon, *labels: str) -> list[Worker]:
        return self._made.workers(daemon, *labels)

    def worker(self, daemon: Daemon, label: str = "w") -> Worker:
        return self._made.worker(daemon, label)

    def alone(self, label: str = "w", **settings: Any) -> tuple[Daemon, Worker]:
        """A daemon, and one worker with it."""
        daemon = self.daemon(**settings)
        return daemon, self.worker(daemon, label)

    def pair(
        self, one: str = "worker", two: str = "other", **settings: Any
    ) -> tuple[Daemon, Worker, Worker]:
        """A daemon, and two workers with it."""
        daemon = self.daemon(**settings)
        return daemon, self.worker(daemon, one), self.worker(daemon, two)

    def hold(self, function: str, process: Worker | Daemon | None = None) -> None:
        """Hold back the work that this function queues, in one process or in all, until `go_on`."""
        only = f" pid={process.pid}" if process is not None else ""
        self.fake.faults(f"{function} hold async{only}")

    def go_on(self, *waiting: Pending) -> None:
        """Hold back nothing any more, and wait for what waited for that."""
        self.fake.faults()
        for each in waiting:
            each.result()


def waits(daemon: Daemon, worker: Worker, name: str) -> Pending:
    """Have a worker ask for what cannot be granted yet."""
    waiting = worker.start("acquire", name)
    daemon.await_record("Waiting")
    return waiting


def failure(kind: str, call: Callable[..., Any], *args: object, **options: object) -> str:
    """The message of the error of this kind that a call ends with."""
    with pytest.raises(WorkerError) as said:
        call(*args, **options)
    assert said.value.kind == kind
    return said.value.message
