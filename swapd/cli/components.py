"""`swapd pin`, `unpin`, `evict`, `resize`, `forget` and `forecast`."""

import time
from contextlib import suppress
from functools import partial
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from swapd.cli.common import Json, console, facts, show
from swapd.cli.status import expected, fold
from swapd.cli.target import ChosenDaemon
from swapd.shared.protocol import ComponentStatus, Forecast, Status
from swapd.shared.text import plain
from swapd.shared.units import parse_size, rate, size
from swapd_client import Client, InUse

#: Longest time for which a client may keep an unused lease, and the pause between looks.
_KEPT_S, _AGAIN_S = 0.5, 0.05

Name = Annotated[str, typer.Argument(help="A component, also one with parts")]


def pin(name: Name, daemon: ChosenDaemon) -> None:
    """Keep a component on the device: load it when there is room, and do not evict it.

    Lasts until `swapd unpin`, or until the component is unregistered. Of a component in parts, only
    its resident parts stay.
    """
    with daemon.client("pin") as client:
        client.pin(name, timeout=daemon.timeout)
        client.prefetch(name, timeout=None)
        pinned = [c for c in _members(client.status(timeout=daemon.timeout), name) if c.pinned]
    stays = [c for c in pinned if c.policy == "permanent"]
    coming = [c for c in stays if not c.inside]
    said = f"{plain(name)}: {_amount(stays)} {'stays' if pinned else 'is not there any more'}"
    if coming:
        said += f"; {_amount(coming)} of it once there is room"
    console.print(said)


def unpin(name: Name, daemon: ChosenDaemon) -> None:
    """Allow the eviction of a pinned component again."""
    with daemon.client("unpin") as client:
        client.unpin(name, timeout=daemon.timeout)
    console.print(f"{plain(name)}: may be evicted")


def evict(name: Name, daemon: ChosenDaemon) -> None:
    """Evict an idle component at once, and save changes to it."""
    with daemon.client("evict") as client:
        _evict(client, name, daemon.timeout)
        there = [c for c in _members(client.status(timeout=daemon.timeout), name) if c.inside]
    leaving = [c for c in there if c.state in ("revoking", "writing back")]
    said = f"{plain(name)}: is out"
    if leaving:
        said = f"{plain(name)}: {_amount(leaving)} is leaving, and saved first"
    elif there:
        said = f"{plain(name)}: is out, but for {_amount(there)}"
    console.print(said)


def _evict(client: Client, name: str, timeout: float) -> None:
    """Evict a component; if it is in use, once more: a client may keep an unused lease for a
    while."""
    with suppress(InUse):
        return client.evict(name, timeout=timeout)
    give_up = time.monotonic() + _KEPT_S
    while time.monotonic() < give_up:
        if not any(c.leases for c in _members(client.status(timeout=timeout), name)):
            break
        time.sleep(_AGAIN_S)
    return client.evict(name, timeout=timeout)


def _members(reply: Status, name: str) -> list[ComponentStatus]:
    return [c for c in reply.components if name in (c.name, c.part_of)]


def _amount(components: list[ComponentStatus]) -> str:
    return size(sum(c.nbytes for c in components))


Kept = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONTENT]...", help="As swapd status names them, or their components"),
]


def forget(daemon: ChosenDaemon, contents: Kept = None) -> None:
    """Drop host copies that swapd keeps though no session uses them: all, or those named.

    The next load of these files reads them again. Fails if nothing is kept of a named content.
    """
    with daemon.client("forget") as client:
        before = client.status(timeout=daemon.timeout).kept
        client.forget(*(contents or ()), timeout=daemon.timeout)
        after = client.status(timeout=daemon.timeout).kept
    gone = [one for one in before if one not in after]
    names = ", ".join(dict.fromkeys(one.name for one in gone)) or "nothing was kept"
    console.print(f"{size(sum(one.nbytes for one in gone))} dropped: {plain(names)}")


AUTO = "auto"


def resize(
    name: Annotated[str, typer.Argument(help="A component with parts")],
    amount: Annotated[
        str,
        typer.Argument(metavar="SIZE", help=f"Size to keep, as in 5.6GiB; {AUTO}: all that fits"),
    ],
    daemon: ChosenDaemon,
) -> None:
    """Keep part of a component on the device, and stream the rest block by block."""
    try:
        nbytes = None if amount == AUTO else parse_size(amount)
    except ValueError as exc:
        raise typer.BadParameter(f"{exc}, or {AUTO}") from exc
    with daemon.client("resize") as client:
        client.resize(name, nbytes, timeout=daemon.timeout)
        reply = client.status(timeout=daemon.timeout)
    for family in fold(reply.components):
        if family.streamed and family.name == name:
            console.print(f"{plain(name)}: {family.keeps}")


Names = Annotated[list[str], typer.Argument(help="Components, acquired together")]


def forecast(names: Names, daemon: ChosenDaemon, json: Json = False) -> None:
    """Predict the loads, evictions and wait of an acquire. Changes nothing."""
    with daemon.client("forecast") as client:
        reply = client.forecast(*names, timeout=daemon.timeout)
    show(reply, partial(forecast_page, names), json=json)


def forecast_page(names: list[str], reply: Forecast) -> Table:
    how = ""
    if reply.seconds and reply.bytes_per_s:
        how = f", with copies at the {rate(reply.bytes_per_s)} measured"
    rows: list[tuple[str, RenderableType]] = [
        ("acquire", Text(plain(" + ".join(names)))),
        ("copies in", _copies(reply)),
        ("evicts", _victims(reply)),
        ("waits for", _waits(reply)),
        ("granted", expected(reply.seconds, reply.unknown) + how),
    ]
    if reply.bytes_back:
        rows.insert(3, ("writes back", size(reply.bytes_back)))
    return facts(rows)


def _copies(reply: Forecast) -> str:
    parts = [size(reply.bytes_in)] if reply.bytes_in else []
    parts += [f"{size(reply.bytes_coming)} on the way already"] if reply.bytes_coming else []
    if reply.victims:
        return ", ".join(parts) or "nothing: it comes in as zeros"
    return ", ".join(parts) or "nothing: it is in, or comes in as zeros"


def _victims(reply: Forecast) -> str:
    if not reply.victims:
        return "nothing" if reply.at_once else "depends on who gives way"
    families: dict[str, list[int]] = {}
    for v in reply.victims:
        families.setdefault(v.part_of or v.name, []).append(v.nbytes)
    said = []
    for name, parts in families.items():
        of = f" in {len(parts)} parts" if len(parts) > 1 else ""
        said.append(f"{name} ({size(sum(parts))}{of})")
    return plain(", ".join(said))


def _waits(reply: Forecast) -> Text:
    if reply.at_once:
        return Text("nobody", "green")
    return Text("\n".join(plain(f"{way.name}: {way.why}") for way in reply.waits_for), "yellow")
