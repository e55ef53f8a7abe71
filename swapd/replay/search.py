"""Looks for settings under which a recorded run waits less, by running it again. Pure.

A point has a value for each setting, or None for the recorded value. Settings are the daemon's
rules, which components are pinned, and how much of a family is resident.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from swapd.core import events
from swapd.replay.rerun import run_again
from swapd.replay.work import RecordedWork, ReplayTally, WorkStep
from swapd.shared import protocol, vm

_T = TypeVar("_T")

#: Limits of names to pin and families to resize: those that could move the most bytes.
_NAMES_MAX = 12
_FAMILIES_MAX = 6
_MIB = 1 << 20

#: Values to try, including the daemon's defaults.
_RULES: dict[str, tuple[Any, ...]] = {
    "eviction": ("next_use", "lru"),
    "overtake": (0, 4, 16, 64),
    "turn_s": (10.0, 60.0, 600.0),
    "residency_factor": (0.0, 2.0, 8.0, 32.0),
    "residency_bound_s": (0.5, 2.0, 8.0),
}

#: Settings that save less than this share of all waiting stay as recorded.
WORTH = 0.01
#: Weight of the time of copies: with equal waiting, fewer bytes are better.
_COPIES = 0.01
#: Number of random points to start from.
_RESTARTS = 4
_SEED = 7


class Setting(NamedTuple):
    """The first value is None."""

    kind: Literal["rule", "pin", "resize"]
    name: str
    values: tuple[Any, ...]


Point = tuple[Any, ...]
#: Values that are not as recorded, by kind and name.
Changes = dict[tuple[str, str], Any]


class ReplayCost(NamedTuple):
    unserved: int
    seconds: float


NO_TIME = ReplayCost(1 << 62, 0.0)


def settings_of(work: RecordedWork) -> list[Setting]:
    registered = {one.name: one for one in _of_kind(work, protocol.Register)}
    sizes = Counter[str]()
    for one in registered.values():
        sizes[one.part_of or one.name] += one.nbytes
    names = _by_bytes_moved(work, registered, sizes)
    families = [name for name in names if name not in registered][:_FAMILIES_MAX]
    resizes = [Setting("resize", name, _parts_of(sizes[name])) for name in families]
    recorded = msgspec.structs.asdict(work.start.rules)
    rules = [
        Setting("rule", name, (None, *(one for one in values if one != recorded[name])))
        for name, values in _RULES.items()
    ]
    return [*rules, *_pins_of(work, registered, names), *resizes]


def _by_bytes_moved(
    work: RecordedWork, registered: Mapping[str, protocol.Register], sizes: Mapping[str, int]
) -> list[str]:
    """Return acquired components, and families in place of parts, ordered by the bytes they move if
    they come in each time."""
    moved = Counter[str]()
    for request in _of_kind(work, protocol.Acquire):
        for name in request.names:
            part = registered.get(name)
            moved[(part and part.part_of) or name] += part.nbytes if part else sizes.get(name, 0)
    return [name for name, _ in moved.most_common() if name in sizes]


def _pins_of(
    work: RecordedWork, registered: Mapping[str, protocol.Register], names: Sequence[str]
) -> list[Setting]:
    fixed = {one.name for one in registered.values() if one.policy in ("permanent", "alternating")}
    done = {_kind(step) for step in work.steps if not step.in_vain}
    free = [name for name in names if name not in fixed][:_NAMES_MAX]
    return [
        Setting("pin", one, (None, True, False) if ("pin", one) in done else (None, True))
        for one in free
    ]


def _parts_of(nbytes: int) -> tuple[Any, ...]:
    """Return resident sizes as `swapd resize` takes them: "auto", and from none to all."""
    sizes = (nbytes * quarters // 4 // _MIB * _MIB for quarters in range(4))
    return (None, "auto", *dict.fromkeys(sizes), vm.round_up(nbytes, _MIB))


def _of_kind(work: RecordedWork, kind: type[_T]) -> Iterator[_T]:
    return (request for _, _, request in work.requests() if isinstance(request, kind))


# --- a run under a point -----------------------------------------------------------------


def run_at(
    work: RecordedWork, settings: Sequence[Setting], point: Point, chunks: int, bytes_per_s: float
) -> ReplayTally:
    given = changes(settings, point)
    changed = {name: value for (kind, name), value in given.items() if kind == "rule"}
    rules = msgspec.structs.replace(work.start.rules, **changed)
    return run_again(_ordered(work, given), rules, chunks, bytes_per_s)


def changes(settings: Sequence[Setting], point: Point) -> Changes:
    found = zip(settings, point, strict=True)
    return {(one.kind, one.name): value for one, value in found if value is not None}


def _ordered(work: RecordedWork, given: Changes) -> RecordedWork:
    """Replace the recorded pins and sizes of a name, from when it may be acquired."""
    if all(kind == "rule" for kind, _ in given):
        return work
    nothing = events.Tick(0.0)
    steps = [step._replace(event=nothing) if _kind(step) in given else step for step in work.steps]
    for number, session, name in _complete(work):
        for order in _orders(given, name):
            event = events.SessionRequest(0.0, session, order)
            steps.append(WorkStep(event, (number,), 0.0))
    return work._replace(steps=steps)


def _kind(step: WorkStep) -> tuple[str, str] | None:
    match step.event:
        case events.SessionRequest(request=protocol.Pin(name=name)):
            return "pin", name
        case events.SessionRequest(request=protocol.Resize(name=name)):
            return "resize", name
    return None


def _orders(given: Changes, name: str) -> Iterator[protocol.Pin | protocol.Resize]:
    if (kept := given.get(("resize", name))) is not None:
        yield protocol.Resize(protocol.NUMBER_MAX, name, None if kept == "auto" else kept)
    if given.get(("pin", name)):
        yield protocol.Pin(protocol.NUMBER_MAX, name)


def _complete(work: RecordedWork) -> Iterator[tuple[int, int, str]]:
    """Yield (step, session, name) when a component, or all registered parts of a family, may be
    acquired."""
    filling: dict[tuple[int, str], set[str]] = {}
    target: dict[tuple[int, str], str] = {}
    for number, session, request in work.requests():
        if isinstance(request, protocol.Register):
            name = target[session, request.name] = request.part_of or request.name
            filling.setdefault((session, name), set()).add(request.name)
        elif isinstance(request, protocol.Commit):
            for committed in (request.name, *request.also):
                name = target.get((session, committed), "")
                parts = filling.get((session, name), set())
                parts.discard(committed)
                if not parts and filling.pop((session, name), None) is not None:
                    yield number, session, name


# --- the search --------------------------------------------------------------------------


def cost_of(outcome: ReplayTally, bytes_per_s: float) -> ReplayCost:
    copies_s = (outcome.bytes_in + outcome.bytes_out) / bytes_per_s
    return ReplayCost(outcome.refused + outcome.waiting, sum(outcome.waits) + _COPIES * copies_s)


def search(
    settings: Sequence[Setting], cost: Callable[[Point], ReplayCost], goes_on: Callable[[], bool]
) -> Point:
    """Return the best point found while `goes_on()`.

    From the recorded values, and from a few random ones, each setting in turn takes its best value
    until nothing improves. Settings without effect stay as recorded.
    """
    known: dict[Point, ReplayCost] = {}

    def of(point: Point) -> ReplayCost:
        if point not in known:
            known[point] = cost(point) if not known or goes_on() else NO_TIME
        return known[point]

    draw = Random(_SEED)
    best = _descend(settings, tuple(None for _ in settings), of)
    for _ in range(_RESTARTS):
        start = tuple(draw.choice(one.values) for one in settings)
        best = min(best, _descend(settings, start, of), key=of)
    return _simplest(best, cost)


def _descend(settings: Sequence[Setting], point: Point, of: Callable[[Point], ReplayCost]) -> Point:
    before = None
    while before != point:
        before = point
        for i, one in enumerate(settings):
            others = ((*point[:i], value, *point[i + 1 :]) for value in one.values)
            point = min((point, *others), key=of)
    return point


def _simplest(point: Point, cost: Callable[[Point], ReplayCost]) -> Point:
    unserved, seconds = cost(point)
    for i in range(len(point)):
        other = (*point[:i], None, *point[i + 1 :])
        if other != point and cost(other) <= ReplayCost(unserved, seconds * (1 + WORTH)):
            point = other
    return point
