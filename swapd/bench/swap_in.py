"""Time of a load that evicts an idle component of the same size, from call to grant.

The baseline is the simplest copy of as many bytes: `torch.Tensor.copy_` on the host; on a GPU one
cudaMemcpyAsync (the driver's cuMemcpyHtoDAsync) from pinned memory. The plain copy comes after the
load, because torch's threads spin on every core for some milliseconds after an operation.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec

import swapd_client
from swapd import spawn
from swapd.shared.config import gpu_number

NBYTES = 256 << 20
#: Larger for a GPU, whose copies are so fast that messages would dominate.
GPU_NBYTES = 1 << 30
ROUNDS = 51
WARM_UP = 3
#: Seconds to wait for pinning, which runs in the background: before, copies to a GPU are slow.
PIN_S_PER_GIB = 0.8


class SwapIn(msgspec.Struct, frozen=True):
    """Seconds are medians."""

    ratio: float
    nbytes: int
    swap_s: float
    copy_s: float
    copy_threads: int
    bytes_in: int
    bytes_back: int


def measure(
    device: str = "host",
    nbytes: int | None = None,
    rounds: int = ROUNDS,
    program: Sequence[str] = spawn.SERVE,
    **settings: object,
) -> SwapIn:
    """Let two workers take turns, with a plain copy after each swap."""
    nbytes = nbytes or (NBYTES if device == "host" else GPU_NBYTES)
    swaps, copies = [], []
    with (
        copier(device, nbytes) as plain,
        spawn.daemon(program, device=device, budget=nbytes + nbytes // 8, **settings) as daemon,
        peer(_rival, str(daemon.folder), nbytes) as rival,
        swapd_client.connect(daemon.folder, label="bench") as client,
    ):
        weights, read = _weights(device, nbytes)
        client.register("mine", {"weights": weights})

        def theirs() -> None:
            rival.send_bytes(b"go")
            rival.recv_bytes()

        def turn() -> None:
            theirs()
            client.acquire("mine").release()

        until_pinned(client, 2 * nbytes, turn)
        for _ in range(WARM_UP):
            turn()
        for _ in range(rounds):
            theirs()
            started = time.perf_counter()
            with client.acquire("mine") as lease:
                swaps.append(time.perf_counter() - started)
                assert lease.loaded
                read()  # as a worker does, so that the next eviction has page tables to take away
            copies.append(seconds_of(plain.copy))
        status = client.status()
    swap_s, copy_s = statistics.median(swaps), statistics.median(copies)
    return SwapIn(
        ratio=copy_s / swap_s,
        nbytes=nbytes,
        swap_s=swap_s,
        copy_s=copy_s,
        copy_threads=plain.threads,
        bytes_in=status.bytes_in,
        bytes_back=status.bytes_out,
    )


def _weights(device: str, nbytes: int) -> tuple[Any, Callable[[], object]]:
    """Return weights and a function that reads them, which does nothing on a GPU."""
    if device != "host":
        return b"mine".ljust(nbytes), lambda: None
    import torch

    weights = torch.full((nbytes // 8,), 3, dtype=torch.int64)
    return weights, weights.sum


def until_pinned(client: swapd_client.Client, nbytes: int, turn: Callable[[], object]) -> None:
    """Take turns until all host copies are pinned or refused, or PIN_S_PER_GIB has passed for each
    GiB."""
    until = time.monotonic() + nbytes / (1 << 30) * PIN_S_PER_GIB
    while time.monotonic() < until:
        status = client.status()
        tried = status.pinned_bytes + status.unpinned_bytes
        if status.device == "host" or tried >= status.host_copy_bytes:
            return
        turn()


@contextmanager
def peer(program: Callable[..., None], *about: object) -> Iterator[Connection]:
    """Run `program(pipe, *about)` in a process of its own, which ends once its pipe has; yield the
    other end."""
    spawned = multiprocessing.get_context("spawn")
    ours, theirs = spawned.Pipe()
    process = spawned.Process(target=program, args=(theirs, *about))
    with spawn.without_interrupts():
        process.start()
    theirs.close()  # so that its end ends a wait for it
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def _rival(pipe: Connection, endpoint: str, nbytes: int) -> None:
    with swapd_client.connect(endpoint, label="rival") as client:
        client.register("theirs", {"weights": bytearray(nbytes)})
        with suppress(EOFError):
            while pipe.recv_bytes():
                client.acquire("theirs").release()
                pipe.send_bytes(b"done")


def seconds_of(what: Callable[[], object]) -> float:
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


# --- the plain copy --------------------------------------------------------------------------


class Copier(NamedTuple):
    """`copy` blocks until all bytes are copied, in `threads` threads of the host."""

    copy: Callable[[], object]
    threads: int


def copier(device: str, nbytes: int) -> AbstractContextManager[Copier]:
    """Raises: DeviceError."""
    return _on_host(nbytes) if device == "host" else _on_gpu(device, nbytes)


@contextmanager
def _on_host(nbytes: int) -> Iterator[Copier]:
    import torch

    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    yield Copier(lambda: target.copy_(source), torch.get_num_threads())


@contextmanager
def _on_gpu(device: str, nbytes: int) -> Iterator[Copier]:
    from swapd.device.driver import Driver

    driver = Driver(gpu_number(device) or 0)
    with ExitStack() as undo:
        undo.callback(driver.close)
        undo.enter_context(driver.current())
        stream = driver.stream()
        undo.callback(driver.destroy_stream, stream)
        source = driver.allocate_pinned(nbytes)
        undo.callback(driver.free_pinned, source)
        target = int(driver.call(driver.api.cuMemAlloc, nbytes))
        undo.callback(driver.call, driver.api.cuMemFree, target)

        def copy() -> None:
            driver.copy_to_device(target, source, nbytes, stream)
            driver.finish(stream)

        yield Copier(copy, 1)
