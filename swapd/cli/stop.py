"""`swapd stop`: tell a daemon to stop, and wait until it has ended."""

import os
import select
import signal
import sys
import time
from typing import Annotated

import typer

import swapd_client
from swapd.cli.common import OWN_LABEL, Endpoint, console, say_error
from swapd.cli.target import Device, where
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import StatusReply
from swapd.shared.system import is_stopped
from swapd.shared.text import plain
from swapd_client.errors import NotAnswering, SwapdError
from swapd_client.session.endpoint import find, not_answering, open_lifeline

#: Longer than the daemon's own --stop-timeout, which is 10 s by default.
STOP_S = 60.0
#: Seconds that a daemon has to answer before the question.
ASKED_S = 5.0
#: Pause between the two signals of --now: without it they could merge into one.
_APART_S = 0.2

Now = Annotated[
    bool,
    typer.Option(
        "--now", help="Do not wait for leases: holders keep the memory that they have mapped"
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, though sessions are open")]
Wait = Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait for its end")]


def stop(
    endpoint: Endpoint = None,
    device: Device = None,
    now: Now = False,
    yes: Yes = False,
    timeout: Wait = STOP_S,
) -> None:
    """Tell a daemon to stop (SIGTERM), and return when its process has ended.

    The daemon refuses waiting acquires, and waits for leases up to its --stop-timeout. No weights
    are lost: its clients keep them. On a terminal it asks first if sessions are open. Ends with
    status 1 if the daemon still runs after --timeout seconds.
    """
    folder = where(endpoint, device, ASKED_S)
    with find(folder) as opened:
        sock, pid = open_lifeline(opened, ASKED_S)
        sock.close()
        if pid and is_stopped(pid):
            raise not_answering(opened, ASKED_S, pid)
    if not pid:
        raise swapd_client.NotRunning(
            f"the daemon at {folder} runs in another pid namespace, as a container has: stop it "
            "there"
        )
    if not yes and sys.stdin.isatty():
        _confirm(str(folder))
    with OwnedFd(os.pidfd_open(pid)) as process:
        _end(process, now=now, timeout=timeout, what=f"the daemon at {folder} (process {pid})")
    console.print(f"stopped: {plain(str(folder))} (process {pid})")


def _confirm(folder: str) -> None:
    try:
        with swapd_client.connect(folder, label=f"{OWN_LABEL}stop", timeout=ASKED_S) as client:
            question = _open_sessions(client.status(timeout=ASKED_S))
    except SwapdError as exc:
        question = f"{exc}. Stop it all the same?"
    if question:
        typer.confirm(question, abort=True, err=True)


def _open_sessions(reply: StatusReply) -> str:
    """The question before ending these sessions; "" if there are none."""
    labels = [plain(s.label) for s in reply.sessions if not s.label.startswith(OWN_LABEL)]
    if not labels:
        return ""
    leases = sum(s.leases for s in reply.sessions)
    return (
        f"{', '.join(labels[:3])}{', ...' if len(labels) > 3 else ''}: {len(labels)} open "
        f"sessions, {leases} leases held, {reply.waiting} waiting. Stop the daemon?"
    )


def _end(process: OwnedFd, *, now: bool, timeout: float, what: str) -> None:
    give_up = time.monotonic() + timeout
    try:
        signal.pidfd_send_signal(process.fileno(), signal.SIGTERM)
        if now and not _ended(process, min(_APART_S, timeout)):
            signal.pidfd_send_signal(process.fileno(), signal.SIGTERM)
        if not _ended(process, min(1.0, timeout)):
            say_error(f"{what} stops; it may wait for leases until its --stop-timeout is over")
    except ProcessLookupError:
        return
    if not _ended(process, max(0.0, give_up - time.monotonic())):
        raise NotAnswering(
            f"{what} has not ended in {timeout:g} s: leases are held, or its device hangs. Wait, "
            "or `swapd stop --now`, which waits for no lease"
        )


def _ended(process: OwnedFd, within_s: float) -> bool:
    poll = select.poll()
    poll.register(process.fileno(), select.POLLIN)
    return bool(poll.poll(within_s * 1000))
