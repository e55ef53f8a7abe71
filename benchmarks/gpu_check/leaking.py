"""Many swap cycles, and their leaks of descriptors, host memory and device memory."""

import os
from functools import partial

from benchmarks.gpu_check.rig import comes_true, footprint, serving, watching
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import MIB, Settings
from swapd.bench.leaks import growth
from swapd_client import Client

WARM_UP = 50
#: Rounds of the cycles: a leak recurs in each.
ROUNDS = 10
RSS_BYTES = 4 * MIB


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    with check.part("swap cycles", guarantee=True):
        _cycles(check, settings)


def _cycles(check: Check, settings: Settings) -> None:
    nbytes = 2 * settings.chunk_bytes
    with (
        serving(settings, nbytes) as daemon,
        watching(daemon) as client,
    ):
        for name in ("a", "b"):
            client.register(name, {"weights": name.encode().ljust(nbytes)})
        _cycle(client, min(WARM_UP, settings.cycles))
        look = partial(_look, daemon.pid, client)
        looks, loads = [look()], client.status().loads
        for _ in range(ROUNDS):
            _cycle(client, settings.cycles // ROUNDS)
            looks.append(look())
        swaps = client.status().loads - loads
        before, after = looks[0], looks[-1]
        check.row("swaps", swaps)
        for who in ("daemon", "worker"):
            left = growth([each[f"{who} fds"] for each in looks])
            check.at_most(f"descriptors that a round leaves open in the {who}", left, 0)
            grown = after[f"{who} rss"] - before[f"{who} rss"]
            check.at_most(f"resident memory more in the {who}", grown / MIB, RSS_BYTES / MIB, "MiB")
        kept = comes_true(lambda: look()["device"] >= before["device"])
        lost = (before["device"] - look()["device"]) / MIB
        check.holds("the driver's free memory is what it was", kept, f"{lost:.0f} MiB less")


def _cycle(client: Client, times: int) -> None:
    for _ in range(times):
        for name in ("a", "b"):
            client.acquire(name).release()


def _look(daemon: int, client: Client) -> dict[str, int]:
    found = {"device": client.status().device_free_bytes}
    for who, pid in (("daemon", daemon), ("worker", os.getpid())):
        for what, value in footprint(pid).items():
            found[f"{who} {what}"] = value
    return found
