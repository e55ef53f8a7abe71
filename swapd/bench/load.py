"""Loading a component from a safetensors file, against reading the file into fresh memory.

The file is in the page cache. Memory is the private memory and mapped file pages of both processes,
and the host copies, each counted once. A separate load measures memory, without timing.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

import swapd_client
from swapd import spawn
from swapd.bench.leaks import memory_of
from swapd.shared import vm
from swapd.shared.system import repeated

NBYTES = 512 << 20
#: Tensors of different sizes, mostly not whole pages, as in a checkpoint.
TENSORS = 61
ROUNDS = 5
_STEP_BYTES = 16 << 20
_SAMPLE_S = 0.002


class LoadTimes(msgspec.Struct, frozen=True):
    """Medians, in seconds. `peak_bytes` is the growth of memory."""

    nbytes: int
    load_s: float
    read_s: float
    peak_bytes: int

    @property
    def speed_ratio(self) -> float:
        return self.read_s / self.load_s

    @property
    def memory_ratio(self) -> float:
        return self.peak_bytes / self.nbytes


def measure(device: str = "host", nbytes: int = NBYTES, rounds: int = ROUNDS) -> LoadTimes:
    with (
        tempfile.TemporaryDirectory(prefix="swapd-bench-") as folder,
        spawn.daemon(device=device, budget=nbytes + (64 << 20)) as daemon,
        swapd_client.connect(daemon.folder, label="bench") as client,
    ):
        path = Path(folder) / "model.safetensors"
        write(path, nbytes)
        loads, reads = [], []
        read(path)
        load(client, path)
        for _ in range(rounds):
            reads.append(read(path))
            loads.append(load(client, path))
        with peak(os.getpid(), daemon.pid) as seen:
            load(client, path)
        return LoadTimes(
            nbytes, statistics.median(loads), statistics.median(reads), seen.with_files
        )


def write(path: Path, nbytes: int) -> None:
    sizes = [nbytes * (i + 1) // (TENSORS * (TENSORS + 1) // 2) // 2 * 2 for i in range(TENSORS)]
    head, end = {}, 0
    for i, size in enumerate(sizes):
        place = [end, end + size]
        head[f"layer.{i}"] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": place}
        end += size
    raw = json.dumps(head).encode()
    raw += b" " * (-len(raw) % 8)
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for at in range(0, end, len(block)):
            file.write(block[: end - at])


def read(path: Path) -> float:
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        nbytes = os.fstat(file.fileno()).st_size
        address = vm.map_anonymous(vm.round_up(nbytes))
        memory, at = vm.view(address, nbytes), 0
        while at < nbytes:
            at += os.preadv(file.fileno(), [memory[at : at + _STEP_BYTES]], at)
    took = time.perf_counter() - began
    vm.free(address, vm.round_up(nbytes))
    return took


def load(client: swapd_client.Client, path: Path) -> float:
    """Return the seconds until the component may be acquired; then unregister it."""
    began = time.perf_counter()
    client.load("loaded", path)
    took = time.perf_counter() - began
    client.unregister("loaded")
    while client.status().host_copy_bytes:  # until it is dropped, it delays the next load
        time.sleep(0.01)
    return took


class Peak:
    #: Private memory of the processes, and host copies: memory that nothing else can use.
    own = 0
    #: Also mapped file pages, which the kernel can drop and read again.
    with_files = 0


@contextmanager
def peak(worker: int, daemon: int | None = None) -> Iterator[Peak]:
    """Watch the host memory of a worker and its daemon while the block runs."""
    before = _host_bytes(worker, daemon)
    most = Peak()

    def look() -> None:
        own, files = _host_bytes(worker, daemon)
        most.own = max(most.own, own - before[0])
        most.with_files = max(most.with_files, own + files - sum(before))

    with repeated(look, lambda: _SAMPLE_S):
        yield most


def _host_bytes(worker: int, daemon: int | None) -> tuple[int, int]:
    pids = [pid for pid in (worker, daemon) if pid is not None]
    counted = [memory_of(pid, "RssAnon", "RssFile") for pid in pids]
    masters = 0 if daemon is None else _masters(daemon)
    return sum(own for own, _ in counted) + masters, sum(files for _, files in counted)


def _masters(daemon: int) -> int:
    occupied = {}
    folder = f"/proc/{daemon}/fd"
    for fd in os.listdir(folder):
        try:
            if "memfd:swapd-host-copy" in os.readlink(f"{folder}/{fd}"):
                there = os.stat(f"{folder}/{fd}")
                occupied[there.st_ino] = there.st_blocks * 512
        except FileNotFoundError:  # closed meanwhile
            continue
    return sum(occupied.values())
