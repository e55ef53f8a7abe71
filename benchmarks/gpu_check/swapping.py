"""The bounds of a swap: into the device, and out of it."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_check.rig import PROGRAM, comes_true, room_for, serving, watching
from benchmarks.gpu_check.rows import Check, spread
from benchmarks.gpu_check.settings import GIB, MIB, Settings
from swapd.bench import swap_in
from swapd.core.actions import Evict, Evicted
from swapd.log import reader
from swapd.shared import vm
from swapd_client import Client

SWAP_IN_AT_LEAST = 0.95
#: Seconds for 8 GiB; in proportion for less, but never less than the floor.
EVICTION_S, EVICTION_OF, EVICTION_FLOOR_S = 5e-3, 8 * GIB, 1e-3


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    with check.part("swap-in over a pinned copy"):
        _swap_in(check, settings)
    for chunk in (settings.chunk_bytes, 4 * settings.chunk_bytes):
        with check.part(f"eviction of a clean component, chunks of {chunk // MIB} MiB"):
            _eviction(check, settings, chunk)


def _swap_in(check: Check, settings: Settings) -> None:
    nbytes = room_for(settings, settings.swap_bytes, of=2.2, host_copies=3.2)
    chunk = settings.chunk_bytes
    found = swap_in.measure(settings.device, nbytes, settings.rounds, PROGRAM, chunk=chunk)
    note = (
        f"{nbytes / GIB:.3g} GiB: swap {found.swap_s * 1e3:.4g} ms, "
        f"{nbytes / 1e9 / found.swap_s:.3g} GB/s; one copy from pinned memory "
        f"{found.copy_s * 1e3:.4g} ms, {nbytes / 1e9 / found.copy_s:.3g} GB/s"
    )
    name = "speed of a swap-in, call to grant, over that of a pinned copy"
    check.faster(name, found.ratio, SWAP_IN_AT_LEAST, "", note)
    check.at_most("bytes copied back for clean components", found.bytes_back, 0)


def _granted_s(client: Client, name: str) -> float:
    """Seconds from the call to the grant."""
    started = time.perf_counter()
    with client.acquire(name):
        return time.perf_counter() - started


# --- out ---------------------------------------------------------------------------------


def _eviction(check: Check, settings: Settings, chunk: int) -> None:
    """By the swap log, from the decision until the worker has unmapped it (strict)."""
    nbytes = room_for(settings, settings.evict_bytes, of=1.1, host_copies=1.3)
    nbytes = vm.round_up(nbytes, chunk)
    times = settings.rounds // 2 + 1
    with (
        serving(settings, nbytes, isolation="strict", chunk=chunk) as daemon,
        watching(daemon) as client,
    ):
        client.register("large", {"weights": bytearray(nbytes)})
        client.register("small", {"weights": bytearray(MIB)})
        for _ in range(times):
            _granted_s(client, "large")
            _granted_s(client, "small")
        status = client.status()
        path = Path(status.swap_log)
        comes_true(lambda: len(list(_evictions(path, "large"))) == times)
        took = list(_evictions(path, "large"))
        hits = []
        for _ in range(settings.rounds + 1):
            hits.append(_granted_s(client, "large"))
            client.status()  # before it, the client gives back what it keeps
    note = f"strict isolation, {nbytes // chunk} chunks; ms: {spread(took, 1e3)}"
    bound_s = max(EVICTION_S * nbytes / EVICTION_OF, EVICTION_FLOOR_S)
    name = f"eviction of a clean component of {nbytes / GIB:.3g} GiB, by {chunk // MIB} MiB"
    check.slower(name, statistics.median(took) * 1e3, bound_s * 1e3, "ms", note)
    check.at_most(f"{name}: bytes copied", status.bytes_out, 0)
    name = f"strict hit of {nbytes / GIB:.3g} GiB, by {chunk // MIB} MiB"
    check.row(name, statistics.median(hits[1:]) * 1e3, "ms", spread(hits[1:], 1e3))


def _evictions(swap_log: Path, name: str) -> Iterator[float]:
    """Seconds from each decision to evict `name` until it had left."""
    decided: dict[int, float] = {}
    for _, record in reader.read(swap_log):
        match record.action:
            case Evict() as evict if evict.name == name:
                decided[evict.generation] = record.time
            case Evicted() as evicted if evicted.name == name:
                yield record.time - decided[evicted.generation]
