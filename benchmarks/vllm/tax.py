"""Cost of the plugin for a stage that never has to give way."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from benchmarks.vllm.rows import Row, Section, median
from tests.vllm.engines import Engine, Nursery, on_swapd, plain, scene

PROMPTS = [[5, 6, 7, 8], [9, 10]]
TOKENS = 48
#: Number of restarts, of engines of each side at a time, and of requests to each.
STARTS = 16
ENGINES = 4
ROUNDS = 2
#: Number of requests to one engine whose steps are bare by turns, and their tokens.
TURNS = 20
LONG = 240

BOUND = 0.99

#: Memory in swapd, by the plugin's option. Each arena has room for that of all engines, which have
#: KV caches of 64 MiB.
WHAT = {"private": "its weights in swapd", "auto": "its KV cache in swapd, too"}
BUDGET = "640MiB"

WORKER = "benchmarks.vllm.bare.Worker"
_SIDES = {True: "bare", False: "leased"}


class Round(msgspec.Struct, frozen=True):
    """Seconds of each engine for the same request, one after the other."""

    plugin: list[float]
    plain: list[float]

    @property
    def ratio(self) -> float:
        """The speed of one side over that of the other."""
        return sum(self.plain) / sum(self.plugin)


class Start(msgspec.Struct, frozen=True):
    """Engines that ran at the same time: rounds in time, and in CPU time."""

    wall: list[Round]
    cpu: list[Round]


def measure(
    models: Path,
    nursery: Nursery,
    *,
    starts: int = STARTS,
    engines: int = ENGINES,
    rounds: int = ROUNDS,
    turns: int = TURNS,
) -> Section:
    """Tokens per second of engines with the plugin over those of engines without.

    Two runs of the same engine differ by a per cent or two, because of the addresses of a process's
    weights and of other work on the machine. So there are several of each side, asked in turn and
    restarted several times, and the figure is the median of all rounds.
    """
    sides = [_starts(models, nursery, kv, starts, engines, rounds) for kv in WHAT]
    sides += [_steps(models, nursery, kv, turns) for kv in WHAT]
    return Section(
        rows=tuple(row for rows, _ in sides for row in rows),
        raw={name: taken for _, raw in sides for name, taken in raw.items()},
    )


def _starts(
    models: Path, nursery: Nursery, kv: str, starts: int, engines: int, rounds: int
) -> tuple[list[Row], dict[str, list[float]]]:
    """Engines with the plugin and engines without. `kv`: as the plugin's option."""
    made = [_start(models, nursery, kv, engines, rounds) for _ in range(starts)]
    wall, cpu = [start.wall for start in made], [start.cpu for start in made]
    what = f"with the plugin, {WHAT[kv]}, all resident, over plain vLLM"
    raw = {
        f"{side}, kv: {kv}, {unit}, start {number}, engine {which}": [
            getattr(one, side)[which] for one in rounds_of
        ]
        for unit, starts_of in (("wall", wall), ("CPU", cpu))
        for number, rounds_of in enumerate(starts_of)
        for side in Round.__struct_fields__
        for which in range(engines)
    }
    rows = [
        Row(f"tokens/s {what}", _over(wall), "at least", BOUND, _spread(wall)),
        Row(f"tokens per s of CPU {what}", _over(cpu)),
    ]
    return rows, raw


def _start(models: Path, nursery: Nursery, kv: str, engines: int, rounds: int) -> Start:
    model = models / "thinker"
    with scene(models, nursery) as made:
        daemon = made.daemon(budget=BUDGET, isolation="relaxed")
        names = [f"thinker-{number}" for number in range(engines)]
        sides = [
            side
            for name in names
            for side in (
                on_swapd(model, daemon.folder, {"component": name, "kv": kv}),
                plain(model),
            )
        ]
        running = made.start(*sides)
        for engine in running:
            _ask(engine)
        asked = [_round(running, number) for number in range(rounds)]
        loads = [daemon.component(name).loads for name in names]
    assert max(loads) == 1, "they were to stay"  # or joined the one with the same bytes
    return Start(wall=[wall for wall, _ in asked], cpu=[cpu for _, cpu in asked])


def _steps(
    models: Path, nursery: Nursery, kv: str, turns: int
) -> tuple[list[Row], dict[str, list[float]]]:
    """Cost of the plugin's own calls: nothing else differs, not even addresses.

    The time of the model's forward differs from step to step by far more than this cost, on any
    side. So its median is taken over both sides, and only the time around it by side. `kv`: as the
    plugin's option.
    """
    with scene(models, nursery) as made:
        daemon = made.daemon(budget="128MiB", isolation="relaxed")
        model = models / "thinker"
        (engine,) = made.start(on_swapd(model, daemon.folder, {"kv": kv}, worker_cls=WORKER))
        for _ in range(turns):
            engine.generate(PROMPTS, LONG)
        (steps,) = engine.call("steps")
    forward_s = [forward for _, forward, _ in steps]
    around_s = {side: [around for bare, _, around in steps if bare is side] for side in _SIDES}
    forward, bare, leased = map(median, (forward_s, around_s[True], around_s[False]))
    row = Row(
        f"tokens/s of one engine, its steps under leases over bare ones, {WHAT[kv]}",
        (forward + bare) / (forward + leased),
        "at least",
        BOUND,
        f"{1e6 * (leased - bare):.0f} us more around a forward of {1e3 * forward:.1f} ms",
    )
    raw = {f"around forward, kv: {kv}, {_SIDES[bare]}": s for bare, s in around_s.items()}
    return [row], {f"forward, kv: {kv}": forward_s, **raw}


def _round(engines: Sequence[Engine], number: int) -> tuple[Round, Round]:
    """Ask all of them once, each after one of the other side, and begin with another each time."""
    taken = [(0.0, 0.0)] * len(engines)
    for which in range(number, number + len(engines)):
        taken[which % len(engines)] = _ask(engines[which % len(engines)])
    wall, cpu = ([one[unit] for one in taken] for unit in (0, 1))
    return Round(wall[::2], wall[1::2]), Round(cpu[::2], cpu[1::2])


def _ask(engine: Engine) -> tuple[float, float]:
    """Seconds of a request, and of its engine's process for it."""
    before, began = engine.cpu_s(), time.perf_counter()
    said = engine.generate(PROMPTS, TOKENS)
    taken, spent = time.perf_counter() - began, engine.cpu_s() - before
    assert [len(tokens) for tokens in said] == [TOKENS] * len(PROMPTS)
    return taken, spent


def _over(starts: Iterable[Sequence[Round]]) -> float:
    return median([one.ratio for rounds in starts for one in rounds])


def _spread(starts: Sequence[Sequence[Round]]) -> str:
    """Figures by start; and the differences between plain engines that ran together."""
    each = ", ".join(f"{_over([rounds]):.3f}" for rounds in starts)
    plain_s = [
        [median(taken) for taken in zip(*(one.plain for one in rounds), strict=True)]
        for rounds in starts
    ]
    apart = median([max(of_start) / min(of_start) for of_start in plain_s])
    speed = (
        TOKENS * len(PROMPTS) / median([seconds for of_start in plain_s for seconds in of_start])
    )
    return (
        f"by start {each}; of {len(plain_s[0])} plain ones the slowest took {apart:.3f} times as "
        f"long as the fastest; {speed:.0f} tokens/s"
    )
