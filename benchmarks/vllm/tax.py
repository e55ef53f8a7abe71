"""What the plugin costs a stage that never has to give way."""

import time
from pathlib import Path

from benchmarks.vllm.rows import Row, Section, median, ratios
from tests.vllm.engines import Engine, Nursery, on_swapd, plain, scene

PROMPTS = [[5, 6, 7, 8], [9, 10]]
TOKENS = 48

BOUND = 0.99


def measure(models: Path, nursery: Nursery, rounds: int) -> Section:
    """Tokens per second of an engine with the plugin over those of one without.

    A third engine, without it like the second, shows what the machine makes of equals.
    """
    model = models / "thinker"
    with scene(models, nursery) as made:
        daemon = made.daemon(budget="128MiB", isolation="relaxed")
        sides = made.start(on_swapd(model, daemon.folder), plain(model), plain(model))
        per_s: list[list[float]] = [[], [], []]
        per_cpu_s: list[list[float]] = [[], [], []]
        for number in range(-2, rounds):
            for which in (0, 1, 2) if number % 2 else (2, 1, 0):
                speed, thrift = _speed(sides[which])
                if number >= 0:
                    per_s[which].append(speed)
                    per_cpu_s[which].append(thrift)
        loads = daemon.component("thinker").loads
    assert loads == 1, "it was to stay"
    what = "with the plugin, all resident, over plain vLLM"
    return Section(
        rows=(
            Row(f"tokens/s {what}", _over(per_s, 0), "at least", BOUND, _equals(per_s)),
            Row(f"tokens per s of CPU {what}", _over(per_cpu_s, 0), note=_equals(per_cpu_s)),
        ),
        raw={
            f"{side} {unit}": figures
            for unit, sides_of in (("tokens/s", per_s), ("tokens per s of CPU", per_cpu_s))
            for side, figures in zip(("plugin", "plain", "plain again"), sides_of, strict=True)
        },
    )


def _over(figures: list[list[float]], which: int) -> float:
    """Over the plain engine, in pairs."""
    return median(ratios(figures[which], figures[1]))


def _equals(figures: list[list[float]]) -> str:
    return f"plain over plain {_over(figures, 2):.3f}; {median(figures[1]):.0f} of them"


def _speed(engine: Engine) -> tuple[float, float]:
    """Tokens per second, and per second that the engine's process computes."""
    before, began = engine.cpu_s(), time.perf_counter()
    said = engine.generate(PROMPTS, TOKENS)
    taken, spent = time.perf_counter() - began, engine.cpu_s() - before
    tokens = sum(map(len, said))
    return tokens / taken, tokens / spent
