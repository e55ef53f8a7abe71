"""A measured command ends on request, with all its processes."""

import os
import select
import signal
from pathlib import Path

import pytest

from swapd.run import measured
from swapd.run.child import CannotRun
from swapd.run.compared import Round
from swapd.run.measured import Until
from swapd.run.sampling import Sampler, descendants


def run(script: str, until: Until) -> Round:
    return measured.run(["sh", "-c", script], dict(os.environ), until, Sampler([]))  # noqa: TID251


def gone(pid: int) -> bool:
    """Whether a killed process ends; its parent may not have reaped it yet."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 60)[0])
    finally:
        os.close(fd)


def test_one_that_does_not_end_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "ENDS_IN_S", 0.05)
    (waits := tmp_path / "waits").write_text(
        f"#!/bin/sh\ntrap '' TERM\necho $$ > {tmp_path}/made; mv {tmp_path}/made {tmp_path}/pid\n"
        "while :; do sleep 1000; done\n"
    )
    waits.chmod(0o755)
    load = ("sh", "-c", f"until [ -e {tmp_path}/pid ]; do :; done")
    ran = run(f"trap '' TERM; {waits} & while :; do wait; done", Until(load))
    assert ran.status == 128 + signal.SIGKILL
    assert "within 0 s of SIGTERM, and was killed" in ran.why
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_load_that_cannot_be_run_ends_the_command() -> None:
    before = descendants(os.getpid())
    with pytest.raises(CannotRun, match="there is no command 'no-such-load'"):
        run("exec sleep 1000", Until(("no-such-load",)))
    assert set(descendants(os.getpid())) <= set(before)


def test_a_signal_that_is_ignored_here_is_not_passed_on() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ran = run("kill -HUP $PPID; exit 3", Until())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (ran.status, ran.signal) == (3, None)
