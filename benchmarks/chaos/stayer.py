"""A worker that keeps its client through all daemons, as programs do by default."""

import random
from contextlib import suppress

from benchmarks.chaos import worker
from benchmarks.chaos.worker import PATIENCE_S
from swapd_client import Client, DaemonGone, SwapdError, UnknownComponent


class Stayer(worker.Worker):
    reconnect_s = PATIENCE_S

    def judge(self, ended: SwapdError | None, error: SwapdError) -> None:
        super().judge(error if isinstance(error, DaemonGone) else ended, error)

    def _work(self, client: Client, seed: float) -> None:
        rng = random.Random(seed)
        while not self.enough.is_set():  # after DaemonGone its next call joins the next daemon
            super()._work(client, rng.random())
            self._end(client, self._name_here())

    def _end(self, client: Client, name: str) -> None:
        """Unregister what a daemon that died left registered, through those that die meanwhile."""
        while True:
            with suppress(DaemonGone):
                with suppress(UnknownComponent):
                    client.unregister(name)
                return


if __name__ == "__main__":
    worker.main(Stayer)
