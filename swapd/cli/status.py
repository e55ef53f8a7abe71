"""`swapd status`: the components on the device, their holders, and the bytes moved."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated, NamedTuple

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swapd.cli.common import Json, console, facts, print_json
from swapd.cli.conclusions import StatusReport, Waits, report
from swapd.cli.target import OWN_LABEL, ChosenDaemon
from swapd.shared.protocol import NAMES_SHOWN, ComponentStatus, Status, WaitStatus, part_name
from swapd.shared.text import counted, plain
from swapd.shared.units import rate, seconds, size


class Family(NamedTuple):
    """A component, or the parts of a streamed component in the order of registration."""

    name: str
    parts: tuple[ComponentStatus, ...]
    streamed: bool

    @property
    def inside(self) -> list[ComponentStatus]:
        return [c for c in self.parts if c.inside]

    @property
    def kept(self) -> list[ComponentStatus]:
        """The parts that stay when they are released."""
        return [c for c in self.parts if c.policy != "sequential"]

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.parts)

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(who for c in self.parts for who in c.holders))

    @property
    def leases(self) -> int:
        return sum(c.leases for c in self.parts)

    @property
    def idle_s(self) -> float | None:
        """Seconds since the last release of a part; None if never used."""
        return min((c.idle_s for c in self.parts if c.idle_s is not None), default=None)

    @property
    def moves(self) -> str:
        return f"{sum(c.loads for c in self.parts)}/{sum(c.evictions for c in self.parts)}"

    @property
    def wasted(self) -> int:
        return sum(c.wasted for c in self.parts)

    @property
    def amount(self) -> str:
        if not self.streamed:
            return size(self.nbytes)
        return f"{size(sum(c.nbytes for c in self.inside))} of {size(self.nbytes)}"

    @property
    def keeps(self) -> str:
        nbytes = size(sum(c.nbytes for c in self.kept))
        return f"{len(self.kept)} of {len(self.parts)} parts kept, {nbytes} of {size(self.nbytes)}"


def fold(components: Iterable[ComponentStatus], *, parts: bool = False) -> Iterator[Family]:
    """Yield a row for each component and one for each family, in place of its first part. `parts`:
    a row for each part."""
    rows: dict[tuple[str, bool], list[ComponentStatus]] = {}
    for c in components:
        family = "" if parts else c.part_of or ""
        streamed = bool(family) and c.name.startswith(part_name(family, ""))
        rows.setdefault((family if streamed else c.name, streamed), []).append(c)
    for (name, streamed), members in rows.items():
        yield Family(name, tuple(members), streamed)


_BAR_CELLS = 24
#: With fewer columns the table folds its cells, and omits the swap counts.
_WIDE = 100
#: With fewer columns the table omits the waits of each component.
_WIDEST = 140
_COLUMNS = {"component": 16, "size": 9, "state": 9, "policy": 12, "leases": 18, "last use": 9}

#: Colours of states, in the order in which `swapd top` sorts by state.
STATE_STYLES = {
    "leased": "bold green",
    "idle": "green",
    "resident": "green",
    "lent": "bold green",
    "loading": "yellow",
    "lending": "yellow",
    "stopping": "magenta",
    "revoking": "magenta",
    "writing back": "magenta",
    "reclaiming": "magenta",
    "filling": "cyan",
    "absent": "dim",
}


Parts = Annotated[
    bool, typer.Option("--parts", help="List each part of streamed components by itself")
]


def status(daemon: ChosenDaemon, json: Json = False, parts: Parts = False) -> None:
    """Show the components on the device, their holders, and the bytes moved."""
    with daemon.client("status") as client:
        reply = client.status(timeout=daemon.timeout)
    if json:
        print_json(report(reply))
    else:
        width = console.width
        console.print(page(reply, wide=width >= _WIDE, waits=width >= _WIDEST, parts=parts))


def page(
    reply: Status, *, wide: bool = True, waits: bool = False, parts: bool = False
) -> RenderableType:
    told = report(reply)
    head = Text.assemble(
        ("swapd ", "bold"),
        (reply.version, "bold"),
        f" on {reply.device}, up {seconds(reply.uptime_s)}, {reply.isolation} isolation, at ",
        (reply.runtime_dir, "cyan"),
    )
    if reply.components:
        rows, waited = fold(reply.components, parts=parts), told.waits_s if waits else None
        components: RenderableType = _components(rows, wide, waited)
    else:
        components = Text("nothing is registered yet; see swapd_client.connect().register()", "dim")
    return Group(head, "", components, "", _summary(told))


def _components(rows: Iterable[Family], wide: bool, waits: dict[str, Waits] | None) -> Table:
    """`waits`: waits by row; None hides them."""
    gap = (0, 2 if wide else 1, 0, 0)
    table = Table(box=None, padding=gap, pad_edge=False, header_style="bold")
    for heading, narrow in _COLUMNS.items():
        table.add_column(
            heading,
            justify="right" if heading in ("size", "last use") else "left",
            no_wrap=(wide and heading != "leases") or heading == "last use",
            max_width=None if wide else narrow,
            overflow="fold",
        )
    for heading in _more(wide, waits is not None):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*islice(_cells(row, waits or {}), len(table.columns)))
    return table


def _more(wide: bool, waits: bool) -> Iterator[str]:
    if wide:
        yield from ("in/out", "wasted", "hits", "swap-in")
    if waits:
        yield "waits p50, p95"


def _cells(row: Family, waits: dict[str, Waits]) -> Iterator[str | Text]:
    first = row.parts[0]
    yield Text(plain(row.name))
    yield row.amount
    yield _state(row)
    yield _policy((row.kept or row.parts)[0])
    yield Text(f"{row.leases}: {plain(', '.join(row.holders))}" if row.leases else "")
    yield _last_use(row)
    yield row.moves
    yield str(row.wasted)
    yield str(sum(c.hits for c in row.parts))
    yield "" if row.streamed or first.swap_in_s is None else seconds(first.swap_in_s)
    waited = waits.get(row.name)
    yield f"{seconds(waited.p50_s)}, {seconds(waited.p95_s)}" if waited else ""


def _state(row: Family) -> Text:
    if not row.streamed:
        state = row.parts[0].state
        return Text(state, STATE_STYLES.get(state, ""))
    count = counted(len(row.parts), "part")
    return Text(f"{count}, {len(row.inside)} in", "green" if row.inside else "dim")


def in_group(policy: str, c: ComponentStatus) -> str:
    return policy if c.group is None else f"{policy} in {plain(c.group)}"


def _policy(c: ComponentStatus) -> Text:
    policy = "pinned" if c.pinned and c.policy == "permanent" else c.policy
    also = ", scratch" if c.kind == "scratch" else ", mutable" if c.mutable else ""
    return Text(in_group(policy, c) + also)


def _last_use(row: Family) -> Text:
    if row.leases:
        return Text("in use", "bold green")
    if row.idle_s is None:
        return Text("never", "dim")
    return Text("now" if row.idle_s < 0.1 else f"{seconds(row.idle_s)} ago")


def _kept(reply: Status) -> Text:
    total = size(sum(one.nbytes for one in reply.kept))
    last = [f"{size(c.nbytes)}: {c.name}, {c.content}" for c in reply.kept[-NAMES_SHOWN:]]
    head = f"{total} of them without a session, {counted(len(reply.kept), 'content')}"
    return Text("\n".join([head, *map(plain, last)]))


def _summary(reply: StatusReport) -> Table:
    rows: list[tuple[str, RenderableType]] = [("arena", _arena(reply))]
    if reply.device_bytes:
        rows.append(("device", _device(reply)))
    more = f"; {size(reply.private_bytes)} more of unregistered components with live tensors"
    private = more if reply.private_bytes else ""
    rows += [
        ("host copies", f"{size(reply.host_copy_bytes)} of host memory{private}"),
        *([("kept", _kept(reply))] if reply.kept else []),
        ("sessions", _sessions(reply)),
        (
            "totals",
            f"{counted(reply.loads, 'load')}, {counted(reply.evictions, 'eviction')}, "
            f"{counted(reply.hits, 'hit')}; {size(reply.bytes_in)} in, {size(reply.bytes_out)} out",
        ),
        ("waiting", _waiting(reply)),
    ]
    rows += [("times", times)] if (times := times_of(reply)) else []
    if reply.starting:
        first, *others = reply.starting
        said = f"{first}; {', '.join(others)} wait" if others else first
        rows.append(("starting", plain(said)))
    rows += [("note", Text(plain(each), "yellow")) for each in reply.notes]
    for found in reply.conclusions:
        rows.append((found.kind.replace("_", " "), Text(plain(found.text), "bold yellow")))
    return facts(rows)


def _waiting(reply: StatusReport) -> Text | str:
    if not reply.waiting:
        return "nobody"
    labels = {s.session: s.label for s in reply.sessions}
    lines = [
        f"{labels.get(wait.session, f'session {wait.session}')}: "
        f"{asked_by(wait)} for {seconds(wait.waited_s)}, {expected(wait.seconds, wait.unknown)}"
        for wait in reply.waits[:NAMES_SHOWN]
    ]
    return Text("\n".join([str(reply.waiting), *map(plain, lines)]), "yellow")


def asked_by(wait: WaitStatus) -> str:
    return " + ".join(wait.names) + " + ..." * (wait.count > len(wait.names))


def expected(after_s: float | None, unknown: str) -> str:
    if after_s is None:
        return unknown or "not known"
    return f"in about {seconds(after_s)}" if after_s else "at once"


def times_of(reply: StatusReport) -> str:
    words = []
    if reply.wait_p50_s is not None and reply.wait_p95_s is not None:
        waited = f"p50 {seconds(reply.wait_p50_s)}, p95 {seconds(reply.wait_p95_s)}"
        words.append(f"acquires wait {waited}")
    if reply.load_bytes_per_s is not None:
        words.append(f"loads at {rate(reply.load_bytes_per_s)}")
    return "; ".join(words)


def _device(reply: Status) -> Text:
    text = Text(f"{size(reply.device_free_bytes)} free of {size(reply.device_bytes)}")
    for p in reply.processes:
        text.append(f"\n{size(p.nbytes)}: {plain(p.name)} (process {p.pid})")
    return text


def _arena(reply: Status) -> Text:
    share = reply.used_bytes / reply.budget_bytes if reply.budget_bytes else 0.0
    full = round(share * _BAR_CELLS)
    text = Text.assemble(
        ("█" * full, "green"),
        ("░" * (_BAR_CELLS - full), "dim"),
        f" {size(reply.used_bytes)} of {size(reply.budget_bytes)} ({share:.0%}), ",
        f"peak {size(reply.peak_bytes)}, chunks of {size(reply.chunk_bytes)}",
    )
    if reply.quarantined_bytes:
        text.append(
            f", {size(reply.quarantined_bytes)} quarantined (a process that left may still write)",
            "red",
        )
    return text


def _sessions(reply: Status) -> Text:
    text = Text()
    for s in reply.sessions:
        if s.label.startswith(OWN_LABEL):
            continue
        what = [counted(s.leases, "lease")] if s.leases else []
        what += [f"{s.waiting} waiting"] if s.waiting else []
        line = f"{plain(s.label)} (session {s.session})" + (f": {', '.join(what)}" if what else "")
        text.append(line if not text else f"\n{line}")
    return text or Text("none", "dim")
