"""Requests over two engines that do not fit together: number and order of the swaps, and waiting.

12 requests by the rules of swapd; then many to each engine at once, beside first come first served.
"""

from itertools import pairwise
from pathlib import Path
from statistics import mean, quantiles

from benchmarks.vllm.rows import REQUESTS, TOKENS, Row, Section
from tests.guarantees.harness import Daemon
from tests.vllm import swaps
from tests.vllm.engines import PATIENT, Engine, Nursery, scene

NAMES = ("thinker", "talker")
ENGINES = len(NAMES)

Requests = list[list[list[int]]]

#: Copies in for each switch of engine.
BOUND = 2


def measure(models: Path, nursery: Nursery, requests: int) -> Section:
    ordered, fifo = (_crowd(models, nursery, requests, **rule) for rule in ({}, {"overtake": 0}))
    ours, crowd = order(models, nursery), f"{requests} requests to each at once"
    found = [
        (f"{what}, {crowd}, over first come first served", ordered[what] / fifo[what])
        for what in fifo
    ]
    rows = tuple(Row(what, figure, "at most", 1) for what, figure in found)
    raw = {f"{what}, {crowd}": [ordered[what], fifo[what]] for what in fifo}
    return Section((*ours, *rows), raw)


def _crowd(models: Path, nursery: Nursery, requests: int, **rule: object) -> dict[str, float]:
    """Swaps for a request, and the seconds that one waits from the end of its engine's last one to
    the end of its first step."""
    with scene(models, nursery) as made:
        daemon = made.daemon(**rule)
        engines = made.on_swapd(daemon, *NAMES, imports=PATIENT)
        before = len(_copies(daemon))
        turns = _at_once(engines, (REQUESTS * requests)[:requests])
        copies = len(_copies(daemon)) - before
    waits = [
        after.running - turn.ended
        for turn, after in pairwise(turns)
        if turn.component == after.component
    ]
    return {
        "swaps a request": copies / len(turns),
        "mean s of waiting": mean(waits),
        "p99 s of waiting": quantiles(waits, n=100)[98],
    }


def order(models: Path, nursery: Nursery) -> list[Row]:
    rows: list[Row] = []
    for what, run in (("one after the other", _in_turn), ("both busy at once", _at_once)):
        with scene(models, nursery) as made:
            daemon = made.daemon()
            engines = made.on_swapd(daemon, *NAMES, imports=PATIENT)
            before = len(_copies(daemon))
            turns = run(engines, REQUESTS)
            copies = len(_copies(daemon)) - before
            inside = swaps.inside(turns, daemon.watch.history)
            back = daemon.status().bytes_out
        switches = swaps.switches(turns)
        note = f"{copies} swaps, {switches} switches, {len(turns)} requests, {back} bytes back"
        name = f"{len(turns)} requests, {what}"
        rows += [
            Row(f"swaps per switch, {name}", copies / switches, "at most", BOUND, note),
            Row(f"swaps inside a request, {name}", float(len(inside)), "at most", 0),
        ]
    return rows


def _in_turn(engines: list[Engine], requests: Requests) -> list[swaps.Turn]:
    turns = []
    for prompts in requests:
        for engine in engines:
            ((_, running, ended),) = engine.serve([prompts], TOKENS)
            engine.rest()
            turns.append(swaps.Turn(engine.label, running, ended))
    return turns


def _at_once(engines: list[Engine], requests: Requests) -> list[swaps.Turn]:
    for engine in engines:
        engine.begin("serve", requests, TOKENS)
        engine.begin("rest")
    turns = []
    for engine in engines:
        turns += [swaps.Turn(engine.label, running, ended) for _, running, ended in engine.result()]
        engine.result()
    return turns


def _copies(daemon: Daemon) -> list[str]:
    daemon.watch.seen("CopyIn")  # read all events until now
    return swaps.copies_in(daemon.watch.history)
