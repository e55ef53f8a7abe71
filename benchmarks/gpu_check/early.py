"""Early leases: compute waits for its own segment, on host or stream."""

from benchmarks.gpu_check.rig import chunks_of, registered, room_for, serving, workers
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import Settings

ROUNDS = 5
SEGMENTS = 8
#: Factor for the component of the kill, so that its copy lasts until the kill.
LARGER = 8
#: On a busy machine the copy may have ended by then; then it is tried again.
TRIES = 5


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    with check.part("segments in order", guarantee=True):
        _in_order(check, settings)
    with check.part("the daemon dies while a stream waits", guarantee=True):
        _killed(check, settings)


def _in_order(check: Check, settings: Settings) -> None:
    nbytes = room_for(settings, settings.model_bytes, of=4, host_copies=4)
    with (
        serving(settings, chunks_of(nbytes, settings)) as daemon,
        workers(settings, daemon.folder, "one", "two") as (one, two),
    ):
        expected = registered((one, "a"), nbytes=nbytes, layers=SEGMENTS, segmented=True)
        registered((two, "b"), nbytes=nbytes, layers=SEGMENTS, first_seed=1)
        for where in ("stream", "host"):
            turns = []
            for _ in range(ROUNDS):
                two.ask("turn", "b")
                turns.append(one.ask("early", "a", on_host=where == "host"))
            right = all(turn["digest"] == expected["a"] for turn in turns)
            loaded = all(turn["loaded"] for turn in turns)
            name = f"an early lease, each segment waited for on the {where}: same bits"
            check.holds(name, right and loaded)


def _killed(check: Check, settings: Settings) -> None:
    wanted = LARGER * settings.model_bytes
    nbytes = room_for(settings, wanted, of=2.5, host_copies=3)
    for _ in range(TRIES):
        said, whole = _kill(settings, nbytes)
        if not said["arrived"]:
            break
    _what_came_of_it(check, said)
    # even with a copy in flight: the host copy has the weights
    check.holds("and close() makes the weights private memory, complete", whole)


def _kill(settings: Settings, nbytes: int) -> tuple[dict[str, object], bool]:
    """A worker's report of the daemon's death, and whether its weights are complete afterwards."""
    with (
        serving(settings, chunks_of(nbytes, settings)) as daemon,
        workers(settings, daemon.folder, "one", "two") as (one, two),
    ):
        expected = registered((one, "a"), nbytes=nbytes, layers=SEGMENTS, segmented=True)
        registered((two, "b"), nbytes=nbytes, layers=SEGMENTS, first_seed=1)
        two.ask("turn", "b")
        said = one.ask("early_then_kill", "a", daemon.pid)
        daemon.process.wait()
        return said, one.ask("close") == [expected["a"]]


def _what_came_of_it(check: Check, said: dict[str, object]) -> None:
    name = "the daemon killed during a wait: an error, and no hang"
    errors = said["errors"]
    assert isinstance(errors, list)
    if said["arrived"]:
        check.missing(name, "everything had arrived before the kill")
    else:
        check.holds(name, bool(errors), "; ".join(errors))
