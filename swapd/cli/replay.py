"""`swapd replay` runs a recorded run again under other settings; `swapd plan --from-log` searches
for settings under which it would have waited less."""

import json
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from swapd.cli.common import Json, columns, console, option_of, print_json, show
from swapd.cli.log import File, swap_log
from swapd.cli.plan_input import PUBLISHED
from swapd.cli.target import ChosenDaemon
from swapd.core.records import Rules
from swapd.log.reader import last_run, read
from swapd.log.replay import ReplayError
from swapd.plan import snippets
from swapd.replay import search
from swapd.replay.optimum import fewest_of
from swapd.replay.rerun import run_again
from swapd.replay.search import Changes
from swapd.replay.work import RecordedWork, ReplayTally, read_work
from swapd.shared.text import plain_lines
from swapd.shared.units import parse_rate, parse_size, parse_span, rate, seconds, size

Budget = Annotated[int | None, option_of(parse_size, "SIZE", "Memory of the device, as 20GiB")]
Bandwidth = Annotated[
    float | None, option_of(parse_rate, "RATE", "Of copies, as 25GB/s; else as recorded")
]
Overtake = Annotated[
    int | None, typer.Option(min=0, help="How many that need no memory go before the first in line")
]


def replay(
    daemon: ChosenDaemon,
    file: File = None,
    budget: Budget = None,
    bandwidth: Bandwidth = None,
    eviction: Annotated[
        Literal["next_use", "lru"] | None, typer.Option(help="Which idle component goes first")
    ] = None,
    overtake: Overtake = None,
    turn: Annotated[float | None, option_of(parse_span, "TIME", "And for how long")] = None,
    json: Json = False,
) -> None:
    """Run the daemon's last recorded run again, under other settings.

    The same core decides; the device is simulated, so hours take seconds. Each thread asks again as
    long after its last answer as it did, and holds each lease for as long. A wait of one thread for
    another that the daemon did not see is not reproduced.

    "as recorded" shows how well that describes the run: compare it with "what happened". "fewest"
    are the bytes that the best choice of evictions loads for the same uses in the same order; ">="
    marks a lower bound, where there are too many choices.
    """
    work = work_of(swap_log(daemon, file))
    chunks = chunks_of(work, budget)
    rules = work.start.rules
    given = {"eviction": eviction, "overtake": overtake, "turn_s": turn}
    asked = msgspec.structs.replace(rules, **{k: v for k, v in given.items() if v is not None})
    recorded_rate = work.bytes_per_s or PUBLISHED
    before = work.start.chunks
    again = run_again(work, rules, before, recorded_rate)
    rows = [
        row("what happened", work, work.happened, before),
        row("as recorded", work, again, before),
    ]
    if (asked, chunks, bandwidth) != (rules, before, None):
        outcome = run_again(work, asked, chunks, bandwidth or recorded_rate)
        rows.append(row(_said(work, asked, chunks, bandwidth), work, outcome, chunks))
    show(rows, page, json=json)


def work_of(path: Path) -> RecordedWork:
    """Raises: ReplayError, SchemaMismatch, OSError."""
    lines = last_run(read(path))
    start = lines[0].record.start if lines else None
    if start is None:
        raise ReplayError(
            f"{path} has no run from its start: it is empty, or was rotated. Let the daemon keep "
            "more of it: `swapd serve --swap-log-size`"
        )
    return read_work((line.raw for line in lines), start)


def chunks_of(work: RecordedWork, budget: int | None) -> int:
    """`budget` None: as recorded. Raises: BadParameter."""
    chunks = work.start.chunks if budget is None else budget // work.start.chunk_bytes
    if not chunks:
        raise typer.BadParameter(
            f"--budget {size(budget or 0)} is less than one chunk of the recorded run: "
            f"{size(work.start.chunk_bytes)}"
        )
    return chunks


def _said(work: RecordedWork, asked: Rules, chunks: int, bandwidth: float | None) -> str:
    before, after = (msgspec.structs.asdict(rules) for rules in (work.start.rules, asked))
    said = [f"{name} {value}" for name, value in after.items() if value != before[name]]
    if chunks != work.start.chunks:
        said.insert(0, f"budget {size(chunks * work.start.chunk_bytes)}")
    if bandwidth is not None:
        said.append(rate(bandwidth))
    return ", ".join(said)


def row(what: str, work: RecordedWork, outcome: ReplayTally, chunks: int) -> dict[str, Any]:
    least = fewest_of(work, outcome, chunks)
    waits = sorted(outcome.waits) or [0.0]
    p50, p99 = (waits[int(part * len(waits))] for part in (0.5, 0.99))
    totals = msgspec.structs.asdict(outcome)
    del totals["uses"]
    return {
        "what": what,
        "acquires": len(totals.pop("waits")),
        "fewest_bytes_in": least.nbytes,
        "fewest_is_exact": least.exact,
        "wait_mean_s": mean(waits),
        "wait_p50_s": p50,
        "wait_p99_s": p99,
        "wait_max_s": waits[-1],
        **totals,
    }


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "": lambda one: str(one["what"]),
    "loads": lambda one: str(one["loads"]),
    "in": lambda one: size(one["bytes_in"]),
    "fewest": lambda one: ("" if one["fewest_is_exact"] else ">= ") + size(one["fewest_bytes_in"]),
    "back": lambda one: size(one["bytes_out"]),
    "evicted": lambda one: str(one["evictions"]),
    "acquires": lambda one: str(one["acquires"]),
    "wait": lambda one: seconds(one["wait_mean_s"]),
    "p50": lambda one: seconds(one["wait_p50_s"]),
    "p99": lambda one: seconds(one["wait_p99_s"]),
    "longest": lambda one: seconds(one["wait_max_s"]),
}


def page(rows: list[dict[str, Any]]) -> Table:
    cells = dict(_COLUMNS)
    if any(one["refused"] or one["waiting"] for one in rows):
        cells["refused, never granted"] = lambda one: f"{one['refused']}, {one['waiting']}"
    return columns(cells, rows, left=("",))


# --- settings under which a recorded run would have waited less -----------------------------------

_SEARCH_S = 60.0


def plan_log(log: Path, budget: int | None, bandwidth: float | None, as_json: bool) -> None:
    """Print the best settings found for the last run in a log, and their effect. Raises:
    ReplayError, SchemaMismatch, OSError."""
    began, work = time.monotonic(), work_of(log)
    if not work.happened.waits:
        raise ReplayError(f"no acquire in the last run of {log} was granted: let its stages work")
    before, bytes_per_s = work.start.chunks, bandwidth or work.bytes_per_s or PUBLISHED
    chunks = chunks_of(work, budget)
    again = search.run_at(work, [], (), before, bytes_per_s)
    changes, best, tried = _best(work, chunks, bytes_per_s)
    room = size(chunks * work.start.chunk_bytes)
    rows = [
        row("what happened", work, work.happened, before),
        row("as recorded", work, again, before),
        row(f"best at {room}", work, best, chunks),
    ]
    said = [
        _saved(again, best),
        f"{tried} settings tried: {seconds(time.monotonic() - began)}",
    ]
    pasted = {"budget": room, **_pasted(work, chunks, changes)}
    if as_json:
        return print_json({"rows": rows, "best": pasted, "notes": said})
    texts = "\n".join([*said, *_block(pasted)])
    console.print(Group(page(rows), "", Text(plain_lines(texts))))


def _best(work: RecordedWork, chunks: int, bytes_per_s: float) -> tuple[Changes, ReplayTally, int]:
    settings = search.settings_of(work)
    ends, tried = time.monotonic() + _SEARCH_S, 0

    def cost(point: search.Point) -> search.ReplayCost:
        nonlocal tried
        tried += 1
        outcome = search.run_at(work, settings, point, chunks, bytes_per_s)
        return search.cost_of(outcome, bytes_per_s)

    point = search.search(settings, cost, lambda: time.monotonic() < ends)
    outcome = search.run_at(work, settings, point, chunks, bytes_per_s)
    return search.changes(settings, point), outcome, tried


# --- for people --------------------------------------------------------------------------


def _saved(before: ReplayTally, after: ReplayTally) -> str:
    if (more := after.refused + after.waiting - before.refused - before.waiting) > 0:
        return (
            f"{more} requests more than as recorded are refused or wait for ever: give more memory"
        )
    moved = before.bytes_in + before.bytes_out - after.bytes_in - after.bytes_out
    waited_s = mean(before.waits or [0.0]) - mean(after.waits or [0.0])
    parts = (_less(size, moved), _less(str, before.loads - after.loads, "loads"))
    return f"saved: {', '.join(parts)}, {_less(seconds, waited_s, 'of waiting an acquire')}"


def _less(shown: Callable[[Any], str], saved: float, what: str = "moved") -> str:
    return f"{'-' if saved < 0 else ''}{shown(abs(saved))} {what}"


def _pasted(work: RecordedWork, chunks: int, changes: Changes) -> dict[str, list[str]]:
    settings, commands = list[str](), list[str]()
    if chunks != work.start.chunks:
        settings.append(f'budget = "{snippets.amount(chunks * work.start.chunk_bytes)}"')
    for (kind, name), value in changes.items():
        if kind == "rule":
            settings.append(f"{name.removesuffix('_s')} = {json.dumps(value)}")
        elif kind == "pin":
            commands.append(f"swapd {'pin' if value else 'unpin'} {shlex.quote(name)}")
        else:
            kept = value if value == "auto" else snippets.amount(value)
            commands.append(f"swapd resize {shlex.quote(name)} {kept}")
    return {"settings": settings, "commands": commands}


def _block(pasted: dict[str, Any]) -> Iterator[str]:
    settings, commands = pasted["settings"], pasted["commands"]
    yield f"\n# at {pasted['budget']}" + ("" if settings or commands else ": nothing to change")
    if settings:
        yield from ("# in the daemon's configuration file:", *settings)
    if commands:
        yield from ("# once its stages run:", *commands)
