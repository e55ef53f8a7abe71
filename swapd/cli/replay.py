"""`swapd replay`: a recorded run of the daemon, again under other settings."""

from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.table import Table

from swapd.cli.common import Json, columns, console, parsed, print_json
from swapd.cli.log import File, swap_log
from swapd.cli.plan_input import PUBLISHED
from swapd.cli.target import ChosenDaemon
from swapd.core.records import Rules
from swapd.log.reader import last_run, read
from swapd.log.replay import ReplayError
from swapd.replay import RecordedWork, ReplayTally, fewest_of, read_work, run_again
from swapd.shared.units import parse_rate, parse_size, parse_span, rate, seconds, size

Budget = Annotated[
    int | None,
    typer.Option(parser=parsed(parse_size), metavar="SIZE", help="Memory of the device, as 20GiB"),
]
Bandwidth = Annotated[
    float | None,
    typer.Option(
        parser=parsed(parse_rate), metavar="RATE", help="Of copies, as 25GB/s; else as recorded"
    ),
]
Eviction = Annotated[
    Literal["next_use", "lru"] | None, typer.Option(help="Which idle component goes first")
]
Overtake = Annotated[
    int | None, typer.Option(min=0, help="How many that need no memory go before the first in line")
]
Turn = Annotated[
    float | None, typer.Option(parser=parsed(parse_span), metavar="TIME", help="And for how long")
]


def replay(
    daemon: ChosenDaemon,
    file: File = None,
    budget: Budget = None,
    bandwidth: Bandwidth = None,
    eviction: Eviction = None,
    overtake: Overtake = None,
    turn: Turn = None,
    json: Json = False,
) -> None:
    """Run the daemon's last recorded run again, under other settings.

    The same core decides; the device is simulated, so hours take seconds. Each thread asks again as
    long after its last answer as it did, and holds each lease for as long. A thread that waited for
    another one, unseen by the daemon, is not known to do so.

    "as recorded" shows how well that describes the run: compare it with "what happened". "fewest"
    are the bytes that the best choice of evictions loads for the same uses in the same order; ">="
    stands before a bound, where there are too many choices.
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
    if json:
        print_json(rows)
    else:
        console.print(page(rows))


def work_of(path: Path) -> RecordedWork:
    """The work of the last run in a log. Raises: ReplayError, OtherSchema, OSError."""
    lines = last_run(read(path))
    start = lines[0].record.start if lines else None
    if start is None:
        raise ReplayError(
            f"{path} has no run from its start: it is empty, or was rotated. Let the daemon keep "
            "more of it: `swapd serve --swap-log-size`"
        )
    return read_work((line.raw for line in lines), start)


def chunks_of(work: RecordedWork, budget: int | None) -> int:
    """The memory of a run with this budget; None: as recorded. Raises: BadParameter."""
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
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    totals = msgspec.structs.asdict(outcome)
    del totals["uses"]
    return {
        "what": what,
        "acquires": len(totals.pop("waits")),
        "fewest_bytes_in": least.nbytes,
        "fewest_is_exact": least.exact,
        "wait_mean_s": mean(waits),
        **{
            f"wait_{name}_s": waits[min(int(part * len(waits)), len(waits) - 1)]
            for name, part in shares.items()
        },
        **totals,
    }


def page(rows: list[dict[str, Any]]) -> Table:
    headings = ["", "loads", "in", "fewest", "back", "evicted", "acquires"]
    headings += ["wait", "p50", "p99", "longest"]
    waits = ("wait_mean_s", "wait_p50_s", "wait_p99_s", "wait_max_s")
    left_over = any(one["refused"] or one["waiting"] for one in rows)
    cells = [
        [
            one["what"],
            str(one["loads"]),
            size(one["bytes_in"]),
            ("" if one["fewest_is_exact"] else ">= ") + size(one["fewest_bytes_in"]),
            size(one["bytes_out"]),
            *map(str, (one["evictions"], one["acquires"])),
            *(seconds(one[name]) for name in waits),
            *([f"{one['refused']}, {one['waiting']}"] if left_over else []),
        ]
        for one in rows
    ]
    return columns(headings + ["refused, never granted"] * left_over, cells, left=("",))
