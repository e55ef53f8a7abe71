"""1,000 swap cycles: what daemon and worker keep of them. And how still an idle daemon is."""

import os
import time
from pathlib import Path

import msgspec

import swapd_client
from swapd import spawn

CYCLES = 1000
WARM_UP = 200
NBYTES = 8 << 20
#: The last records are written in this time; after that nothing is left to do.
SETTLE_S = 0.5
IDLE_S = 3.0
LOOK_S = 0.05


class Leaks(msgspec.Struct, frozen=True):
    """Growth over `cycles`: descriptors, resident bytes. Wake-ups per second when idle."""

    cycles: int
    swaps: int
    daemon_fds: int
    worker_fds: int
    daemon_rss_bytes: int
    worker_rss_bytes: int
    idle_wakeups_per_s: float


def measure(device: str = "host") -> Leaks:
    """Two components that do not fit together, in turn; figures after a warm-up."""
    with (
        spawn.daemon(device=device, budget=NBYTES + (2 << 20), chunk="2MiB") as daemon,
        swapd_client.connect(daemon.folder, label="bench") as client,
        swapd_client.connect(daemon.folder, label="observer") as observer,
    ):
        for name in ("a", "b"):
            client.register(name, {"weights": bytearray(NBYTES)})
        _cycle(client, WARM_UP)
        _linger(client, observer)
        before = _footprints(daemon.pid)
        loads = client.status().loads
        _cycle(client, CYCLES)
        swaps = client.status().loads - loads
        time.sleep(SETTLE_S)
        after = _footprints(daemon.pid)
        wakeups = _wakeups(daemon.pid)
        time.sleep(IDLE_S)
        woke = _wakeups(daemon.pid) - wakeups
    (daemon_fds, daemon_rss), (worker_fds, worker_rss) = (
        (then[0] - now[0], then[1] - now[1]) for now, then in zip(before, after, strict=True)
    )
    return Leaks(CYCLES, swaps, daemon_fds, worker_fds, daemon_rss, worker_rss, woke / IDLE_S)


def _cycle(client: swapd_client.Client, count: int) -> None:
    for _ in range(count):
        for name in ("a", "b"):
            client.acquire(name).release()


def _linger(client: swapd_client.Client, observer: swapd_client.Client) -> None:
    """Have the client make what it needs to end a lease that lingers, before anything is counted.

    Returns when that lease has ended: its own thread did that, for this one asks nothing more.
    """
    for _ in range(10):
        client.acquire("b").release()  # it is in: nothing is swapped
    while any(component.leases for component in observer.status().components):
        time.sleep(LOOK_S)


def _footprints(daemon: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return _footprint(daemon), _footprint(os.getpid())


def _footprint(pid: int) -> tuple[int, int]:
    """Open descriptors and resident bytes of a process."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return len(os.listdir(f"/proc/{pid}/fd")), int(fields["VmRSS"].split()[0]) * 1024


def _wakeups(pid: int) -> int:
    """How often the threads of a process have been switched to."""
    switches = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if "ctxt_switches" in line:
                switches += int(line.split()[1])
    return switches
