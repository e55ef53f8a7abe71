"""The lines of the live view, from a `Watch` and a `Choice`.

Pure and independent of terminals: any width and height will do.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from textwrap import wrap
from typing import NamedTuple
from zlib import crc32

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from swapd.cli.live.watch import Transfer, Watch
from swapd.log.picture import Item, Wait
from swapd.shared.protocol import part_name
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
_STATES = {
    "leased": "bold green",
    "idle": "green",
    "lent": "bold green",
    "loading": "yellow",
    "lending": "yellow",
    "revoking": "magenta",
    "writing back": "magenta",
    "reclaiming": "magenta",
    "filling": "cyan",
    "absent": "dim",
}
_RANKS = {state: rank for rank, state in enumerate(_STATES)}
#: Fewer lines show only the table, and still fewer no bar.
_LOW, _FLAT = 14, 6
_WAITS_MAX, _TRANSFERS_MAX, _LINES_MIN, _NOTE_LINES_MAX = 4, 3, 4, 3
#: Cells of the bar of a copy's progress.
_PROGRESS = 12


class Row(NamedTuple):
    """A component, or the parts of a family as one."""

    name: str
    nbytes: int
    #: Bytes of the part on the device, in whole chunks.
    inside: int
    state: str
    policy: str
    holders: tuple[str, ...]
    #: Seconds since the last release; None: never used; 0 during a lease.
    idle_s: float | None
    loads: int
    evictions: int
    workspace: bool


@dataclass
class Choice:
    """The choices of the user."""

    sort: str = "name"
    only: str = ""
    selected: str = ""
    #: The first row shown.
    first: int = 0

    def sort_next(self) -> None:
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]

    def move(self, rows: list[Row], by: int) -> None:
        """Select another row, `by` rows further down."""
        if rows:
            self.selected = rows[min(max(self._index(rows) + by, 0), len(rows) - 1)].name

    def settle(self, rows: list[Row], height: int) -> int:
        """Have one of `rows` selected, and visible in `height` lines; return its index."""
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
    """The rows to show, in order."""
    found = [row for row in every if choice.only.lower() in row.name.lower()]
    return sorted(found, key=_ORDERS[choice.sort])


_ORDERS: dict[str, Callable[[Row], tuple[float | int | str, ...]]] = {
    "name": lambda row: (row.name,),
    "size": lambda row: (-row.nbytes, row.name),
    "state": lambda row: (_RANKS.get(row.state, 0 if row.inside else len(_RANKS)), row.name),
    "last use": lambda row: (float("inf") if row.idle_s is None else row.idle_s, row.name),
}


def all_rows(watch: Watch, now: float) -> Iterator[Row]:
    """All rows, in the order of registration; a streamed component is one row."""
    families: dict[str, list[Item]] = {}
    for item in watch.picture.items.values():
        is_part = item.part_of and item.name.startswith(part_name(item.part_of, ""))
        families.setdefault(item.part_of if is_part else item.name, []).append(item)
    told = {} if watch.status is None else {c.name: c.idle_s for c in watch.status.components}
    chunk = chunk_bytes(watch)
    for name, parts in families.items():
        yield _row(name, parts, told, now, watch.told_at, chunk)


def chunk_bytes(watch: Watch) -> int:
    if watch.status is not None:
        return watch.status.chunk_bytes
    return watch.picture.start.chunk_bytes if watch.picture.start else 1


def _row(
    name: str,
    parts: list[Item],
    told: dict[str, float | None],
    now: float,
    told_at: float,
    chunk: int,
) -> Row:
    inside = [part for part in parts if part.inside]
    holders = tuple(dict.fromkeys(who for part in parts for who in part.holders))
    ago = [now - part.used_at for part in parts if part.used_at is not None]
    ago += [idle + now - told_at for part in parts if (idle := told.get(part.name)) is not None]
    first = parts[0]
    if any(part.name != name for part in parts):
        state = f"{len(inside)} of {len(parts)} in"
    elif first.state == "resident":
        state = "leased" if first.leases else "idle"
    else:
        state = first.state
    policy = first.policy if first.group is None else f"{first.policy} in {first.group}"
    return Row(
        name=name,
        nbytes=sum(part.nbytes for part in parts),
        inside=sum(-(-part.nbytes // chunk) * chunk for part in inside),
        state=state,
        policy="pinned" if any(part.pinned for part in parts) else policy,
        holders=holders,
        idle_s=0.0 if holders else max(min(ago), 0.0) if ago else None,
        loads=sum(part.loads for part in parts),
        evictions=sum(part.evictions for part in parts),
        workspace=first.kind == "workspace",
    )


class _Column(NamedTuple):
    heading: str
    cells: int
    #: Least width of the view that shows it.
    from_width: int
    right: bool
    text: Callable[[Row], str]


_COLUMNS = (
    _Column("size", 9, 30, True, lambda row: size(row.nbytes)),
    _Column("state", 12, 22, False, lambda row: row.state),
    _Column("policy", 11, 66, False, lambda row: plain(row.policy)),
    _Column("holders", 18, 76, False, lambda row: plain(", ".join(row.holders))),
    _Column("last use", 8, 44, True, lambda row: _last_use(row)),
    _Column("in/out", 9, 100, True, lambda row: f"{row.loads}/{row.evictions}"),
)


def _last_use(row: Row) -> str:
    if row.holders:
        return "in use"
    if row.idle_s is None:
        return "never"
    return "now" if row.idle_s < 1 else ago(row.idle_s)


def ago(span_s: float) -> str:
    """In whole units, so that it changes rarely."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if span_s >= length:
            return f"{int(span_s // length)} {unit}"
    return f"{int(span_s)} s"


def _table(rows: list[Row], choice: Choice, width: int, height: int) -> Iterator[Text]:
    columns = [column for column in _COLUMNS if width >= column.from_width]
    left = width - sum(column.cells + 1 for column in columns)
    spare = max(left - 24, 0) // 2 if any(c.heading == "holders" for c in columns) else 0
    columns = [c._replace(cells=c.cells + spare * (c.heading == "holders")) for c in columns]
    name_cells = max(width - sum(column.cells + 1 for column in columns), 1)

    def line(name: str, texts: Iterable[str]) -> str:
        cells = [set_cell_size(name, name_cells)]
        for column, text in zip(columns, texts, strict=True):
            pad = max(column.cells - cell_len(text), 0) if column.right else 0
            cells.append(set_cell_size(" " * pad + text, column.cells))
        return " ".join(cells)

    def heading(text: str) -> str:
        return f"{text}*" if text == choice.sort else text

    yield Text(line(heading("name"), (heading(column.heading) for column in columns)), "bold")
    at = choice.settle(rows, height - 1)
    for i in range(choice.first, min(choice.first + height - 1, len(rows))):
        row = rows[i]
        texts = [column.text(row) for column in columns]
        text = Text(line(plain(row.name), texts))
        if i == at:
            text.stylize("reverse")
        else:
            text.stylize(_STATES.get(row.state, "" if row.inside else "dim"))
        yield text


# --- the arena ---------------------------------------------------------------------------


def bar(rows: Iterable[Row], budget: int, width: int) -> Text:
    """The arena: each resident component, as wide as its share."""
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


def _head(watch: Watch, every: list[Row], width: int) -> Text:
    status, start = watch.status, watch.picture.start
    used, budget = sum(row.inside for row in every), budget_bytes(watch)
    device = status.device if status else start.device if start else "?"
    share = f" ({used / budget:.0%})" if budget else ""
    words = [
        f"swapd on {plain(device)}",
        f"{size(used)} of {size(budget)}{share}",
        f"{len(watch.picture.waits)} waiting",
        f"{size(_bytes_in(watch))} copied in",
    ]
    if status is not None and status.quarantined_bytes:
        words.insert(2, f"{size(status.quarantined_bytes)} quarantined")
    return Text(set_cell_size("  ".join(filter(None, words)), width), "bold")


def _bytes_in(watch: Watch) -> int:
    if watch.picture.uncertain and watch.status is not None:
        return watch.status.bytes_in
    return watch.picture.counts.bytes_in


def budget_bytes(watch: Watch) -> int:
    if watch.status is not None:
        return watch.status.budget_bytes
    start = watch.picture.start
    return start.chunks * start.chunk_bytes if start else 0


# --- waits, copies, records --------------------------------------------------------------


def _waits(watch: Watch, now: float) -> list[str]:
    waits = sorted(watch.picture.waits.values(), key=lambda wait: wait.since)
    lines = [_wait(wait, watch, now) for wait in waits]
    if watch.picture.uncertain and watch.status is not None:
        more = watch.status.waiting - len(waits)
        lines += [f"{more} that began to wait before this view did"] if more > 0 else []
    return lines


def _wait(wait: Wait, watch: Watch, now: float) -> str:
    who = watch.picture.seen.labels.get(wait.session) or f"session {wait.session}"
    names = " + ".join(map(plain, wait.names))
    why = plain(wait.why) or "to be copied in"
    return f"{seconds(max(now - wait.since, 0.0)):>7}  {plain(who)}: {names}; {why}"


def _transfer(moved: Transfer, now: float) -> str:
    arrow = "in " if moved.direction == "in" else "out"
    done = moved.done(now)
    if moved.since is None:
        how = "next"
    elif done is None or moved.bytes_per_s is None:
        how = "under way"
    else:
        full = round(done * _PROGRESS)
        how = f"{'#' * full}{'-' * (_PROGRESS - full)} ~{done:.0%}  {rate(moved.bytes_per_s)}"
    return f"{arrow} {plain(moved.name)}  {size(moved.nbytes)}  {how}"


def _block(title: str, lines: list[str], most: int) -> list[tuple[str, str]]:
    """A title and some lines; if there are more, the last one says how many."""
    shown = lines if len(lines) <= most else [*lines[: most - 1], f"{len(lines) - most + 1} more"]
    return [(title, "bold"), *((line, "") for line in shown)] if lines else []


# --- the whole view ----------------------------------------------------------------------


def lines(
    watch: Watch, choice: Choice, width: int, height: int, now: float, note: str = ""
) -> list[Text]:
    """Exactly `height` lines of at most `width` cells. `now`: Unix time; `note`: a problem."""
    every = list(all_rows(watch, now))
    chosen = listed(every, choice)
    shown: list[Text] = [_head(watch, every, width)]
    if height >= _FLAT:
        shown.append(bar(every, budget_bytes(watch), width))
    foot = [Text(line, "bold red") for line in wrap(note, max(width, 1))[:_NOTE_LINES_MAX]]
    if choice.only:
        foot.append(Text(f"only names with {plain(choice.only)!r}; escape shows all", "yellow"))
    foot.append(Text(KEYS, "dim"))
    room = height - len(shown) - len(foot)
    below: list[tuple[str, str]] = []
    if height >= _LOW:
        below = _block("waiting", _waits(watch, now), _WAITS_MAX)
        moved = [_transfer(each, now) for each in watch.transfers()]
        below += _block("copies", moved, _TRANSFERS_MAX)
    table_height = max(min(len(chosen) + 1, room - len(below) - _LINES_MIN * (height >= _LOW)), 2)
    shown += _table(chosen, choice, width, table_height)
    if not every:
        shown.append(Text("nothing is registered yet", "dim"))
    shown += [Text(line, style) for line, style in below]
    log_height = height - len(shown) - len(foot) - 1
    if height >= _LOW and log_height > 0:
        shown.append(Text("log", "bold"))
        shown += _log(watch, log_height)
    shown = shown[: max(height - len(foot), 0)]
    shown += [Text()] * (height - len(foot) - len(shown)) + foot
    for line in shown:
        line.truncate(width)
    return shown[-height:] if height < len(foot) + 1 else shown[:height]


def _log(watch: Watch, height: int) -> Iterator[Text]:
    for time, said in list(watch.said)[-height:]:
        subject, detail = plain(said.subject), " ".join(plain(said.detail).split())
        text = Text.assemble((clock(time), "dim"), "  ", (said.verb.ljust(10), said.style))
        yield text.append(f" {subject}  {detail}".rstrip())


def clock(time: float) -> str:
    """Local time of day: the date is today's, or that of the last records."""
    return datetime.fromtimestamp(time).astimezone().strftime("%H:%M:%S")
