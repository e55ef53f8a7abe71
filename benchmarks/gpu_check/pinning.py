"""Cost of pinning host memory, in all ways to pin a host copy."""

from benchmarks.gpu_check.raw import Gpu, Memfd, median_s, seconds
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import GIB, MIB, Settings, fitting


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    gpu = Gpu(settings)
    nbytes = fitting(settings.probe_bytes, 4 * MIB, device_free=1 << 50, host_copies=2, of=1)
    for name, present, writable in (
        ("pages present, mapped read-write", True, True),
        ("pages present, mapped read-only", True, False),
        ("pages absent, mapped read-write", False, True),
    ):
        with check.part(f"pinning a memfd, {name}"):
            _pin(check, gpu, nbytes, name, present=present, writable=writable)
    with check.part("pinning in slices"):
        _slices(check, gpu, nbytes)
    with check.part("pinned memory of the driver's own"):
        _own(check, gpu, nbytes)


def _pin(check: Check, gpu: Gpu, nbytes: int, name: str, *, present: bool, writable: bool) -> None:
    with Memfd(nbytes, present=present, writable=writable) as memory:
        took = seconds(lambda: gpu.pin(memory.address, nbytes, writable=writable))
        freed = seconds(lambda: gpu.unpin(memory.address))
    note = f"{nbytes / GIB:.3g} GiB in one call; unpinning {freed / nbytes * GIB:.3g} s/GiB"
    check.row(f"pinning a memfd, {name}", took / nbytes * GIB, "s/GiB", note)


def _slices(check: Check, gpu: Gpu, nbytes: int) -> None:
    with Memfd(nbytes) as memory:
        for piece in (nbytes, max(nbytes // 16, 4096)):
            starts = range(memory.address, memory.address + nbytes, piece)

            def both(starts: range = starts, piece: int = piece) -> None:
                for at in starts:
                    gpu.pin(at, min(piece, memory.address + nbytes - at), writable=True)
                for at in starts:
                    gpu.unpin(at)

            took = median_s(both, 3)
            name = f"pinning and unpinning, {len(starts)} slices of {piece / MIB:.4g} MiB"
            check.row(name, took / nbytes * GIB, "s/GiB")


def _own(check: Check, gpu: Gpu, nbytes: int) -> None:
    addresses = []
    took = seconds(lambda: addresses.append(gpu.allocate_pinned(nbytes)))
    check.row("pinned memory of the driver's own", took / nbytes * GIB, "s/GiB")
    gpu.free_pinned(addresses[0])
