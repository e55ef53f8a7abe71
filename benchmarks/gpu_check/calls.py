"""Cost of the driver's memory calls: by size, with an idle and with a busy GPU."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.gpu_check.raw import Busy, Gpu, Mapped, seconds
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import MIB, Settings
from swapd.device.context import CudaError
from swapd.device.driver import Access

#: Repetitions of each call; and seconds for which the GPU is busy.
TIMES = 15
BUSY_S = 0.8


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    gpu = Gpu(settings)
    chunks = [n * MIB for n in (2, 64, 512) if n * MIB <= settings.probe_bytes]
    for nbytes in chunks:
        with check.part(f"calls, {nbytes // MIB} MiB, idle"):
            _row(check, f"calls, {nbytes // MIB} MiB, idle", _costs(gpu, nbytes))
    with check.part("calls with a busy GPU"):
        _while_busy(check, gpu, chunks)
    for part in (_one_range, _unmap_at_once, _descriptors):
        with check.part(part.__name__):
            part(check, gpu, settings)


class Stopwatch:
    """Times by name, in microseconds."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    @contextmanager
    def over(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.times.setdefault(name, []).append((time.perf_counter() - started) * 1e6)

    def __str__(self) -> str:
        return ", ".join(f"{k} {statistics.median(v):.0f}" for k, v in self.times.items())

    def total(self, *names: str) -> float:
        return sum(statistics.median(self.times[name]) for name in names)


def _row(check: Check, name: str, watch: Stopwatch) -> None:
    mapping = watch.total("map", "set access", "unmap")
    check.row(f"{name}: map, set access, unmap", mapping, "us", f"us each: {watch}")


def _costs(gpu: Gpu, nbytes: int, times: int = TIMES) -> Stopwatch:
    """One allocation's whole life, again and again."""
    watch = Stopwatch()
    address = gpu.reserve(nbytes)
    for _ in range(times):
        with watch.over("create"):
            handle = gpu.create(nbytes)
        with watch.over("export"):
            fd = gpu.export(handle)
        with watch.over("import"):
            adopted = gpu.adopt(fd.fileno())
        fd.close()
        with watch.over("map"):
            gpu.map(address, nbytes, adopted)
        with watch.over("set access"):
            gpu.set_access(address, nbytes, Access.READ)
        with watch.over("revoke"):
            gpu.set_access(address, nbytes, Access.NONE)
        with watch.over("unmap"):
            gpu.unmap(address, nbytes)
        gpu.release(adopted)
        with watch.over("release"):
            gpu.release(handle)
    gpu.free(address, nbytes)
    return watch


def _while_busy(check: Check, gpu: Gpu, sizes: list[int]) -> None:
    """Whether they wait for kernels: then the queue is empty afterwards."""
    busy = Busy(gpu)
    for nbytes in sizes:
        busy.enqueue(BUSY_S if busy.what == "matrix products" else 0.05)
        watch = _costs(gpu, nbytes, 5)
        still = busy.running()
        left = seconds(busy.wait)
        name = f"calls, {nbytes // MIB} MiB, busy GPU"
        _row(check, name, watch)
        check.row(
            f"{name}: did not wait for kernels",
            still,
            note=f"{left:.2f} s of {busy.what} were left afterwards",
        )


def _one_range(check: Check, gpu: Gpu, settings: Settings) -> None:
    """A component's chunks in one range: cost by the chunk."""
    count = max(settings.probe_bytes // settings.chunk_bytes, 2)
    with Mapped(gpu, settings.chunk_bytes, count) as chunks:
        chunks.unmap()
        steps: tuple[tuple[str, Callable[[], None]], ...] = (
            ("map all and set access once", chunks.map),
            (
                "revoke in one call",
                lambda: gpu.set_access(chunks.address, chunks.nbytes, Access.NONE),
            ),
            (
                "allow again in one call",
                lambda: gpu.set_access(chunks.address, chunks.nbytes, Access.READ),
            ),
            ("unmap each", chunks.unmap),
        )
        for name, step in steps:
            each = f"{count} chunks of {settings.chunk_bytes // MIB} MiB"
            check.row(f"{each}: {name}", seconds(step) * 1e6, "us")
        chunks.map()


def _unmap_at_once(check: Check, gpu: Gpu, settings: Settings) -> None:
    """Whether one unmap takes several neighbouring mappings."""
    chunks = Mapped(gpu, 2 * MIB, 4)
    try:
        gpu.unmap(chunks.address, chunks.nbytes)
    except CudaError as exc:
        check.row("one unmap takes several mappings", False, note=str(exc))
    else:
        check.row("one unmap takes several mappings", True)
        chunks.map()
    chunks.close()


def _descriptors(check: Check, gpu: Gpu, settings: Settings) -> None:
    """Number of descriptors that handles take."""
    gpu.release(gpu.create(2 * MIB))
    before = _open()
    handles = [gpu.create(2 * MIB) for _ in range(32)]
    created = _open() - before
    fd = gpu.export(handles[0])
    exported = _open() - before - created
    imported = gpu.adopt(fd.fileno())
    adopted = _open() - before - created - exported
    check.row(
        "descriptors of a handle",
        created / len(handles),
        note=f"{exported} of an export, {adopted} of an import",
    )
    gpu.release(imported)
    fd.close()
    for handle in handles:
        gpu.release(handle)
    check.row("descriptors left afterwards", _open() - before)


def _open() -> int:
    return len(os.listdir("/proc/self/fd"))
