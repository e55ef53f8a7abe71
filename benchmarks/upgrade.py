"""`python -m benchmarks.upgrade`: the longest pause of a loop of acquires in an upgrade.

Beside it, in turn: the start of another daemon of the same settings, from its process to its first
line. The loop holds 4 MiB for 5 ms each time; the pause is that of the acquire, with the load.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import swapd_client
from benchmarks.processes import Daemon

NBYTES, STEP_S, TURNS = 4 << 20, 0.005, 7


def started_s(folder: Path) -> float:
    begun = time.monotonic()
    daemon = Daemon(folder / "other", folder / "said", budget="64MiB")
    took_s = time.monotonic() - begun
    daemon.stop()
    return took_s


class Loop(threading.Thread):
    def __init__(self, client: swapd_client.Client) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.over = threading.Event()
        #: The longest wait since it was set to 0, and the number of all.
        self.longest_s, self.turns = 0.0, 0

    def run(self) -> None:
        while not self.over.is_set():
            begun = time.monotonic()
            with self.client.acquire("x"):
                self.longest_s = max(self.longest_s, time.monotonic() - begun)
                self.turns += 1
                time.sleep(STEP_S)

    def await_turn(self) -> None:
        """Wait for an acquire that has begun after this call."""
        turn = self.turns + 2
        while self.turns < turn:
            time.sleep(STEP_S)


def main() -> None:
    starts_s, pauses_s = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        daemon = Daemon(folder / "d", folder / "said", budget="64MiB")
        with swapd_client.connect(daemon.folder) as client:
            client.register("x", {"data": bytearray(NBYTES)})
            loop = Loop(client)
            loop.start()
            for _ in range(TURNS):
                starts_s.append(started_s(folder))
                loop.await_turn()
                loop.longest_s = 0.0
                daemon.upgrade()
                loop.await_turn()
                pauses_s.append(loop.longest_s)
            loop.over.set()
            loop.join()
        daemon.stop()
    ratio = median(pauses_s) / median(starts_s)
    sys.stdout.write(
        f"longest pause {median(pauses_s):.2f} s, start of a daemon {median(starts_s):.2f} s, "
        f"ratio {ratio:.2f}; medians of {TURNS}\n"
    )


if __name__ == "__main__":
    main()
