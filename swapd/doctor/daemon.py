"""Checks a running daemon by its status and its files. Changes nothing."""

import os
from pathlib import Path

from swapd import __version__
from swapd.device import DeviceError
from swapd.device.host import available_bytes
from swapd.doctor.host import Check, checked_that
from swapd.shared.protocol import Status
from swapd.shared.text import counted, plain
from swapd.shared.units import size
from swapd_client import NotRunning, SwapdError, Timeout, connect

OWN_LABEL = "swapd doctor"
#: Free GPU memory for contexts, graphs and activations of workers.
FREE_WANTED = 1 << 30
#: Bytes for the swap log: the current file and the old one.
LOG_WANTED = 2 * (64 << 20)


def examine(folder: Path, timeout: float) -> list[Check]:
    try:
        with connect(folder, label=OWN_LABEL, timeout=timeout, reconnect=0) as client:
            status = client.status(timeout=timeout)
    except NotRunning:
        return [Check("daemon", "ok", "none runs there", "start one: swapd serve")]
    except Timeout as exc:
        found, _, advice = str(exc).partition(". ")
        return [Check("daemon", "fail", found, advice)]
    except SwapdError as exc:
        return [Check("daemon", "fail", str(exc), "stop it, and start it again")]
    return of_status(status)


def of_status(status: Status) -> list[Check]:
    return [
        _versions(status),
        _budget(status),
        *(_note(note) for note in status.notes),
        _swap_log(Path(status.swap_log)),
        _sessions(status),
    ]


def _versions(status: Status) -> Check:
    components = counted(len(status.components), "component")
    found = f"swapd {status.version} serves {status.device}, {components}"
    advice = f"this is swapd {__version__}: restart the daemon with the version that is installed"
    return checked_that(status.version == __version__, "daemon", found, advice)


def _budget(status: Status) -> Check:
    name, budget = "daemon budget", status.budget_bytes
    if status.device != "host":
        found = f"{size(budget)}; {size(status.device_free_bytes)} of {status.device} are free"
        advice = "little is left for contexts and activations of workers: lower --budget"
        return checked_that(status.device_free_bytes >= FREE_WANTED, name, found, advice)
    try:
        free = available_bytes()
    except DeviceError as exc:
        return Check(name, "warn", f"{size(budget)}; {exc}", "close some programs, and try again")
    copies = f"host copies have {size(status.host_copy_bytes)}"
    found = f"{size(budget)}; {copies}, and {size(free)} of host memory are available"
    advice = "the host copies of one budget do not fit into host memory: lower --budget"
    return checked_that(status.host_copy_bytes + free >= budget, name, found, advice)


def _note(note: str) -> Check:
    if "of host copies are pinned" in note:
        advice = "raise --pin-limit, and `ulimit -l` (LimitMEMLOCK in a unit), and restart it"
        return Check("daemon pinning", "warn", plain(note), advice)
    return Check("daemon note", "warn", plain(note))


def _swap_log(path: Path) -> Check:
    name, elsewhere = "swap log", "records are dropped: fix it, or restart with another --swap-log"
    try:
        room = os.statvfs(path.parent)
    except OSError as exc:
        return Check(name, "warn", f"{path}: {exc.strerror}", elsewhere)
    free = room.f_bavail * room.f_frsize
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return Check(name, "warn", f"{path} cannot be written", elsewhere)
    advice = "it may stop: free some, lower --swap-log-size, or use another --swap-log"
    return checked_that(free >= LOG_WANTED, name, f"{path}, {size(free)} left on its disk", advice)


def _sessions(status: Status) -> Check:
    others = [s for s in status.sessions if s.label != OWN_LABEL]
    found = f"{counted(len(others), 'session')}; requests that wait: {status.waiting}"
    deaf = [f"{plain(s.label)} (session {s.session})" for s in others if s.unread]
    if deaf:
        advice = "look at these processes: a session that reads nothing for long is ended"
        return Check("sessions", "warn", f"{', '.join(deaf)}: does not read its messages", advice)
    return Check("sessions", "ok", found)
