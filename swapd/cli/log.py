"""`swapd log`: the swap log, once or as it grows; readable on a terminal, else JSON lines."""

import sys
import time
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from swapd.cli.common import TIMEOUT_S, Endpoint, Json, Timeout, ask, parsed, say_error
from swapd.cli.follower import follow_log
from swapd.cli.log_views import JsonView, LogView, TextView
from swapd.cli.story import show
from swapd.cli.target import Device, where
from swapd.log.history import Filter, unknown_kinds
from swapd.log.reader import last_run, read, read_runs
from swapd.log.records import KINDS
from swapd.shared.config import logs_left_by
from swapd.shared.units import parse_span
from swapd_client import NotAnswering, NotRunning
from swapd_client.session.endpoint import resolve

_span = parsed(parse_span)


def _moment(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return time.time() - _span(text)  # noqa: TID251


Name = Annotated[str | None, typer.Argument(help="Show why this component was loaded and evicted")]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Follow new records as they are written")
]
All = Annotated[bool, typer.Option("--all", "-a", help="Every record: hits and releases too")]
AllRuns = Annotated[bool, typer.Option("--all-runs", help="Include runs of earlier daemons")]
AsText = Annotated[bool, typer.Option("--text", help="Force readable output")]
Lines = Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Show the last N records")]
Components = Annotated[
    list[str],
    typer.Option(
        "--component", "-c", help="Records of this component, also one with parts; a pattern"
    ),
]
Sessions = Annotated[
    list[str],
    typer.Option("--session", "-s", help="Records of sessions with this label, pattern or number"),
]
Kinds = Annotated[list[str], typer.Option("--kind", "-k", help="Records of this kind, as in JSON")]
MinDuration = Annotated[
    float | None,
    typer.Option(
        parser=_span, metavar="TIME", help="Records of operations at least this long, as in 50ms"
    ),
]
Since = Annotated[
    float | None,
    typer.Option(parser=_moment, metavar="TIME", help="10m ago, or '2026-11-23 01:20' and later"),
]
Blocks = Annotated[bool, typer.Option("--blocks", help="List each streamed block by itself")]
File = Annotated[
    Path | None,
    typer.Option("--file", exists=True, dir_okay=False, help="Read a file; no daemon needed"),
]


def log(
    name: Name = None,
    endpoint: Endpoint = None,
    device: Device = None,
    follow: Follow = False,
    everything: All = False,
    json: Json = False,
    text: AsText = False,
    lines: Lines = None,
    file: File = None,
    all_runs: AllRuns = False,
    component: Components = [],  # noqa: B006 - typer copies it
    session: Sessions = [],  # noqa: B006
    kind: Kinds = [],  # noqa: B006
    min_duration: MinDuration = None,
    since: Since = None,
    blocks: Blocks = False,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Show the swap log: loads, evictions and waits, with their causes.

    On a terminal: swaps, waits and refusals of the daemon that ran last, blocks of one pass in one
    line. Elsewhere, or with --json: all its records, as they were written. With a NAME: the records
    of that component, each under its cause.
    """
    only = Filter(tuple(component), tuple(session), tuple(kind), min_duration or 0.0, since or 0.0)
    _refuse_unknown(only.kinds)
    folder = None if file else str(where(endpoint, device, timeout))
    if name is not None:
        if any((follow, all_runs, lines is not None, only != Filter())):
            raise typer.BadParameter(
                "NAME goes with neither --follow, --all-runs, --lines nor options that select "
                f"records: did you mean --component {name}?"
            )
        records = last_run(read(swap_log(folder, file, timeout)))
        show(records, name, everything=everything, json=json)
        return
    view = _view(only, everything, blocks=blocks, json=json, text=text)
    if not follow:
        _show(view, swap_log(folder, file, timeout), lines, all_runs=all_runs)
        return
    if file or all_runs:
        raise typer.BadParameter("--follow goes with neither --file nor --all-runs")
    follow_log(folder, view, lines, timeout)


def _view(only: Filter, everything: bool, *, blocks: bool, json: bool, text: bool) -> LogView:
    if not text and (json or not sys.stdout.isatty()):
        return JsonView(only)
    unfolded = any((everything, blocks, only.kinds, only.min_s))
    return TextView(only, everything, fold=not unfolded)


def _show(view: LogView, path: Path, lines: int | None, *, all_runs: bool) -> None:
    if not all_runs:
        view.show(last_run(read(path)), lines)
        return
    found = read_runs(path)
    view.show(found.lines, lines)
    if found.left_out:
        say_error(f"{found.left_out} records are left out: another version of swapd wrote them")


def swap_log(endpoint: str | None, file: Path | None, timeout: float) -> Path:
    """The file of the log: the given one, or the daemon's."""
    if file is not None:
        return file
    try:
        with ask(endpoint, "log", timeout) as client:
            return Path(client.status(timeout=timeout).swap_log)
    except (NotRunning, NotAnswering) as exc:
        left = logs_left_by(resolve(endpoint, None))
        hint = f". The log it left: --file {left[0]}" if left else ""
        raise type(exc)(f"{exc}{hint}") from exc


def _refuse_unknown(kinds: tuple[str, ...]) -> None:
    for kind in unknown_kinds(kinds):
        near = get_close_matches(kind, KINDS, n=3) or sorted(KINDS)
        raise typer.BadParameter(f"there is no kind {kind!r}; did you mean {', '.join(near)}?")
