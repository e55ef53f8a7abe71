"""The client's driver calls during captures of graphs, and whether any spoils a capture.

A capture in global mode, as `torch.cuda.graph` makes it, ends without a graph when any thread makes
certain calls meanwhile. Each call is tried as it is, for information; and as the client makes it,
with the thread's capture mode exchanged, where it must not spoil the capture.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from benchmarks.gpu_check.raw import Gpu, Mapped, Memfd
from benchmarks.gpu_check.rig import room_for, serving, watching
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import MIB, Settings
from swapd.device.base import DeviceError
from swapd.device.driver import Access
from swapd_client import Client

PAGE = 4096
#: Number of loads of each component while one graph is captured.
TURNS = 3
#: Seconds; longer than any turn.
PATIENCE_S = 30.0

Call = Callable[[], object]


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    gpu = Gpu(settings)
    with Mapped(gpu, settings.chunk_bytes, 1) as chunk, Memfd(PAGE) as page:
        for name, call in _calls(gpu, chunk, page).items():
            with check.part(name, guarantee=True):
                _one_call(check, gpu, name, call)
    with check.part("a capture beside swaps", guarantee=True):
        _beside_swaps(check, gpu, settings)


# --- single calls ------------------------------------------------------------------------


def _calls(gpu: Gpu, chunk: Mapped, page: Memfd) -> dict[str, Call]:
    """The client's driver calls, by name. None uses the capturing stream."""
    event, nbytes = gpu.event(), chunk.chunk_bytes
    gpu.record(event, gpu.main)
    gpu.finish(gpu.main)

    def mapping() -> None:
        spare = gpu.reserve(nbytes)  # a new one each time: it may stay mapped if a call fails
        with gpu.export(chunk.handles[0]) as fd:
            handle = gpu.adopt(fd.fileno())
        gpu.map(spare, nbytes, handle)
        gpu.set_access(spare, nbytes, Access.READ)
        gpu.set_access(spare, nbytes, Access.NONE)
        gpu.unmap(spare, nbytes)
        gpu.release(handle)
        gpu.free(spare, nbytes)

    def events() -> None:
        made = gpu.event()
        gpu.record(made, gpu.main)
        gpu.synchronize(made)
        gpu.destroy_event(made)

    def pinning() -> None:
        gpu.pin(page.address, PAGE, writable=True)
        gpu.unpin(page.address)

    return {
        "whether the default stream captures": partial(gpu.is_capturing, 0),
        "a query of the default stream": partial(gpu.is_idle, 0),
        "a query of another stream": partial(gpu.is_idle, gpu.main),
        "a query of an event": partial(gpu.query, event),
        "an event made, recorded, waited for, destroyed": events,
        "a chunk imported, mapped, revoked, unmapped": mapping,
        "memory made and released": lambda: gpu.release(gpu.create(nbytes)),
        "a page pinned and unpinned": pinning,
        "a stream made and destroyed": lambda: gpu.destroy_stream(gpu.stream()),
    }


def _one_call(check: Check, gpu: Gpu, name: str, call: Call) -> None:
    said = []
    for where, run in (("its own thread", _here), ("another thread", _in_a_thread)):
        error, capture = _captured(gpu, partial(run, gpu, call, nullcontext()))
        said.append(f"in {where}: {capture}" + (f" ({error})" if error else ""))
        error, capture = _captured(gpu, partial(run, gpu, call, gpu.sparing_captures()))
        held = not error and capture == "CUDA_SUCCESS"
        check.holds(f"{name}, as the client makes it, in {where}", held, error or capture)
    check.row(f"{name}, as it is", "; ".join(said))


def _here(gpu: Gpu, call: Call, mode: AbstractContextManager[None]) -> None:
    with mode:
        call()


def _in_a_thread(gpu: Gpu, call: Call, mode: AbstractContextManager[None]) -> None:
    errors: list[DeviceError] = []

    def run() -> None:
        try:
            with gpu.current(), mode:
                call()
        except DeviceError as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _captured(gpu: Gpu, meanwhile: Call) -> tuple[str, str]:
    """The error of `meanwhile`, and the result of a capture around it."""
    stream, error = gpu.stream(), ""
    _begin(gpu, stream)
    try:
        meanwhile()
    except DeviceError as exc:
        error = str(exc)
    return error, _end(gpu, stream)


def _begin(gpu: Gpu, stream: Any) -> None:
    mode = gpu.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    gpu.call(gpu.api.cuStreamBeginCapture, stream, mode)


def _end(gpu: Gpu, stream: Any) -> str:
    """The result of the capture of `stream`; the stream is destroyed."""
    result, graph = gpu.api.cuStreamEndCapture(stream)
    if not result:
        gpu.call(gpu.api.cuGraphDestroy, graph)
    gpu.destroy_stream(stream)
    return str(result.name)


# --- the client itself -------------------------------------------------------------------


def _beside_swaps(check: Check, gpu: Gpu, settings: Settings) -> None:
    """Components evict each other, and leases come and go, during a capture."""
    nbytes = room_for(settings, min(settings.model_bytes, 64 * MIB), of=1.2, host_copies=2.2)
    for isolation in ("relaxed", "strict"):
        with (
            serving(settings, nbytes, isolation=isolation) as daemon,
            watching(daemon) as client,
        ):
            for name in ("a", "b"):
                client.register(name, {"weights": name.encode().ljust(nbytes)})
            stream, target = gpu.stream(), gpu.alloc(PAGE)
            _begin(gpu, stream)
            gpu.fill(target, PAGE, 1, stream)
            swapping = threading.Thread(target=_swap, args=(client,))
            swapping.start()
            for _ in range(TURNS):
                with client.acquire("a", timeout=PATIENCE_S) as lease:
                    lease.uses(stream)
            swapping.join()
            ended = _end(gpu, stream)
            gpu.dealloc(target)
            check.holds(
                f"a capture goes on beside acquires, evictions and releases, {isolation}",
                ended == "CUDA_SUCCESS",
                f"{ended}, {client.status().evictions} evictions",
            )


def _swap(client: Client) -> None:
    for _ in range(TURNS):
        for name in ("b", "b", "a"):
            client.acquire(name, timeout=PATIENCE_S).release()
