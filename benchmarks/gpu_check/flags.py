"""Delay until a stream goes on that waits for a word in memory, as in `lease.wait`."""

import ctypes
import statistics
import time
from functools import partial

from benchmarks.gpu_check.raw import Child, Gpu, Memfd, chain, median_s
from benchmarks.gpu_check.rows import Check, spread
from benchmarks.gpu_check.settings import Settings

PAGE = 4096
TIMES = 50
#: Seconds; longer than any stream takes to begin its wait.
HEADSTART_S = 0.002


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    gpu = Gpu(settings)
    with check.part("an event, recorded and waited for"):
        event = gpu.event()
        record, wait = partial(gpu.record, event, gpu.main), partial(gpu.synchronize, event)
        took = median_s(chain(record, wait), TIMES)
        check.row("an event, recorded and waited for", took * 1e6, "us")
    with Memfd(PAGE) as page:
        gpu.pin(page.address, PAGE, writable=True)
        target = int(gpu.call(gpu.api.cuMemHostGetDevicePointer, page.address, 0))
        check.row("a pinned page has the same address on the GPU", target == page.address)
        with check.part("a stream waits for a word, written by this process"):
            _here(check, gpu, page, target)
        with check.part("a stream waits for a word, written by another process"):
            _there(check, gpu, page, target)
        with check.part("enqueueing a wait"):
            _enqueue(check, gpu, page, target)


def _word(page: Memfd) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(page.address)


def _wait_for(gpu: Gpu, target: int, value: int) -> None:
    geq = gpu.api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    gpu.call(gpu.api.cuStreamWaitValue64, gpu.main, target, value, geq)


def _here(check: Check, gpu: Gpu, page: Memfd, target: int) -> None:
    word = _word(page)
    took = []
    for _ in range(TIMES):
        _wait_for(gpu, target, word.value + 1)
        time.sleep(HEADSTART_S)
        started = time.perf_counter()
        word.value += 1
        gpu.finish(gpu.main)
        took.append(time.perf_counter() - started)
    name = "a stream waits for a word, written by this process"
    check.row(name, statistics.median(took) * 1e6, "us", f"us: {spread(took, 1e6)}")


def _there(check: Check, gpu: Gpu, page: Memfd, target: int) -> None:
    """The other process reports when it wrote, by the clock that all processes share."""
    word = _word(page)
    took = []
    with Child("processes", gpu.settings, "writer") as writer:
        writer.ask("page", page.fd)
        for _ in range(TIMES):
            value = word.value + 1
            _wait_for(gpu, target, value)
            writer.tell(f"write {value}")
            gpu.finish(gpu.main)
            ended = time.perf_counter()
            took.append(ended - float(writer.hear()[0]))
    name = "a stream waits for a word, written by another process"
    check.row(name, statistics.median(took) * 1e6, "us", f"us: {spread(took, 1e6)}")


def _enqueue(check: Check, gpu: Gpu, page: Memfd, target: int) -> None:
    took = median_s(lambda: _wait_for(gpu, target, _word(page).value), TIMES)
    gpu.finish(gpu.main)
    check.row("enqueueing a wait that is over already", took * 1e6, "us")
