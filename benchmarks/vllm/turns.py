"""12 requests over two engines that do not fit together: number and order of the swaps."""

from pathlib import Path

from benchmarks.vllm.rows import REQUESTS, TOKENS, Row, Section
from tests.guarantees.harness import Daemon
from tests.vllm import swaps
from tests.vllm.engines import PATIENT, Engine, Nursery, scene

NAMES = ("thinker", "talker")
ENGINES = len(NAMES)

#: Copies in for each switch of engine.
BOUND = 2


def measure(models: Path, nursery: Nursery) -> Section:
    rows: list[Row] = []
    for what, run in (("one after the other", _in_turn), ("both busy at once", _at_once)):
        with scene(models, nursery) as made:
            daemon = made.daemon()
            engines = made.on_swapd(daemon, *NAMES, imports=PATIENT)
            before = len(_copies(daemon))
            turns = run(engines)
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
    return Section(tuple(rows), {})


def _in_turn(engines: list[Engine]) -> list[swaps.Turn]:
    turns = []
    for prompts in REQUESTS:
        for engine in engines:
            ((_, running, ended),) = engine.serve([prompts], TOKENS)
            engine.rest()
            turns.append(swaps.Turn(engine.label, running, ended))
    return turns


def _at_once(engines: list[Engine]) -> list[swaps.Turn]:
    for engine in engines:
        engine.begin("serve", REQUESTS, TOKENS)
        engine.begin("rest")
    turns = []
    for engine in engines:
        turns += [swaps.Turn(engine.label, running, ended) for _, running, ended in engine.result()]
        engine.result()
    return turns


def _copies(daemon: Daemon) -> list[str]:
    daemon.watch.seen("CopyIn")  # read all events until now
    return swaps.copies_in(daemon.watch.history)
