"""SIGKILL of a worker under load, and of the daemon: the effects on others."""

import os
import signal

from benchmarks.gpu_check.rig import (
    Worker,
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

LAYERS = 4
#: Number of times that the next owner checks its bytes.
LOOKS = 20
#: A context's own memory: smaller differences are noise.
CONTEXT_BYTES = 64 * MIB


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    nbytes = room_for(settings, settings.model_bytes, of=4, host_copies=4)
    with check.part("a worker is killed", guarantee=True):
        _worker(check, settings, nbytes)
    with check.part("a worker is killed that writes", guarantee=True):
        _writer(check, settings, nbytes)
    with check.part("the daemon is killed", guarantee=True):
        _daemon(check, settings, nbytes)


def _worker(check: Check, settings: Settings, nbytes: int) -> None:
    span = chunks_of(nbytes, settings)
    with (
        serving(settings, 2 * span) as daemon,
        watching(daemon) as watch,
        workers(settings, daemon.folder, "one", "two", "doomed") as (one, two, doomed),
    ):
        models = (one, "a"), (two, "b"), (doomed, "d")
        expected = registered(*models, nbytes=nbytes, layers=LAYERS)
        free = watch.status().device_free_bytes
        for worker, name in ((one, "a"), (doomed, "d")):
            worker.tell("work", name, expected[name])
            worker.answer()  # it has begun
        two.tell("turn", "b")  # waits for one of the two
        doomed.process.send_signal(signal.SIGKILL)
        turn = two.answer()
        check.holds("who waited is granted the memory of the dead", turn["digest"] == expected["b"])
        _end_work(check, one)
        gone = comes_true(lambda: not any(c.name == "d" for c in watch.status().components))
        check.holds("nothing of the dead is left in the daemon", gone)
        back = comes_true(lambda: watch.status().device_free_bytes >= free - CONTEXT_BYTES)
        check.holds("the driver has the dead worker's memory back", back)


def _end_work(check: Check, worker: Worker) -> None:
    worker.tell("footprint")  # any command ends the work
    worked = worker.answer()
    worker.answer()
    right = worked["steps"] > 0 and not worked["wrong"]
    note = f"{worked['steps']} steps, {worked['wrong']} wrong"
    check.holds("who computed meanwhile computed the same", right, note)


def _writer(check: Check, settings: Settings, nbytes: int) -> None:
    """Its kernels may run on for a while: the next owner of its chunks checks every byte."""
    with (
        serving(settings, chunks_of(nbytes, settings)) as daemon,
        watching(daemon) as watch,
        workers(settings, daemon.folder, "doomed", "next") as (doomed, following),
    ):
        registered((doomed, "m"), nbytes=nbytes, layers=LAYERS, mutable=True)
        registered((following, "n"), nbytes=nbytes, layers=LAYERS, first_seed=1)
        following.ask("keep", "n")
        doomed.tell("write_on", "m")
        doomed.answer()  # it has begun
        doomed.process.send_signal(signal.SIGKILL)
        same = [following.ask("is_as_kept", "n") for _ in range(LOOKS)]
        right = f"{sum(same)} of {LOOKS} looks at all bytes were right"
        check.holds("what a killed worker's kernels write reaches no other owner", all(same), right)
        back = comes_true(lambda: not watch.status().quarantined_bytes)
        check.holds("nothing stays kept from others for it", back)


def _daemon(check: Check, settings: Settings, nbytes: int) -> None:
    span = chunks_of(nbytes, settings)
    with (
        serving(settings, 2 * span) as daemon,
        workers(settings, daemon.folder, "one", "two") as (one, two),
    ):
        expected = registered((one, "a"), (two, "b"), nbytes=nbytes, layers=LAYERS)
        one.ask("capture", "a")
        one.ask("hold", "a")
        two.tell("work", "b", expected["b"])
        two.answer()  # it has begun
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.process.wait()
        _after_the_daemon(check, one, two, expected)


def _after_the_daemon(check: Check, one: Worker, two: Worker, expected: dict[str, str]) -> None:
    held = computes_and_replays(one, "a", expected["a"])
    check.holds("a lease that was held computes on, and its graph replays", held)
    _end_work(check, two)
    error = one.ask("acquire_fails", "a")
    check.holds("a new acquire fails at once", error == "DaemonGone", error)
    for worker, name in ((one, "a"), (two, "b")):
        addresses = worker.ask("addresses", name)
        private = closes_in_place(worker, name, expected[name], addresses)
        check.holds(f"close() leaves {name} in private memory, where it was", private)


def computes_and_replays(worker: Worker, name: str, expected: str) -> bool:
    """Whether a model and its graph compute what they did, under a lease that is held."""
    return [worker.ask(how, name) for how in ("compute", "replay_held")] == [expected] * 2


def closes_in_place(worker: Worker, name: str, expected: str, addresses: list[int]) -> bool:
    """Close the client of a worker with one model; whether that is private memory there now."""
    return [worker.ask("close"), worker.ask("addresses", name)] == [[expected], addresses]
