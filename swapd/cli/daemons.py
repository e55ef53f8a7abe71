"""`swapd ps`, `stop` and `upgrade`: list this user's daemons; end or upgrade one."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swapd.cli.common import Json, console, print_json, say_error
from swapd.cli.target import (
    OWN_LABEL,
    TIMEOUT_S,
    Device,
    Endpoint,
    TimeoutOption,
    connected,
    device_of,
    where,
)
from swapd.shared import daemons
from swapd.shared.daemons import RunningDaemon
from swapd.shared.errors import UserError
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Status
from swapd.shared.system import is_stopped
from swapd.shared.text import counted, plain
from swapd.shared.units import seconds, size
from swapd_client.errors import NotRunning, SwapdError, Timeout
from swapd_client.session.endpoint import find, not_answering, open_lifeline

#: Most daemons asked at once: each may take its whole time to answer.
_AT_ONCE = 16


class DaemonEntry(msgspec.Struct, frozen=True):
    """A line of `swapd ps`. Unknown fields are None, and `problem` has the reason."""

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


def ps(json: Json = False, timeout: TimeoutOption = TIMEOUT_S) -> None:
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
        console.print(ps_page(listed))
    else:
        console.print("no swapd of this user runs here; start one: swapd serve --budget 40GiB")


def _listed(daemon: RunningDaemon, timeout: float) -> DaemonEntry:
    folder = str(daemon.folder)
    if daemon.unreachable:
        return DaemonEntry(daemon.pid, folder, problem=daemon.unreachable)
    try:
        with connected(daemon.folder, "ps", timeout) as client:
            reply = client.status(timeout=timeout)
    except SwapdError as exc:
        return DaemonEntry(daemon.pid, folder, problem=str(exc))
    return DaemonEntry(
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


def ps_page(listed: list[DaemonEntry]) -> RenderableType:
    wrong = [Text(f"process {d.pid}: {plain(d.problem)}", "yellow") for d in listed if d.problem]
    return Group(_table(listed), *wrong)


def _table(listed: list[DaemonEntry]) -> Table:
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


#: Longer than the daemon's own --stop-timeout, which is 10 s by default.
STOP_S = 60.0
ASKED_S = 5.0
#: Pause between the two signals of --now: without a pause they could merge into one.
_APART_S = 0.2

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, though sessions are open")]
Wait = Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait for its end")]


def stop(
    endpoint: Endpoint = None,
    device: Device = None,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="Do not wait for leases: holders keep the memory that they have mapped"
        ),
    ] = False,
    yes: Yes = False,
    timeout: Wait = STOP_S,
) -> None:
    """Tell a daemon to stop (SIGTERM), and return when its process has ended.

    The daemon refuses waiting acquires, and waits for leases up to its --stop-timeout. No weights
    are lost: its clients keep them. On a terminal it asks first if sessions are open. Ends with
    status 1 if the daemon still runs after --timeout seconds.
    """
    folder = where(endpoint, device, ASKED_S)
    pid = process_of(folder)
    with OwnedFd(os.pidfd_open(pid)) as process:  # the number may be another's after the answer
        if not yes and sys.stdin.isatty():
            _confirm(folder)
        _end(process, now=now, timeout=timeout, what=f"the daemon at {folder} (process {pid})")
    console.print(f"stopped: {plain(str(folder))} (process {pid})")


def process_of(folder: Path) -> int:
    """Raises: NotRunning, Timeout."""
    with find(folder) as opened:
        sock, pid = open_lifeline(opened, ASKED_S)
        sock.close()
        if pid and is_stopped(pid):
            raise not_answering(opened, ASKED_S, pid)
    if not pid:
        raise NotRunning(
            f"the daemon at {folder} runs in another pid namespace, as a container has: give this "
            "command there"
        )
    return pid


def _confirm(folder: Path) -> None:
    try:
        with connected(folder, "stop", ASKED_S) as client:
            question = _open_sessions(client.status(timeout=ASKED_S))
    except SwapdError as exc:
        question = f"{exc}. Stop it all the same?"
    if question:
        typer.echo(f"{question} [y/N]: ", nl=False, err=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise typer.Abort


def _open_sessions(reply: Status) -> str:
    labels = [plain(s.label) for s in reply.sessions if not s.label.startswith(OWN_LABEL)]
    if not labels:
        return ""
    leases = sum(s.leases for s in reply.sessions)
    return (
        f"{', '.join(labels[:3])}{', ...' if len(labels) > 3 else ''}: "
        f"{counted(len(labels), 'open session')}, {counted(leases, 'lease')} held, "
        f"{reply.waiting} waiting. Stop the daemon?"
    )


def _end(process: OwnedFd, *, now: bool, timeout: float, what: str) -> None:
    give_up = time.monotonic() + timeout
    try:
        signal.pidfd_send_signal(process.fileno(), signal.SIGTERM)
        if now and not process.await_readable(min(_APART_S, timeout)):
            signal.pidfd_send_signal(process.fileno(), signal.SIGTERM)
        if not process.await_readable(min(1.0, timeout)):
            say_error(f"{what} stops; it may wait for leases until its --stop-timeout is over")
    except ProcessLookupError:
        return
    if not process.await_readable(max(0.0, give_up - time.monotonic())):
        raise Timeout(
            f"{what} has not ended in {timeout:g} s: leases are held, or its device hangs. Wait, "
            "or `swapd stop --now`, which waits for no lease"
        )


# --- swapd upgrade ----------------------------------------------------------------------


#: A check imports the installed version.
CHECK_S = 120.0
LOOK_S = 0.02
_WOULD_SERVE = re.compile(r"would serve (\S+), .*?, in (.+)")


def upgrade(endpoint: Endpoint = None, device: Device = None, timeout: Wait = STOP_S) -> None:
    """Let a daemon run the installed version of swapd, in its own process, while workers go on.

    First its command line is checked with that version: if it would not serve, or with another
    device or folder, nothing changes.
    Then its sessions end. Holders of leases compute on, and each worker's next call joins the new
    version, to which it hands its host copies. SIGUSR2 does the same without the check. Ends with
    status 1 if it does not serve after --timeout seconds.
    """
    folder = where(endpoint, device, ASKED_S)
    pid = process_of(folder)
    what = f"the daemon at {folder} (process {pid})"
    with OwnedFd(os.pidfd_open(pid)) as process:
        _refuse_the_unable(pid, what)
        _refuse_another_place(_check(pid, what), folder, what)
        began = time.monotonic()
        signal.pidfd_send_signal(process.fileno(), signal.SIGUSR2)
        reply = _served(folder, process, what, began, timeout)
    took = seconds(time.monotonic() - began)
    console.print(f"upgraded in {took}: {plain(what)} is swapd {plain(reply.version)}")


def _refuse_the_unable(pid: int, what: str) -> None:
    """Raise UserError if the daemon does not catch the signal, which would end it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if caught is None or not int(caught[1], 16) >> (signal.SIGUSR2 - 1) & 1:
        raise UserError(
            f"{what} cannot be upgraded in its place: it is too old, about to end, or part of "
            "another program. Nothing has changed; `swapd stop`, and start it again"
        )


def _check(pid: int, what: str) -> str:
    """Return what the installed version says that it would serve. Raises: UserError."""
    process = Path(f"/proc/{pid}")
    command = _words(process / "cmdline")
    variables = dict(pair.split("=", 1) for pair in _words(process / "environ") if "=" in pair)
    try:
        done = subprocess.run(
            [*command, "--check"],
            env=variables,
            cwd=process / "cwd",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHECK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise _unchecked(what, str(exc)) from exc
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise _unchecked(what, said[-1] if said else f"exit status {done.returncode}")
    return done.stdout.decode(errors="replace")


def _refuse_another_place(would: str, folder: Path, what: str) -> None:
    """Raise UserError if workers would not find it again, or could not join it."""
    if (found := _WOULD_SERVE.search(would)) is None:
        return
    device, there = found.groups()
    is_other = device_of(folder, ASKED_S) not in (device, None)
    if is_other or Path(there).resolve() != folder.resolve():
        raise UserError(
            f"{what} is not upgraded, and goes on: by its settings it would now serve {device} in "
            f"{there}, where its workers could not go on. Undo that change, or `swapd stop`, and "
            "start it again"
        )


def _words(path: Path) -> list[str]:
    return [os.fsdecode(word) for word in path.read_bytes().split(b"\0")[:-1]]


def _unchecked(what: str, why: str) -> UserError:
    return UserError(f"{what} is not upgraded, and goes on: its command fails now: {why}")


def _served(folder: Path, process: OwnedFd, what: str, began: float, timeout: float) -> Status:
    until = began + timeout
    while time.monotonic() < until:
        with suppress(SwapdError), connected(folder, "upgrade", ASKED_S) as client:
            reply = client.status(timeout=ASKED_S)
            if reply.uptime_s < time.monotonic() - began:
                return reply
        if process.await_readable(LOOK_S):
            raise NotRunning(
                f"{what} has ended: its own log tells why. No weights are lost, because its "
                "workers have them: start it again"
            )
    raise Timeout(f"{what} does not serve after {timeout:g} s: it may still wait for a copy")
