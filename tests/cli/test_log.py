"""`swapd log` reads a file, and follows it as it grows, without a missing or a doubled record."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from tests.processes import line_of

from .conftest import (
    Running,
    ended,
    environment,
    json_lines,
    on_terminal,
    serve,
    served,
    start,
    swapd,
)


def _swap(daemon: Running) -> None:
    """Two components that do not fit together take turns, twice."""
    client = daemon.client("worker", thinker=12, talker=8)
    for name in ("thinker", "thinker", "talker", "thinker"):
        client.acquire(name).release()
    client.status()  # after this thread's releases, so the daemon has read them
    client.close()


def _run(folder: Path) -> Running:
    """A daemon that swapped, and has ended."""
    daemon = serve(folder)
    _swap(daemon)
    daemon.stop()
    return daemon


def test_json_is_the_records_as_they_are(folder: Path) -> None:
    swap_log = _run(folder).swap_log
    done = swapd("log", "--json", "--file", swap_log)
    assert done.stdout == swap_log.read_text()


@pytest.mark.parametrize("shown", [on_terminal, lambda *words: swapd(*words).stdout])
def test_the_swaps_on_a_terminal_as_in_a_pipe(folder: Path, shown: Callable[..., str]) -> None:
    text = shown("log", "--file", _run(folder).swap_log)
    assert "evict" in text
    assert "to make room for talker, asked by worker (session 1)" in text
    assert "MiB" in text
    assert "B/s" in text
    assert " hit " not in text
    assert "release" not in text


def test_all_shows_hits_and_releases(folder: Path) -> None:
    text = swapd("log", "--all", "--file", _run(folder).swap_log).stdout
    words = [line.split()[1] for line in text.splitlines()]
    assert words.count("hit") == 1
    assert words.count("release") >= 3


def test_lines_are_those_shown_last(folder: Path) -> None:
    swap_log = _run(folder).swap_log
    day, *text = swapd("log", "--file", swap_log).stdout.splitlines()
    last = swapd("log", "-n", 3, "--file", swap_log).stdout.splitlines()
    assert last == [day, *text[-3:]]
    raw = swap_log.read_text().splitlines()
    assert swapd("log", "--json", "-n", 2, "--file", swap_log).stdout.splitlines() == raw[-2:]
    assert swapd("log", "-n", 0, "--file", swap_log).stdout == ""


@pytest.mark.parametrize("name", [[], ["talker"]])
def test_each_day_stands_once_above_its_lines(folder: Path, name: list[str]) -> None:
    swap_log = _run(folder).swap_log
    today, *rest = swapd("log", *name, "--file", swap_log).stdout.splitlines()
    if name:
        today, *rest = rest
    zone = datetime.now().astimezone().isoformat()[-6:]
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d UTC{re.escape(zone)}", today)
    assert all(re.match(r"(\d\d:){2}\d\d\.\d{3}  | +\.\.\. ", each) for each in rest)
    records = [msgspec.json.decode(raw) for raw in swap_log.read_bytes().splitlines()]
    middle = len(records) // 2
    for record in records[middle:]:
        record["t"] += 86400.0
    swap_log.write_bytes(msgspec.json.Encoder().encode_lines(records))
    again = swapd("log", *name, "--file", swap_log).stdout.splitlines()
    assert sum(bool(re.match(r"\d{4}-", each)) for each in again) == 2


def test_the_last_run_only_unless_all_are_asked_for(folder: Path) -> None:
    _run(folder)
    one = (folder / "swap-log.jsonl").read_text()
    swap_log = _run(folder).swap_log
    assert swapd("log", "--json", "--file", swap_log).stdout == swap_log.read_text()[len(one) :]
    every = swapd("log", "--all-runs", "--json", "--file", swap_log).stdout
    assert every == swap_log.read_text()
    text = swapd("log", "--all-runs", "--file", swap_log).stdout
    assert text.count(" start ") == 2


def test_a_log_in_another_schema_is_one_clear_line(folder: Path) -> None:
    swap_log = _run(folder).swap_log
    whole = swap_log.read_bytes()
    swap_log.write_bytes(whole.replace(b'"schema":1', b'"schema":7') + whole)
    assert swapd("log", "--json", "--file", swap_log).stdout.encode() == whole
    done = swapd("log", "--all-runs", "--json", "--file", swap_log)
    assert done.stdout.encode() == whole
    count = whole.count(b"\n")
    assert done.stderr == (
        f"swapd: left out: {count} records, which another version of swapd wrote\n"
    )
    swap_log.write_bytes(whole.replace(b'"schema":1', b'"schema":7'))
    for command in ("log", "log"):
        name = ["talker"] if command == "log" else []
        done = swapd(command, *name, "--file", swap_log, status=1)
        (said,) = done.stderr.splitlines()
        assert said.startswith("swapd: this swap log was written in schema 7")
        assert done.stdout == ""


@contextmanager
def _following(daemon: Running, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    process = start("log", "-f", "-e", daemon.folder, *flags)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _read_until(process: "subprocess.Popen[str]", words: str) -> str:
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if words in line:
            return read
    raise AssertionError(f"{words!r} never came:\n{read}")


def test_following_misses_nothing_and_doubles_nothing(daemon: Running) -> None:
    _swap(daemon)
    with _following(daemon, "--json") as process:
        shown = _read_until(process, '"label":"swapd log"')
        _swap(daemon)
        daemon.stop()
        rest, err = process.communicate(timeout=60)
    assert shown + rest == daemon.swap_log.read_text()
    assert process.returncode == 0
    assert err == "swapd: the daemon has stopped, so its log ends here\n"


def test_following_shows_what_happens_as_it_happens(daemon: Running) -> None:
    with _following(daemon) as process:
        _read_until(process, "start")
        _swap(daemon)
        assert "evict" in _read_until(process, "gone")


def test_a_daemon_that_dies_ends_it_with_a_clear_line(daemon: Running) -> None:
    with _following(daemon, "--json") as process:
        _read_until(process, '"label":"swapd log"')
        daemon.stop(signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "swapd: the daemon is gone without a goodbye, so its log ends here\n"


def test_ctrl_c_ends_it_quietly(daemon: Running) -> None:
    with _following(daemon, "--json") as process:
        _read_until(process, '"label":"swapd log"')
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == ""


def test_no_daemon_but_a_log_says_how_to_read_it(folder: Path) -> None:
    swap_log = _run(folder).swap_log
    assert f"--file {swap_log}" in swapd("log", "-e", folder, status=1).stderr


@pytest.mark.parametrize("command", ["log", "trace", "replay"])
def test_a_pipe_is_no_log_and_is_not_waited_for(tmp_path: Path, command: str) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    said = swapd(command, "--file", pipe, status=1).stderr
    assert said.startswith(f"swapd: {pipe} is no regular file, so no swap log: ")


@pytest.mark.parametrize("writable", [True, False])
def test_a_daemon_without_named_folders_keeps_its_log_where_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    run, state = Path(tempfile.mkdtemp(prefix="sw-")), tmp_path / "state"
    run.chmod(0o700)
    if not writable:
        state.write_text("no folder")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    process = start("serve", "--budget", "8MiB")
    assert line_of(process)
    folder = run / "swapd/host"
    found = (state / "swapd/host" if writable else folder) / "swap-log.jsonl"
    assert json_lines(swapd("log", "--json", "-e", folder).stdout)[0]["type"] == "start"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert found.exists()
    assert ("the swap log is in" in err) is not writable
    assert f"--file {found}" in swapd("log", "-e", folder, status=1).stderr
    shutil.rmtree(run)


def test_two_daemons_with_one_state_folder_do_not_write_one_log(
    folder: Path, tmp_path: Path
) -> None:
    """As where only one of them has $XDG_RUNTIME_DIR, or two machines share a home."""
    daemons = []
    for name in ("first", "second"):
        (run := folder / name).mkdir(mode=0o700, parents=True)
        own = environment(XDG_RUNTIME_DIR=str(run), XDG_STATE_HOME=str(tmp_path))
        daemons.append(served(run / "swapd/host", start("serve", "--budget", "8MiB", env=own)))
    for daemon in daemons:
        daemon.client("worker", thinker=4).close()
    shown = [swapd("log", "--json", "-e", daemon.folder).stdout for daemon in daemons]
    for daemon in daemons:
        daemon.stop()
    assert (tmp_path / "swapd/host/swap-log.jsonl").exists()
    assert daemons[1].swap_log.exists()
    for records in map(json_lines, shown):
        assert [record["seq"] for record in records] == list(range(1, len(records) + 1))


def test_a_reader_that_has_seen_enough_ends_it_quietly(folder: Path) -> None:
    process = start("log", "--file", _run(folder).swap_log, bufsize=1)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 1


#: A daemon whose wall clock was an hour behind at its start, and has been set since.
_BEHIND = """
import time
now = time.time
time.time = lambda: now() - 3600
from swapd.cli import main
main()
"""


def test_a_time_ago_is_as_long_ago_though_the_wall_clock_was_set(
    folder: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _BEHIND, "serve", "--runtime-dir", str(folder)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [*command, "--budget", "16MiB"], env=environment(), stdout=pipe, stderr=pipe, text=True
    )
    with ended(served(folder, process)) as daemon:
        _swap(daemon)
        asked = ("-e", folder, "--since", "10m")
        assert "evict " in swapd("log", *asked).stdout
        swapd("trace", *asked, "-o", tmp_path / "trace.json")
        follower = start("log", "-f", *asked)
        assert any("evict " in line_of(follower) for _ in range(20))
        follower.kill()
        follower.communicate()
        assert swapd("log", "-e", folder, "--since", "0s").stdout == ""
    traced = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event["ph"] == "X" for event in traced)
