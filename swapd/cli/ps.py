"""`swapd ps`: the daemons of this user, with any runtime folder."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import swapd_client
from swapd.cli.common import OWN_LABEL, TIMEOUT_S, Json, Timeout, console, print_json
from swapd.shared import daemons
from swapd.shared.daemons import RunningDaemon
from swapd.shared.protocol import StatusReply
from swapd.shared.text import plain
from swapd.shared.units import seconds, size
from swapd_client.errors import SwapdError

#: Daemons asked at the same time: each may take its whole time to answer.
_AT_ONCE = 16


class Listed(msgspec.Struct, frozen=True):
    """One daemon. Unanswered fields are None, and `problem` has the reason."""

    pid: int
    runtime_dir: str
    device: str | None = None
    version: str | None = None
    uptime_s: float | None = None
    budget_bytes: int | None = None
    used_bytes: int | None = None
    components: int | None = None
    sessions: int | None = None
    waiting: int | None = None
    problem: str = ""


def ps(json: Json = False, timeout: Timeout = TIMEOUT_S) -> None:
    """List this user's daemons on this machine, wherever their folders are.

    The last column has the value for `--endpoint`. A daemon that does not answer, or that is in a
    container, is listed with the reason.
    """
    found = daemons.running()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        listed = list(threads.map(lambda daemon: _listed(daemon, timeout), found))
    if json:
        print_json(listed)
    elif listed:
        console.print(page(listed))
    else:
        console.print("no swapd of this user runs here; start one: swapd serve --budget 40GiB")


def _listed(daemon: RunningDaemon, timeout: float) -> Listed:
    folder = str(daemon.folder)
    if daemon.unreachable:
        return Listed(daemon.pid, folder, problem=daemon.unreachable)
    try:
        reply = _asked(daemon.folder, timeout)
    except SwapdError as exc:
        return Listed(daemon.pid, folder, problem=str(exc))
    return Listed(
        pid=daemon.pid,
        runtime_dir=folder,
        device=reply.device,
        version=reply.version,
        uptime_s=reply.uptime_s,
        budget_bytes=reply.budget_bytes,
        used_bytes=reply.used_bytes,
        components=len(reply.components),
        sessions=sum(not s.label.startswith(OWN_LABEL) for s in reply.sessions),
        waiting=reply.waiting,
    )


def _asked(folder: Path, timeout: float) -> StatusReply:
    with swapd_client.connect(folder, label=f"{OWN_LABEL}ps", timeout=timeout) as client:
        return client.status(timeout=timeout)


def page(listed: list[Listed]) -> RenderableType:
    """The table for people, within 80 columns; problems are below it."""
    wrong = [Text(f"process {d.pid}: {plain(d.problem)}", "yellow") for d in listed if d.problem]
    return Group(_table(listed), *wrong)


def _table(listed: list[Listed]) -> Table:
    made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("process", "device", "used", "comps", "sessions", "waiting", "up"):
        made.add_column(heading, no_wrap=heading != "used")
    made.add_column("folder", overflow="fold", ratio=1)
    for d in listed:
        folder = Text(plain(d.runtime_dir), "cyan")
        used = (
            "" if d.used_bytes is None else f"{size(d.used_bytes)} of {size(d.budget_bytes or 0)}"
        )
        counts = ("" if n is None else str(n) for n in (d.components, d.sessions, d.waiting))
        up = "" if d.uptime_s is None else seconds(d.uptime_s)
        made.add_row(str(d.pid), plain(d.device or "?"), used, *counts, up, folder)
    return made
