"""Leaks of daemon and worker over swap cycles, and wake-ups of an idle daemon."""

import os
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

import swapd_client
from swapd import spawn

#: 1,000 cycles of two swaps each.
ROUNDS = 10
CYCLES = 100
WARM_UP = 200
NBYTES = 8 << 20
#: Time to write the last records and become idle.
SETTLE_S = 0.5
IDLE_S = 1.0
IDLE_LOOKS = 3


class Leaks(msgspec.Struct, frozen=True):
    cycles: int
    swaps: int
    #: Descriptors left open by a round, in the median.
    daemon_fds: float
    worker_fds: float
    #: Growth over all rounds.
    daemon_rss_bytes: int
    worker_rss_bytes: int
    idle_wakeups_per_s: float

    @property
    def fds(self) -> float:
        return max(self.daemon_fds, self.worker_fds)

    @property
    def rss_bytes(self) -> int:
        return max(self.daemon_rss_bytes, self.worker_rss_bytes)


def measure(
    device: str = "host", rounds: int = ROUNDS, cycles: int = CYCLES, nbytes: int = NBYTES
) -> Leaks:
    """Swap two components that do not fit together; count after a warm-up."""
    with (
        spawn.daemon(device=device, budget=nbytes + (2 << 20), chunk="2MiB") as daemon,
        swapd_client.connect(daemon.folder, label="bench") as client,
    ):
        for name in ("a", "b"):
            client.register(name, {"weights": name.encode().ljust(nbytes)})
        _cycle(client, WARM_UP)
        loads = client.status().loads
        daemons, workers = [_footprint(daemon.pid)], [_footprint(os.getpid())]
        for _ in range(rounds):
            _cycle(client, cycles)
            swaps = client.status().loads - loads  # the answer comes after the last release
            daemons.append(_footprint(daemon.pid))
            workers.append(_footprint(os.getpid()))
        time.sleep(SETTLE_S)
        daemons[-1], workers[-1] = _footprint(daemon.pid), _footprint(os.getpid())
        idle_wakeups_per_s = _idle_wakeups_per_s(daemon.pid)
    return Leaks(
        cycles=cycles,
        swaps=swaps,
        daemon_fds=growth([fds for fds, _ in daemons]),
        worker_fds=growth([fds for fds, _ in workers]),
        daemon_rss_bytes=daemons[-1][1] - daemons[0][1],
        worker_rss_bytes=workers[-1][1] - workers[0][1],
        idle_wakeups_per_s=idle_wakeups_per_s,
    )


def growth(counts: Sequence[int]) -> float:
    """Return the median growth from one look to the next.

    A descriptor that is opened once is no leak; a leak grows in each round.
    """
    return statistics.median(after - before for before, after in pairwise(counts))


def _cycle(client: swapd_client.Client, count: int) -> None:
    for _ in range(count):
        for name in ("a", "b"):
            client.acquire(name).release()


def _footprint(pid: int) -> tuple[int, int]:
    """Return its open descriptors, and its resident bytes."""
    (resident,) = memory_of(pid, "VmRSS")
    return len(os.listdir(f"/proc/{pid}/fd")), resident


def memory_of(pid: int, *names: str) -> list[int]:
    """Return these fields of /proc/PID/status, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return [int(fields[name].split()[0]) * 1024 for name in names]


def _idle_wakeups_per_s(pid: int) -> float:
    """Return the median of several looks, because the first may see unfinished work."""
    counts = []
    for _ in range(IDLE_LOOKS):
        before = _switches(pid)
        time.sleep(IDLE_S)
        counts.append(_switches(pid) - before)
    return statistics.median(counts) / IDLE_S


def _switches(pid: int) -> int:
    switches = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if "ctxt_switches" in line:
                switches += int(line.split()[1])
    return switches
