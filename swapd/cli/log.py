"""`swapd log` and `swapd trace`: the swap log for people, as JSON lines, and for Perfetto."""

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from datetime import datetime, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from swapd.cli.common import Json, console, day, option_of, say_error, shown_json
from swapd.cli.last_lines import READ_BYTES
from swapd.cli.passes import Folding
from swapd.cli.render import ShownLine, line
from swapd.cli.story import show
from swapd.cli.target import ChosenDaemon
from swapd.core import events
from swapd.log.history import Filter, RecordContext, unknown_kinds
from swapd.log.reader import LogLine, Tail, clock_of, last_run, read, read_runs
from swapd.log.records import KINDS
from swapd.log.trace import rendered
from swapd.shared.config import logs_left_by
from swapd.shared.fds import OwnedFd
from swapd.shared.system import open_pidfd
from swapd.shared.text import counted
from swapd.shared.units import parse_span
from swapd_client import NotRunning, Timeout
from swapd_client.session.endpoint import find


class LogView:
    """Shows the lines of a log, in order. `everything`: also hits and releases. `folds`: moves of
    parts of one component in one line, held back while more records may belong to it."""

    def __init__(self, only: Filter, *, everything: bool = False, folds: bool = False) -> None:
        self._only = only
        self._everything = everything
        self._folding = Folding() if folds else None
        self._seen = RecordContext()
        self._day = ""
        self.found = False

    def show(
        self, lines: Iterable[LogLine], last: int | None = None, *, more: bool = False
    ) -> None:
        shown = self._shown(lines, more)
        for each in shown if last is None else deque(shown, maxlen=last):
            if (today := day(each.time)) != self._day:
                self._day = today
                console.print(Text(today, "bold"))
            console.print(each.text, soft_wrap=True)

    def _shown(self, lines: Iterable[LogLine], more: bool) -> Iterator[ShownLine]:
        folding = self._folding
        for each in lines:
            if folding and each.record.start is not None:
                yield from folding.flush(self._seen)
            for _, record in self._wanted([each]):
                if folding:
                    yield from folding.lines(record, self._seen)
                elif text := line(record, self._seen, everything=self._everything):
                    yield text
        if folding and not more:
            yield from folding.flush(self._seen)

    def _wanted(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        for each in lines:
            if each.record.start is not None:
                self._seen = RecordContext()
            if self._only.wants(each.record, self._seen):
                self.found = True
                yield each
            self._seen.note(each.record)


class JsonView(LogView):
    def show(
        self, lines: Iterable[LogLine], last: int | None = None, *, more: bool = False
    ) -> None:
        wanted = lines if self._only == Filter() else self._wanted(lines)
        for raw, _ in wanted if last is None else deque(wanted, maxlen=last):
            sys.stdout.buffer.write(shown_json(raw) + b"\n")
        sys.stdout.buffer.flush()


#: Seconds between two looks at the file; looks without a record until held-back lines are shown.
LOOK_S = 0.1
QUIET_LOOKS = 5


def follow_log(daemon: ChosenDaemon, view: LogView, lines: int | None) -> None:
    """Show the last `lines` of the log, then its growth, until the daemon ends.

    Blocks. Raises: NotRunning, Timeout, OSError; SystemExit(1) if the daemon died.
    """
    with ExitStack() as opened:
        folder = opened.enter_context(find(daemon.folder))
        client = opened.enter_context(daemon.client("log"))
        if (process := _process(folder.holder())) is not None:
            opened.enter_context(process)
        path = Path(client.status(timeout=daemon.timeout).swap_log)
        tail = opened.enter_context(closing(Tail(path)))
        view.show(last_run(tail.read()), lines, more=True)
        quiet, stops = 0, False
        life = client.session.life.ended
        while not (process or life).await_readable(LOOK_S):  # an upgrade ends the session alone
            fresh = tail.read()
            stops = _stops(fresh, stops)
            quiet = 0 if fresh else quiet + 1
            if fresh or quiet == QUIET_LOOKS:
                view.show(fresh, more=bool(fresh))
        fresh = tail.read()
        view.show(fresh)
        if not _stops(fresh, stops):
            say_error("the daemon is gone without a goodbye, so its log ends here")
            sys.exit(1)
        say_error("the daemon has stopped, so its log ends here")


def _process(pid: int | None) -> OwnedFd | None:
    with suppress(OSError):
        return None if pid is None else open_pidfd(pid)
    return None


def _stops(lines: Iterable[LogLine], before: bool) -> bool:
    """Tell whether a daemon was told to stop by these records, or those before them."""
    for _, record in lines:
        before = record.start is None and (before or isinstance(record.event, events.Stopping))
    return before


def _moment(text: str) -> float | timedelta:
    with suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    try:
        return timedelta(seconds=parse_span(text))
    except (ValueError, OverflowError) as exc:
        raise ValueError(f"{exc}, or a date and time like '2026-11-23 01:20'") from None


def _unix(since: float | timedelta | None, daemon: ChosenDaemon, file: Path | None) -> float:
    """Return `since` as a time of records: by the wall clock as it was at their daemon's start."""
    if not isinstance(since, timedelta):
        return since or 0.0
    if file is not None:
        return time.time() - since.total_seconds()  # noqa: TID251 - it may be of another boot
    with closing(Tail(swap_log(daemon, file), READ_BYTES)) as tail:
        at_zero = [at for _, record in tail.read() if (at := clock_of(record)) is not None]
    epoch = at_zero[-1] if at_zero else time.time() - time.monotonic()  # noqa: TID251
    return epoch + time.monotonic() - since.total_seconds()


Name = Annotated[str | None, typer.Argument(help="Show why this component was loaded and evicted")]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Follow new records as they are written")
]
All = Annotated[bool, typer.Option("--all", "-a", help="Every record: hits and releases too")]
AllRuns = Annotated[bool, typer.Option("--all-runs", help="Include runs of earlier daemons")]
Lines = Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Show the last N records")]
Sessions = Annotated[
    list[str],
    typer.Option("--session", "-s", help="Records of sessions with this label, pattern or number"),
]
Kinds = Annotated[list[str], typer.Option("--kind", "-k", help="Records of this kind, as in JSON")]
Since = Annotated[Any, option_of(_moment, "TIME", "10m ago, or '2026-11-23 01:20' and later")]
Blocks = Annotated[bool, typer.Option("--blocks", help="List each streamed block by itself")]
File = Annotated[
    Path | None,
    typer.Option("--file", exists=True, dir_okay=False, help="Read a file; no daemon needed"),
]


def log(
    daemon: ChosenDaemon,
    name: Name = None,
    follow: Follow = False,
    everything: All = False,
    json: Json = False,
    lines: Lines = None,
    file: File = None,
    all_runs: AllRuns = False,
    component: Annotated[
        list[str],
        typer.Option(
            "--component", "-c", help="Records of this component, also one with parts; a pattern"
        ),
    ] = [],  # noqa: B006 - typer copies it
    session: Sessions = [],  # noqa: B006
    kind: Kinds = [],  # noqa: B006
    min_duration: Annotated[
        float | None,
        option_of(parse_span, "TIME", "Records of operations at least this long, as in 50ms"),
    ] = None,
    since: Since = None,
    blocks: Blocks = False,
) -> None:
    """Show the swap log: loads, evictions and waits, with their causes.

    It shows swaps, waits and refusals of the daemon that ran last, with the blocks of one pass in
    one line. With --json: all its records, as they were written. With a NAME: the records of that
    component, each under its cause.
    """
    only = Filter(tuple(component), tuple(session), tuple(kind), min_duration or 0.0)
    for strange in unknown_kinds(only.kinds):
        near = get_close_matches(strange, KINDS, n=3) or sorted(KINDS)
        raise typer.BadParameter(f"there is no kind {strange!r}; did you mean {', '.join(near)}?")
    if name is not None:
        if any((follow, all_runs, blocks, since is not None, lines is not None, only != Filter())):
            raise typer.BadParameter(
                "NAME goes with neither --follow, --all-runs, --blocks, --lines nor options that "
                f"select records: did you mean --component {name}?"
            )
        records = last_run(read(swap_log(daemon, file)))
        return show(records, name, everything=everything, json=json)
    if follow and (file or all_runs):
        raise typer.BadParameter("--follow goes with neither --file nor --all-runs")
    only = only._replace(since=_unix(since, daemon, file))
    view = _view(only, everything, blocks=blocks, json=json)
    if follow:
        return follow_log(daemon, view, lines)
    _show(view, swap_log(daemon, file), lines, all_runs=all_runs)
    _refuse_nothing(view, only)


def _view(only: Filter, everything: bool, *, blocks: bool, json: bool) -> LogView:
    if json:
        return JsonView(only)
    folds = not any((everything, blocks, only.kinds, only.min_s))
    return LogView(only, everything=everything, folds=folds)


def _show(view: LogView, path: Path, lines: int | None, *, all_runs: bool) -> None:
    if not all_runs:
        view.show(last_run(read(path)), lines)
        return
    found, reader = read_runs(path)
    view.show(found, lines)
    if left_out := reader.left_out:
        say_error(f"left out: {counted(left_out, 'record')}, which another version of swapd wrote")


def _refuse_nothing(view: LogView, only: Filter) -> None:
    """Exit with 1 if no record is about the named components and sessions, as grep does."""
    named = [" or ".join(some) for some in (only.components, only.sessions) if some]
    if named and not view.found:
        plain = only == Filter(only.components, only.sessions)
        which = "" if plain else " that the other options select"
        names = " and ".join(named)
        say_error(f"no record{which} is about {names}; `swapd status` has names")
        sys.exit(1)


def swap_log(daemon: ChosenDaemon, file: Path | None) -> Path:
    if file is not None:
        return file
    try:
        with daemon.client("log") as client:
            return Path(client.status(timeout=daemon.timeout).swap_log)
    except (NotRunning, Timeout) as exc:
        left = logs_left_by(daemon.folder)
        hint = f". The log it left: --file {left[0]}" if left else ""
        raise type(exc)(f"{exc}{hint}") from exc


Out = Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The file to write")]


def trace(
    daemon: ChosenDaemon, output: Out = Path("trace.json"), file: File = None, since: Since = None
) -> None:
    """Write the swap log as a trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

    The trace has a track for each component, for the copies of each direction, and for the waits
    and leases of each session. It covers the daemon that ran last.
    """
    lines, began = last_run(read(swap_log(daemon, file))), _unix(since, daemon, file)
    with output.open("wb") as written:
        written.writelines(rendered((line.record for line in lines), began))
    typer.echo(f"{output}: open it in https://ui.perfetto.dev")
