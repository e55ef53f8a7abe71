"""What the plugin costs a stage that never has to give way."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from benchmarks.vllm.rows import Row, Section, median, ratios
from tests.vllm.engines import Engine, Nursery, on_swapd, plain, scene

PROMPTS = [[5, 6, 7, 8], [9, 10]]
TOKENS = 48
STARTS = 5

BOUND = 0.99

#: Figures of the engine with the plugin, of one without, and of another without.
Sides: TypeAlias = list[list[float]]


def measure(models: Path, nursery: Nursery, rounds: int, starts: int = STARTS) -> Section:
    """Tokens per second of an engine with the plugin over those of one without.

    A third engine, without it like the second, shows what the machine makes of equals: where the
    weights of a process happen to lie makes a per cent or two, so the three are started anew
    several times.
    """
    made = [_start(models, nursery, rounds) for _ in range(starts)]
    per_s, per_cpu_s = zip(*made, strict=True)
    what = "with the plugin, all resident, over plain vLLM"
    return Section(
        rows=(
            Row(f"tokens/s {what}", _over(per_s, 0), "at least", BOUND, _equals(per_s)),
            Row(f"tokens per s of CPU {what}", _over(per_cpu_s, 0), note=_equals(per_cpu_s)),
        ),
        raw={
            f"{side} {unit}, start {number}": figures
            for unit, sides_of in (("tokens/s", per_s), ("tokens per s of CPU", per_cpu_s))
            for number, start in enumerate(sides_of)
            for side, figures in zip(("plugin", "plain", "plain again"), start, strict=True)
        },
    )


def _start(models: Path, nursery: Nursery, rounds: int) -> tuple[Sides, Sides]:
    """Three engines, asked in turn: tokens per second of each, and per second of CPU."""
    model = models / "thinker"
    with scene(models, nursery) as made:
        daemon = made.daemon(budget="128MiB", isolation="relaxed")
        engines = made.start(on_swapd(model, daemon.folder), plain(model), plain(model))
        per_s: Sides = [[], [], []]
        per_cpu_s: Sides = [[], [], []]
        for number in range(-2, rounds):
            for which in (0, 1, 2) if number % 2 else (2, 1, 0):
                speed, thrift = _speed(engines[which])
                if number >= 0:
                    per_s[which].append(speed)
                    per_cpu_s[which].append(thrift)
        loads = daemon.component("thinker").loads
    assert loads == 1, "it was to stay"
    return per_s, per_cpu_s


def _over(starts: Sequence[Sides], which: int) -> float:
    """Over the plain engine, in pairs; the median of the starts."""
    return median(_by_start(starts, which))


def _by_start(starts: Sequence[Sides], which: int) -> list[float]:
    return [median(ratios(sides[which], sides[1])) for sides in starts]


def _equals(starts: Sequence[Sides]) -> str:
    each = ", ".join(f"{ratio:.3f}" for ratio in sorted(_by_start(starts, 0)))
    speed = median([median(sides[1]) for sides in starts])
    return f"by start {each}; plain over plain {_over(starts, 2):.3f}; {speed:.0f} of them"


def _speed(engine: Engine) -> tuple[float, float]:
    """Tokens per second, and per second that the engine's process computes."""
    before, began = engine.cpu_s(), time.perf_counter()
    said = engine.generate(PROMPTS, TOKENS)
    taken, spent = time.perf_counter() - began, engine.cpu_s() - before
    tokens = sum(map(len, said))
    return tokens / taken, tokens / spent
