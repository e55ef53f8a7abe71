"""Speed of copies: by piece size, through swapd's own device, both directions at once."""

from functools import partial

from benchmarks.gpu_check.raw import Gpu, Mapped, Memfd, chain, in_turn, median_s, pinned
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import KIB, MIB, Settings, fitting
from swapd.device import open_device

PIECES = (256 * KIB, 2 * MIB, 16 * MIB, 64 * MIB)


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    gpu = Gpu(settings)
    free = gpu.free_bytes()
    unit = settings.chunk_bytes
    nbytes = fitting(settings.probe_bytes, unit, device_free=free, host_copies=2, of=3)
    with Mapped(gpu, unit, nbytes // unit) as chunks:
        with pinned(gpu, nbytes) as host:
            for part in (_pieces, _both):
                with check.part(part.__name__.strip("_")):
                    part(check, gpu, chunks, host)
        with check.part("small copies"):
            _small(check, gpu, chunks.address)
    with check.part("the device's own copy"):
        _device(check, gpu, settings, nbytes)


def _pieces(check: Check, gpu: Gpu, chunks: Mapped, host: int) -> None:
    """One copy into plain memory, and copies of pieces into chunks, in turn."""
    plain = gpu.alloc(chunks.nbytes)
    times = gpu.settings.rounds // 2 + 1
    for piece in PIECES:
        if piece > chunks.nbytes:
            continue
        pair = in_turn(
            partial(gpu.copy_in, plain, host, chunks.nbytes),
            partial(gpu.copy_in, chunks.address, host, chunks.nbytes, piece),
            times,
        )
        check.row(
            f"host to device in pieces of {piece / MIB:g} MiB",
            chunks.nbytes / 1e9 / pair.second_s,
            "GB/s",
            f"{pair.first_s / pair.second_s:.3f} of one copy into cuMemAlloc memory, "
            f"{chunks.nbytes / 1e9 / pair.first_s:.3g} GB/s",
        )
    gpu.dealloc(plain)


def _both(check: Check, gpu: Gpu, chunks: Mapped, host: int) -> None:
    """Each direction alone, then both together, each with half of the memory."""
    half = chunks.nbytes // 2
    inward, outward = gpu.main, gpu.stream()

    def start_in() -> None:
        for at in range(0, half, 16 * MIB):
            length = min(16 * MIB, half - at)
            gpu.copy_to_device(chunks.address + at, host + at, length, inward)

    def start_out() -> None:
        for at in range(half, 2 * half, 16 * MIB):
            length = min(16 * MIB, 2 * half - at)
            gpu.copy_to_host(host + at, chunks.address + at, length, outward)

    end_in, end_out = partial(gpu.finish, inward), partial(gpu.finish, outward)
    times = gpu.settings.rounds // 2 + 1
    alone_in, alone_out = in_turn(chain(start_in, end_in), chain(start_out, end_out), times)
    both = median_s(chain(start_in, start_out, end_in, end_out), times)
    check.row("device to host", half / 1e9 / alone_out, "GB/s", f"in {half / 1e9 / alone_in:.3g}")
    check.row(
        "both directions at once, over the slower alone",
        both / max(alone_in, alone_out),
        "",
        f"{2 * half / 1e9 / both:.3g} GB/s together",
    )


def _small(check: Check, gpu: Gpu, target: int) -> None:
    """A copy of 64 KiB and the wait for it: the cost of a worker's own input."""
    with pinned(gpu, 2 * MIB) as host:
        took = median_s(lambda: gpu.copy_in(target, host, 64 * KIB), 200)
    check.row("64 KiB in, and waited for", took * 1e6, "us")


def _device(check: Check, gpu: Gpu, settings: Settings, nbytes: int) -> None:
    """`CudaDevice.copy_in` as the daemon calls it, beside one bare copy of pinned memory."""
    device = open_device(settings.device, nbytes, settings.chunk_bytes, None)
    runs = ((0, nbytes // settings.chunk_bytes),)
    plain = gpu.alloc(nbytes)
    times = settings.rounds // 2 + 1
    try:
        with pinned(gpu, nbytes) as bare, Memfd(nbytes) as master:
            for pinned_master in (False, True):
                if pinned_master:
                    device.pin(master.address, nbytes, writable=True)
                pair = in_turn(
                    partial(gpu.copy_in, plain, bare, nbytes),
                    partial(device.copy_in, runs, master.address, nbytes),
                    times,
                )
                kind = "a pinned master" if pinned_master else "one not pinned, by staging"
                check.row(
                    f"the device's copy of {kind}, over one bare copy",
                    pair.second_s / pair.first_s,
                    "",
                    f"{nbytes / 1e9 / pair.second_s:.3g} GB/s",
                )
            device.unpin(master.address)
    finally:
        gpu.dealloc(plain)
        device.close()
