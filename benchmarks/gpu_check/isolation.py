"""Access outside a lease: a fault of the offender only."""

from benchmarks.gpu_check.rig import (
    Worker,
    WorkerError,
    chunks_of,
    comes_true,
    room_for,
    serving,
    workers,
)
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import Settings

LAYERS = 2

#: The cases as (isolation, state, access).
OFFENCES = (
    ("strict", "released", "read"),
    ("relaxed", "evicted", "read"),
    ("relaxed", "released", "write"),
)


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    nbytes = room_for(settings, settings.model_bytes, of=4, host_copies=4)
    span = chunks_of(nbytes, settings)
    for isolation in ("strict", "relaxed"):
        offences = [offence for offence in OFFENCES if offence[0] == isolation]
        labels = [f"offender {number}" for number in range(len(offences))]
        with (
            check.part(f"{isolation} isolation", guarantee=True),
            serving(settings, span, isolation=isolation) as daemon,
            workers(settings, daemon.folder, "bystander", *labels) as (bystander, *offenders),
        ):
            expected = bystander.ask("build", "a", nbytes, LAYERS, 1)
            bystander.ask("register", "a")
            for offender, (_, state, access) in zip(offenders, offences, strict=True):
                name = f"{isolation}: {access} of a component that is {state}"
                with check.part(name, guarantee=True):
                    said = _offend(offender, bystander, nbytes, state, access)
                    check.holds(f"{name}: a fault", said.startswith("fault"), said)
                    turn = bystander.ask("turn", "a")
                    check.holds(f"{name}: others go on", turn["digest"] == expected)
                offender.kill()
            turn = bystander.ask("turn", "a")
            name = f"{isolation}: the daemon serves on when the offenders are gone"
            check.holds(name, turn["digest"] == expected)


def _offend(offender: Worker, other: Worker, nbytes: int, state: str, access: str) -> str:
    """The result of the access; the process's death by a signal counts as a fault."""
    offender.ask("build", "o", nbytes, LAYERS, 2)
    offender.ask("register", "o")
    offender.ask("turn", "o")
    if state != "evicted":
        return _stray(offender, access)
    other.ask("turn", "a")
    said: list[str] = []

    def faulted() -> bool:
        said.append(_stray(offender, access))
        return said[-1].startswith("fault")

    comes_true(faulted)  # the offender's lifeline may take a moment
    return said[-1]


def _stray(offender: Worker, access: str) -> str:
    try:
        return str(offender.ask("stray", "o", access))
    except WorkerError as exc:
        died = (offender.process.poll() or 0) < 0
        return f"fault: {exc}" if died else f"no fault: {exc}"
