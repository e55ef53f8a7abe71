"""The lines of the live view, from a `Snapshot` and a `Choice`.

Pure and independent of terminals: any width and height will do.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import NamedTuple
from zlib import crc32

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from swapd.cli.common import clock
from swapd.cli.conclusions import StatusReport
from swapd.cli.last_lines import LogEntry
from swapd.cli.status import STATE_STYLES, Family, asked_by, expected, fold, in_group, times_of
from swapd.shared import vm
from swapd.shared.protocol import CopyStatus, without_twins
from swapd.shared.text import plain
from swapd.shared.units import rate, seconds, size

KEYS = "s sort  p pin  u unpin  e evict  l story  / filter  ? help  q quit"
HELP = """\
s            sort by name, size, state or last use
/            show only names that contain a text; escape shows all
up, down     select; also j and k, page up and down, home and end

p, u         pin the selected component, so that it stays; unpin it
e            evict it at once, if it is idle
enter, l     show its records, each under its cause
q            quit

The speed of the last copy gives the progress. "pinned" components stay
until unpinned, "permanent" ones until unregistered."""

SORTS = ("name", "size", "state", "last use")

_COLOURS = ("green", "blue", "magenta", "cyan", "yellow", "red")
_RANKS = {state: rank for rank, state in enumerate(STATE_STYLES)}
#: With fewer lines only the table is shown, and with still fewer there is no bar.
_LOW, _FLAT = 14, 6
_WAITS_MAX, _TRANSFERS_MAX, _LINES_MIN, _NOTE_LINES_MAX = 4, 3, 4, 3
#: A conclusion may use 1/_NOTE_SHARE of the lines, as it ends with the setting to change.
_NOTE_SHARE = 3
_PROGRESS = 12


class Snapshot(NamedTuple):
    status: StatusReport
    lines: Sequence[LogEntry]
    #: Monotonic time.
    at: float
    amiss: str = ""


class Row(NamedTuple):
    of: Family
    #: Bytes on the device, in whole chunks.
    inside: int
    #: Seconds since the last release; None: never used; 0 during a lease.
    idle_s: float | None
    #: Seconds that 95 % of its acquires did not exceed; None before the first grant.
    waits_s: float | None

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def state(self) -> str:
        if self.of.streamed:
            return f"{len(self.of.inside)} of {len(self.of.parts)} in"
        state = self.of.parts[0].state
        return "idle" if state == "resident" else state


@dataclass
class Choice:
    sort: str = "name"
    only: str = ""
    selected: str = ""
    first: int = 0

    def sort_next(self) -> None:
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]

    def move(self, rows: list[Row], by: int) -> None:
        if rows:
            self.selected = rows[min(max(self._index(rows) + by, 0), len(rows) - 1)].name

    def settle(self, rows: list[Row], height: int) -> int:
        """Select one of `rows` and scroll it into `height` lines; return its index, or -1."""
        if not rows:
            self.first = 0
            return -1
        at = self._index(rows)
        self.selected = rows[at].name
        self.first = max(min(self.first, at, len(rows) - height), at - height + 1, 0)
        return at

    def _index(self, rows: list[Row]) -> int:
        return next((i for i, row in enumerate(rows) if row.name == self.selected), 0)


# --- the table ---------------------------------------------------------------------------


def listed(every: Iterable[Row], choice: Choice) -> list[Row]:
    found = [row for row in every if choice.only.lower() in row.name.lower()]
    return sorted(found, key=_ORDERS[choice.sort])


_ORDERS: dict[str, Callable[[Row], tuple[float | int | str, ...]]] = {
    "name": lambda row: (row.name,),
    "size": lambda row: (-row.of.nbytes, row.name),
    "state": lambda row: (_RANKS.get(row.state, 0 if row.inside else len(_RANKS)), row.name),
    "last use": lambda row: (float("inf") if row.idle_s is None else row.idle_s, row.name),
}


def all_rows(view: Snapshot, now: float) -> list[Row]:
    """Return all rows in the order of registration. `now`: monotonic time."""
    rows, chunk = [], view.status.chunk_bytes
    counted = {c.name for c in without_twins(c for c in view.status.components if c.inside)}
    for family in fold(view.status.components):
        inside = sum(vm.round_up(c.nbytes, chunk) for c in family.inside if c.name in counted)
        idle_s = None if family.idle_s is None else family.idle_s + now - view.at
        waits = view.status.waits_s.get(family.name)
        waits_s = waits.p95_s if waits else None
        rows.append(Row(family, inside, 0.0 if family.holders else idle_s, waits_s))
    return rows


class _Column(NamedTuple):
    heading: str
    cells: int
    from_width: int
    right: bool
    text: Callable[[Row], str]


_COLUMNS = (
    _Column("size", 9, 30, True, lambda row: size(row.of.nbytes)),
    _Column("state", 12, 22, False, lambda row: row.state),
    _Column("policy", 11, 66, False, lambda row: _policy(row)),
    _Column("holders", 18, 76, False, lambda row: _holders(row)),
    _Column("last use", 8, 44, True, lambda row: _last_use(row)),
    _Column("in/out", 9, 100, True, lambda row: row.of.moves),
    _Column("wasted", 6, 100, True, lambda row: str(row.of.wasted)),
    _Column(
        "wait p95", 8, 110, True, lambda row: "" if row.waits_s is None else seconds(row.waits_s)
    ),
)


def _policy(row: Row) -> str:
    first, *_ = row.of.parts
    return "pinned" if any(c.pinned for c in row.of.parts) else in_group(first.policy, first)


def _holders(row: Row) -> str:
    names = dict.fromkeys(who.rpartition(" (session ")[0] or who for who in row.of.holders)
    return plain(", ".join(names))


def _last_use(row: Row) -> str:
    if row.of.holders:
        return "in use"
    if row.idle_s is None:
        return "never"
    return "now" if row.idle_s < 1 else ago(row.idle_s)


def ago(span_s: float) -> str:
    """Return whole units, which change rarely."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if span_s >= length:
            return f"{int(span_s // length)} {unit}"
    return f"{int(span_s)} s"


def _grid(width: int) -> tuple[int, list[_Column]]:
    columns = [column for column in _COLUMNS if width >= column.from_width]
    left = width - sum(column.cells + 1 for column in columns)
    for at, column in enumerate(columns):
        if column.heading == "holders":
            spare = max(left - 24, 0) // 2
            columns[at] = column._replace(cells=column.cells + spare)
            left -= spare
    return max(left, 1), columns


def _table(rows: list[Row], choice: Choice, width: int, height: int) -> Iterator[Text]:
    name_cells, columns = _grid(width)

    def line(name: str, texts: Iterable[str]) -> str:
        cells = [set_cell_size(name, name_cells)]
        for column, text in zip(columns, texts, strict=True):
            pad = max(column.cells - cell_len(text), 0) if column.right else 0
            cells.append(set_cell_size(" " * pad + text, column.cells))
        return " ".join(cells)

    name, *headings = (
        f"{text}*" if text == choice.sort else text
        for text in ("name", *(column.heading for column in columns))
    )
    yield Text(line(name, headings), "bold")
    at = choice.settle(rows, height - 1)
    for i, row in enumerate(rows[choice.first : choice.first + height - 1], choice.first):
        style = "reverse" if i == at else STATE_STYLES.get(row.state, "" if row.inside else "dim")
        yield Text(line(plain(row.name), (column.text(row) for column in columns)), style)


# --- the arena ---------------------------------------------------------------------------


def bar(rows: Iterable[Row], budget: int, width: int) -> Text:
    text = Text(no_wrap=True)
    used = cells = 0
    for row in rows:
        used += row.inside
        until = min(round(used * width / budget), width) if budget else 0
        if until > cells:
            name = set_cell_size(plain(row.name), until - cells - 1) + "▏"
            text.append(name, f"black on {_COLOURS[crc32(row.name.encode()) % len(_COLOURS)]}")
            cells = until
    text.append("·" * (width - cells), "dim")
    return text


def _head(view: Snapshot, every: list[Row], width: int) -> Text:
    status = view.status
    used, budget = sum(row.inside for row in every), status.budget_bytes
    words = [
        f"swapd on {plain(status.device)}",
        f"{size(used)} of {size(budget)} ({used / budget:.0%})",
        f"{size(status.quarantined_bytes)} quarantined" if status.quarantined_bytes else "",
        f"{status.waiting} waiting",
        f"{size(status.bytes_in)} copied in",
    ]
    return Text(set_cell_size("  ".join(filter(None, words)), width), "bold")


# --- waits, copies, records --------------------------------------------------------------


def _waits(view: Snapshot, now: float) -> list[str]:
    status = view.status
    labels, since_s = {s.session: s.label for s in status.sessions}, now - view.at
    lines = [
        f"{seconds(wait.waited_s + since_s):>7}  "
        f"{plain(labels.get(wait.session, f'session {wait.session}'))}: "
        f"{plain(asked_by(wait))}; "
        f"{plain(expected(wait.seconds and max(wait.seconds - since_s, 0.0), wait.unknown))}; "
        f"{plain(wait.why) or 'to be copied in'}"
        for wait in status.waits
    ]
    first, *others = status.starting or ("",)
    lines += [f"{plain(label)}: the turn to start; {plain(first)} starts" for label in others]
    return lines


def _copy(moved: CopyStatus, since_s: float) -> str:
    arrow = "in " if moved.direction == "in" else "out"
    if moved.since_s is None:
        how = "next"
    elif moved.bytes_per_s is None or not moved.nbytes:
        how = "under way"
    else:
        done = min((moved.since_s + since_s) * moved.bytes_per_s / moved.nbytes, 0.99)
        full = round(done * _PROGRESS)
        how = f"{'#' * full}{'-' * (_PROGRESS - full)} ~{done:.0%}  {rate(moved.bytes_per_s)}"
    return f"{arrow} {plain(moved.name)}  {size(moved.nbytes)}  {how}"


def _block(title: str, lines: list[str], count: int, most: int) -> list[Text]:
    count = max(len(lines), count)
    shown = lines if count <= most else [*lines[: most - 1], f"{count - most + 1} more"]
    return [Text(title, "bold"), *map(Text, shown)] if lines else []


# --- the whole view ----------------------------------------------------------------------


def lines(view: Snapshot, choice: Choice, width: int, height: int, now: float) -> list[Text]:
    """Return exactly `height` lines of at most `width` cells. `now`: monotonic time."""
    every = all_rows(view, now)
    foot = _foot(view, choice, width, height)
    shown: list[Text] = [_head(view, every, width)]
    if height >= _FLAT:
        shown.append(bar(every, view.status.budget_bytes, width))
    room = height - len(shown) - len(foot)
    below = _below(view, now) if height >= _LOW else []
    chosen = listed(every, choice)
    least_log = _LINES_MIN if height >= _LOW else 0
    table_height = max(min(len(chosen) + 1, room - len(below) - least_log), 2)
    shown += _table(chosen, choice, width, table_height)
    if not every:
        shown.append(Text("nothing is registered yet", "dim"))
    shown += below
    log_height = height - len(shown) - len(foot) - 1
    if height >= _LOW and log_height > 0:
        shown.append(Text("log", "bold"))
        shown += _log(view.lines, log_height)
    shown = shown[: max(height - len(foot), 0)]
    shown += [Text()] * (height - len(foot) - len(shown)) + foot
    for line in shown:
        line.truncate(width)
    return shown[-height:] if height < len(foot) + 1 else shown[:height]


def _wrapped(text: str, width: int, most: int) -> list[str]:
    return wrap(plain(text), max(width, 1))[:most]


def _foot(view: Snapshot, choice: Choice, width: int, height: int) -> list[Text]:
    foot = [Text(line, "bold red") for line in _wrapped(view.amiss, width, _NOTE_LINES_MAX)]
    for found in view.status.conclusions if height >= _LOW else ():
        said = _wrapped(found.text, width, max(height // _NOTE_SHARE, _NOTE_LINES_MAX))
        foot += [Text(line, "bold yellow") for line in said]
    if choice.only:
        foot.append(Text(f"only names with {plain(choice.only)!r}; escape shows all", "yellow"))
    return [*foot, Text(KEYS, "dim")]


def _below(view: Snapshot, now: float) -> list[Text]:
    moved = [_copy(each, now - view.at) for each in view.status.copies]
    waits = _block("waiting", _waits(view, now), view.status.waiting, _WAITS_MAX)
    times = [Text(times_of(view.status), "dim")] if times_of(view.status) else []
    return times + waits + _block("copies", moved, 0, _TRANSFERS_MAX)


def _log(spoken: Sequence[LogEntry], height: int) -> Iterator[Text]:
    for _, time, said in spoken[-height:]:
        detail, at = " ".join(said.detail.split()), clock(time)[: len("HH:MM:SS")]
        text = Text.assemble((at, "dim"), "  ", (said.verb.ljust(10), said.style))
        yield text.append(f" {said.subject}  {detail}".rstrip())
