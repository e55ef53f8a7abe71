"""Requests to two engines in turn: by swapd, by vLLM's sleep and wake, by restarts."""

import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.vllm.rows import REQUESTS, TOKENS, Row, Section, median
from tests.vllm.engines import (
    Engine,
    EngineFailed,
    Nursery,
    Scene,
    on_swapd,
    plain,
    scene,
)

NAMES = ("large", "larger")


def measure(models: Path, nursery: Nursery, rounds: int) -> Section:
    """Seconds for a request, including the swap or the start before it."""
    folders = [models / name for name in NAMES]
    with scene(models, nursery) as made:
        both = _alternate(made.start(*map(plain, folders)), rounds)
    with scene(models, nursery) as made:
        daemon = made.daemon(budget="320MiB", isolation="relaxed")
        engines = made.start(*(on_swapd(folder, daemon.folder) for folder in folders))
        ours = _alternate(engines, rounds)
    with scene(models) as made:
        anew = [_start_and_ask(made, plain(folder)) for _ in range(2) for folder in folders]
    asleep, why = _sleep_and_wake(models, nursery, rounds)
    rows = [
        Row("s a request, both engines' weights there (plain vLLM)", median(both)),
        Row("s a request, engines in turn on swapd, room for one", median(ours)),
        Row("s a request, vLLM's sleep and wake", median(asleep) if asleep else None, note=why),
        Row("s a request, the engine started anew", median(anew)),
    ]
    raw = {"both there": both, "swapd": ours, "sleep and wake": asleep, "started anew": anew}
    return Section(tuple(rows), raw)


def _alternate(engines: list[Engine], rounds: int) -> list[float]:
    times = []
    for number in range(-1, rounds):
        for engine in engines:
            began = time.perf_counter()
            engine.generate(REQUESTS[0], TOKENS)
            if number >= 0:
                times.append(time.perf_counter() - began)
    return times


def _start_and_ask(made: Scene, arguments: Mapping[str, object]) -> float:
    began = time.perf_counter()
    (engine,) = made.start(arguments)
    engine.generate(REQUESTS[0], TOKENS)
    taken = time.perf_counter() - began
    engine.close()
    return taken


def _sleep_and_wake(models: Path, nursery: Nursery, rounds: int) -> tuple[list[float], str]:
    """Wake one, ask it, and put it to sleep; then the other. Empty, with the reason, if
    impossible."""
    times = []
    with scene(models, nursery) as made:
        try:
            engines = made.start(*(plain(models / name, enable_sleep_mode=True) for name in NAMES))
        except EngineFailed as exc:
            why = [line for line in exc.message.splitlines() if "leep mode" in line]
            if not why:
                raise
            return [], f"vLLM: {why[0].split(' [')[0].strip()}"
        for engine in engines:
            engine.sleep()
        for number in range(-1, rounds):
            for engine in engines:
                began = time.perf_counter()
                engine.wake_up()
                engine.generate(REQUESTS[0], TOKENS)
                engine.sleep()
                if number >= 0:
                    times.append(time.perf_counter() - began)
    return times, ""
