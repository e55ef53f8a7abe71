"""`swapd upgrade`: the installed version of swapd takes the place of one that runs."""

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import swapd_client
from swapd.cli.common import console
from swapd.cli.daemons import ASKED_S, STOP_S, Wait, ends_within, process_of
from swapd.cli.target import OWN_LABEL, Device, Endpoint, where
from swapd.shared.errors import UserError
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Status
from swapd.shared.text import plain
from swapd.shared.units import seconds
from swapd_client.errors import NotRunning, SwapdError, Timeout

#: Longest time for a check, which imports the installed version.
CHECK_S = 120.0
#: Pause between two looks for the next version.
LOOK_S = 0.02


def upgrade(endpoint: Endpoint = None, device: Device = None, timeout: Wait = STOP_S) -> None:
    """Let a daemon run the installed version of swapd, in its own process, while workers go on.

    First its command line is checked with that version: if it would not serve, nothing changes.
    Then its sessions end. Holders of leases compute on, and each worker's next call joins
    the new version, to which it hands its host copies. SIGUSR2 does the same without the check.
    Ends with status 1 if it does not serve after --timeout seconds.
    """
    folder = where(endpoint, device, ASKED_S)
    pid = process_of(folder)
    what = f"the daemon at {folder} (process {pid})"
    with OwnedFd(os.pidfd_open(pid)) as process:
        _refuse_the_unable(pid, what)
        _check(pid, what)
        began = time.monotonic()
        signal.pidfd_send_signal(process.fileno(), signal.SIGUSR2)
        reply = _served(folder, process, what, began, timeout)
    took = seconds(time.monotonic() - began)
    console.print(f"upgraded in {took}: {plain(what)} is swapd {plain(reply.version)}")


def _refuse_the_unable(pid: int, what: str) -> None:
    """The signal would end a daemon that does not expect it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if caught is None or not int(caught[1], 16) >> (signal.SIGUSR2 - 1) & 1:
        raise UserError(
            f"{what} cannot be upgraded in its place: it is too old, about to end, or part of "
            "another program. Nothing has changed; `swapd stop`, and start it again"
        )


def _check(pid: int, what: str) -> None:
    """Run the daemon's command, in its folder and environment, with --check."""
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


def _words(path: Path) -> list[str]:
    return [os.fsdecode(word) for word in path.read_bytes().split(b"\0")[:-1]]


def _unchecked(what: str, why: str) -> UserError:
    return UserError(f"{what} is not upgraded, and goes on: its command fails now: {why}")


def _served(folder: Path, process: OwnedFd, what: str, began: float, timeout: float) -> Status:
    """The first answer of the next version."""
    until = began + timeout
    while time.monotonic() < until:
        with suppress(SwapdError):
            label = f"{OWN_LABEL}upgrade"
            with swapd_client.connect(folder, label=label, timeout=ASKED_S, reconnect=0) as client:
                reply = client.status(timeout=ASKED_S)
                if reply.uptime_s < time.monotonic() - began:
                    return reply
        if ends_within(process, LOOK_S):
            raise NotRunning(
                f"{what} has ended: its own log tells why. No weights are lost, because its "
                "workers have them: start it again"
            )
    raise Timeout(f"{what} does not serve after {timeout:g} s: it may still wait for a copy")
