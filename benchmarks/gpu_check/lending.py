"""A workspace: device memory for a worker's own allocator, and its return."""

from benchmarks.gpu_check.rig import (
    chunks_of,
    comes_true,
    registered,
    room_for,
    serving,
    watching,
    workers,
)
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import MIB, Settings

LAYERS = 2


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    with check.part("a workspace", guarantee=True):
        _borrow(check, settings)


def _borrow(check: Check, settings: Settings) -> None:
    nbytes = room_for(settings, settings.model_bytes, of=4, host_copies=4)
    span = chunks_of(nbytes, settings)
    with (
        serving(settings, 2 * span) as daemon,
        watching(daemon) as watch,
        workers(settings, daemon.folder, "one", "two") as (one, two),
    ):
        expected = registered((one, "a"), (two, "b"), nbytes=nbytes, layers=LAYERS)
        for worker, name in ((one, "a"), (two, "b")):
            worker.ask("turn", name)
        said = two.ask("borrow", span)
        lent = said["granted"] - said["free"]
        check.holds("the driver has the memory that is lent", lent >= span, _mib(lent, span))
        check.holds("torch can use it", said["right"])
        if not settings.stub:
            taken = said["granted"] - said["taken"]
            check.row("of it torch took", taken / MIB, "MiB")
        right = True
        for worker, name in ((one, "a"), (two, "b"), (one, "a")):
            right = right and worker.ask("turn", name)["digest"] == expected[name]
        check.holds("components come back to where it was", right)
        slack = 2 * settings.chunk_bytes
        back = comes_true(lambda: watch.status().device_free_bytes <= said["free"] + slack)
        check.holds("afterwards the memory is the arena's again", back)


def _mib(lent: int, wanted: int) -> str:
    return f"{lent / MIB:.0f} MiB came free of {wanted / MIB:.0f}"
