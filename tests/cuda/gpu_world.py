"""`tests.guarantees.harness` with daemons and workers on a fake GPU."""

from pathlib import Path

from tests import fakecuda
from tests.guarantees import harness
from tests.guarantees.harness import MIB, Daemon, Pending, Worker, WorkerDied, WorkerError

PROGRAM = Path(__file__).with_name("worker.py")

__all__ = ["MIB", "PROGRAM", "Daemon", "Pending", "Worker", "WorkerDied", "WorkerError", "World"]


class World:
    """`harness.World` with daemons on the GPU."""

    def __init__(self, made: harness.World, fake: fakecuda.Fake) -> None:
        self._made = made
        self.fake = fake

    def daemon(self, name: str = "d", **settings: object) -> harness.Daemon:
        """A strict one on `cuda:0`, with 16 MiB in chunks of 2 MiB unless `settings` differ."""
        return self._made.daemon(name, **{"device": "cuda:0", "chunk": "2MiB", **settings})

    def workers(self, daemon: harness.Daemon, *labels: str) -> list[harness.Worker]:
        return self._made.workers(daemon, *labels)

    def worker(self, daemon: harness.Daemon, label: str = "w") -> harness.Worker:
        return self._made.worker(daemon, label)

    def hold(self, function: str, process: harness.Worker | harness.Daemon | None = None) -> None:
        """Hold back the work that this function queues, in one process or in all, until `go_on`."""
        only = f" pid={process.pid}" if process is not None else ""
        self.fake.faults(f"{function} hold async{only}")

    def go_on(self) -> None:
        self.fake.faults()
