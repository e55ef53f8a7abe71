"""A real model end to end, without a download: three stages in three processes, in four ways.

Requests go through the stages one after the other. All stages are resident; or they take turns on
swapd, with room for the largest; or they move with `module.to()`; or each is restarted for its
turn. The tokens and the sound must be equal in all ways.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.rig import Worker, chunks_of, free_bytes, serving, watching
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import GIB, STAGES, Settings, host_available, prompt
from swapd.bench import swap_in

#: Share of the GPU's free memory for all stages: the rest is for contexts and activations.
OF_THE_GPU = 0.7
OF_THE_HOST = 0.6
#: Seconds; most for imports, a context and gigabytes of random weights.
START_S = 120.0

RESIDENT, SWAPD = "everything resident", "swapd, with room for the largest"
MODULE_TO, RESTART = "module.to()", "a start for each turn"

#: A stage's output for the tokens of the one before it, as `stage.Stage.turn` returns it.
Turn = Callable[[str, list[int]], dict[str, Any]]


@dataclass
class Found:
    """Results of a way. Seconds are from the beginning of each request."""

    nbytes: dict[str, int] = field(default_factory=dict)
    #: All tokens and the sound of each request.
    made: list[tuple[list[int], str]] = field(default_factory=list)
    #: The same of the first request, made before.
    again: tuple[list[int], str] | None = None
    #: Sums of the weights' bits, by stage.
    weights: dict[str, Any] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    result_s: list[float] = field(default_factory=list)
    least_free: int = 1 << 62
    #: Turns for which weights had to be loaded.
    came: int = 0

    @property
    def tokens_a_second(self) -> float:
        return sum(len(tokens) for tokens, _ in self.made) / sum(self.result_s)


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    free = 0 if settings.on_host else free_bytes(settings)
    wanted = [settings.pipeline_bytes, host_available() * OF_THE_HOST]
    if free:
        wanted.append(free * OF_THE_GPU)
    found: dict[str, Found] = {}
    for name, found[name] in ways(check, settings, int(min(wanted))):
        rows(check, name, found[name], free)
    if len(found) > 1:
        _same_by_all_ways(check, found)


def _same_by_all_ways(check: Check, found: dict[str, Found]) -> None:
    ways, first = ", ".join(found), next(iter(found.values()))
    tokens, sounds = zip(*(one.made[0] for one in found.values()), strict=True)
    same = all(made == tokens[0] for made in tokens)
    check.holds("the same tokens by all ways", same, f"{ways}; {len(tokens[0])} tokens")
    name = "the same sound by all ways, bit for bit"
    if first.again is None or first.again == first.made[0]:
        check.holds(name, all(sound == sounds[0] for sound in sounds), ways)
    else:
        check.missing(name, "the same request twice, everything resident, gives two sounds")
    if first.weights and (other := found.get(SWAPD)):
        name = "every weight on swapd is that of the resident model, bit for bit"
        check.holds(name, first.weights == other.weights)


def ways(check: Check, settings: Settings, nbytes: int) -> Iterator[tuple[str, Found]]:
    """Run each way, with about `nbytes` of weights in all stages: its name, and its result."""
    largest = 0
    for name, run in ((RESIDENT, _kept), (SWAPD, _swapd), (MODULE_TO, _to), (RESTART, _restart)):
        with check.part(f"three stages: {name}", guarantee=True):
            found = run(settings, nbytes, largest)
            largest = max([largest, *found.nbytes.values()])
            yield name, found


def rows(check: Check, name: str, found: Found, free: int) -> None:
    """Report a way. `free`: the device's free memory before; 0 without a device."""
    times = f"{len(found.made)} requests of {len(found.made[0][0])} tokens, weights came in for "
    times += f"{found.came} of {len(found.made) * len(STAGES)} turns"
    if sizes := found.nbytes.items():
        times += "; weights: " + ", ".join(f"{n} {b / GIB:.3g} GiB" for n, b in sizes)
    check.row(f"tokens a second: {name}", found.tokens_a_second, "", times)
    for what, took in (("its first token", found.first_s), ("its sound", found.result_s)):
        check.row(f"from a request to {what}: {name}", statistics.median(took), "s")
    if free:
        peak = (free - found.least_free) / GIB
        check.row(f"device memory at most: {name}", peak, "GiB", "contexts included")


# --- the ways ----------------------------------------------------------------------------


def _kept(settings: Settings, nbytes: int, _: int) -> Found:
    found = Found()
    with _stages(settings) as stages:
        for stage, worker in stages.items():
            found.nbytes[stage] = _ask(worker, "build", nbytes)
        requests(settings, found, partial(_turn, stages))
        found.weights = _weights(stages)
    return found


def _swapd(settings: Settings, nbytes: int, largest: int) -> Found:
    """`largest`: the most bytes of a stage."""
    found, room = Found(), chunks_of(largest, settings)
    with serving(settings, room) as daemon, _stages(settings, daemon.folder) as stages:
        for worker in stages.values():
            _ask(worker, "lend", nbytes, room)
        with watching(daemon) as client:
            swap_in.until_pinned(
                client, nbytes, partial(request, Found(), 0, partial(_turn, stages))
            )
        requests(settings, found, partial(_turn, stages))
        found.weights = _weights(stages)
    return found


def _to(settings: Settings, nbytes: int, _: int) -> Found:
    found = Found()
    with _stages(settings) as stages:
        for worker in stages.values():
            _ask(worker, "build_aside", nbytes)
        requests(settings, found, partial(_turn, stages))
    return found


def _restart(settings: Settings, nbytes: int, _: int) -> Found:
    """One request, because each takes as long: weights are made again, not read from a disk."""

    def turn(stage: str, tokens: list[int]) -> dict[str, Any]:
        with _stages(settings, only=(stage,)) as started:
            _ask(started[stage], "build", nbytes)
            return _turn(started, stage, tokens)

    found = Found()
    request(found, 0, turn)
    return found


# --- requests ----------------------------------------------------------------------------


def requests(
    settings: Settings, found: Found, turn: Turn, *, warm: bool = True, times: int = 0
) -> None:
    """Some requests, or so many `times`. If `warm`, one before them does not count."""
    if warm:
        first = Found()
        request(first, 0, turn)  # compiles and allocates
        found.again = first.made[0]
    for number in range(times or settings.requests):
        request(found, number, turn)


def request(found: Found, number: int, turn: Turn) -> None:
    """Send one request through all stages."""
    tokens, all_tokens, sound, firsts = prompt(number), [], "", []
    started = time.monotonic()
    for stage in STAGES:
        said = turn(stage, tokens)
        tokens = said["tokens"] or tokens
        all_tokens += said["tokens"]
        sound = said["sound"]
        firsts.append(said["first_s"] - started)
        found.came += said["came"]
        found.least_free = min(found.least_free, said["free"])
    found.made.append((all_tokens, sound))
    found.first_s.append(firsts[0])
    found.result_s.append(firsts[-1])


def _turn(stages: dict[str, Worker], stage: str, tokens: list[int]) -> dict[str, Any]:
    said: dict[str, Any] = _ask(stages[stage], "turn", tokens)
    return said


def _weights(stages: dict[str, Worker]) -> dict[str, Any]:
    return {stage: _ask(worker, "weights") for stage, worker in stages.items()}


def _ask(worker: Worker, do: str, *arguments: object) -> Any:
    worker.tell(do, *arguments)
    return worker.answer(START_S)


@contextmanager
def _stages(
    settings: Settings, endpoint: Path = Path("/"), only: tuple[str, ...] = STAGES
) -> Iterator[dict[str, Worker]]:
    """The processes of some stages, started at the same time."""
    started: dict[str, Worker] = {}
    try:
        for stage in only:
            started[stage] = Worker(settings, endpoint, stage, module="stage")
        for worker in started.values():
            _ask(worker, "start")
        yield started
    finally:
        for worker in started.values():
            worker.__exit__()
