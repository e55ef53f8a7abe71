"""`swapd run FILE.toml` gives stages a daemon, an order and their output, and leaves nothing."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from swapd.run.file import Table
from tests.files import file_with

from .conftest import on_terminal, serve, start, swapd

EXAMPLE = Path(__file__).parents[2] / "deploy" / "stages" / "run.toml"
PROGRAM = Path(__file__).parents[1] / "programs" / "a_stage.py"
DAEMON = '[daemon]\ndevice = "host"\nbudget = "16MiB"\n'


@pytest.fixture(autouse=True)
def home(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of daemons without a named one; runs are recorded beside it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    return folder / "swapd" / "host"


def program(name: str, then: str, **more: object) -> str:
    """The stage NAME, which uses a component of the same name."""
    return stage(name, [sys.executable, str(PROGRAM), name, then], **more)


def stage(name: str, command: list[str], **more: object) -> str:
    lines = [f"{key} = {toml(value)}" for key, value in {"command": command, **more}.items()]
    return "\n".join([f"[stages.{name}]", *lines, ""])


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def made(*stages: str) -> Path:
        return file_with(tmp_path / "run.toml", DAEMON + "\n".join(stages))

    return made


@pytest.fixture
def started(file: Callable[..., Path]) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a run of these stages, and kills it if the test does not end it."""
    processes = []

    def run(*stages: str) -> "subprocess.Popen[str]":
        processes.append(process := start("run", file(*stages)))
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def line(process: "subprocess.Popen[str]", begin: str) -> str:
    """The rest of the next line of a stage, which must begin with `begin`."""
    return lines(process, begin)[0]


def lines(process: "subprocess.Popen[str]", *begins: str) -> list[str]:
    """The rests of the next lines: one begins with each of `begins`, in any order."""
    assert process.stdout is not None
    found = {}
    for _ in begins:
        read = process.stdout.readline()
        (begin,) = [one for one in begins if read.startswith(one)]
        found[begin] = read.removeprefix(begin).rstrip("\n")
    return [found[begin] for begin in begins]


def ended(*pids: int) -> Iterator[None]:
    """Advance once while they run, and again when they must have ended."""
    opened = {pid: os.pidfd_open(pid) for pid in pids}
    yield
    for pid, one in opened.items():
        poll = select.poll()
        poll.register(one, select.POLLIN)
        assert poll.poll(30_000), f"process {pid} of {pids} goes on"
        os.close(one)
    yield


# --- runs --------------------------------------------------------------------------------


def test_stages_share_a_daemon_and_are_told_apart_in_what_is_told_of_them(
    started: Callable[..., "subprocess.Popen[str]"], home: Path
) -> None:
    process = started(
        program("talker", "end", after=["thinker"]), program("thinker", "wait", ready="registered")
    )
    lines(process, "thinker | used ", "talker  | used ")
    assert process.stderr is not None
    while process.stderr.readline() != "swapd: talker ended with status 0\n":
        pass
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("thinker | SIGTERM\n", 7), err
    of_all, thinker, talker, last = err.splitlines()[-4:]
    assert of_all.startswith("swapd: host: 2 swaps, 24 MiB in and 0 B out; ")
    assert thinker.startswith("swapd: talker: 1 swap, 12 MiB in and 0 B out; ")
    assert thinker.endswith("; status 0")
    assert talker.startswith("swapd: thinker: 1 swap, 12 MiB in and 0 B out; ")
    assert talker.endswith("; status 7")
    assert "ended with status 7 after" in last
    assert "no swapd at" in swapd("status", "-e", home, status=1).stderr


def test_a_stage_that_dies_is_started_again_gets_its_lease_and_the_others_go_on(
    started: Callable[..., "subprocess.Popen[str]"],
) -> None:
    process = started(
        program("dies", "die once", restart="on-failure", backoff="10ms", after=["goes-on"]),
        program("goes-on", "wait", ready="registered"),
    )
    before, first = lines(process, "goes-on | used ", "dies    | used ")
    second = line(process, "dies    | used ")
    assert first != second
    assert Path(f"/proc/{before}").exists()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "goes-on | SIGINT\n" in out
    assert "dies ended with status 137 (SIGKILL): it starts again in 10 ms (retry 1)" in err
    assert "; status 0, 2 starts" in err


def test_the_first_stage_that_fails_ends_the_others(file: Callable[..., Path]) -> None:
    path = file(
        stage("fails", ["sh", "-c", "echo last words >&2; printf now; exit 3"], after=["waits"]),
        program("waits", "wait", ready="registered"),
    )
    done = swapd("run", path, status=3)
    told = [one for one in done.stdout.splitlines() if "used" not in one]
    assert told == ["fails | last words", "fails | now", "waits | SIGTERM"]
    assert "swapd: fails ended with status 3: the others are told to end" in done.stderr


def test_a_run_that_is_killed_leaves_neither_daemon_nor_stages(
    started: Callable[..., "subprocess.Popen[str]"],
) -> None:
    by_a_shell = "sleep 1000 & echo $!; wait"
    process = started(
        program("thinker", "wait", ready="registered"),
        stage("shell", ["sh", "-c", by_a_shell], after=["thinker"]),
    )
    assert process.stderr is not None
    daemon = process.stderr.readline().partition("(process ")[2].partition(")")[0]
    pids = lines(process, "thinker | used ", "shell   | ")
    watched = ended(int(daemon), *map(int, pids))
    next(watched)
    process.kill()
    next(watched)


def test_a_daemon_that_dies_meanwhile_is_named(
    started: Callable[..., "subprocess.Popen[str]"],
) -> None:
    process = started(program("thinker", "wait"))
    assert process.stderr is not None
    daemon = int(process.stderr.readline().partition("(process ")[2].partition(")")[0])
    line(process, "thinker | used ")
    os.kill(daemon, signal.SIGKILL)
    assert f"(process {daemon}) has ended with status -9" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert "the outcome on host is unknown" in err


def test_a_second_signal_kills_what_does_not_end_and_all_that_it_has_started(
    started: Callable[..., "subprocess.Popen[str]"],
) -> None:
    deaf = "trap '' TERM; sleep 1000 & echo $!; wait; wait"
    process = started(stage("deaf", ["sh", "-c", deaf]))
    watched = ended(int(line(process, "deaf | ")))
    next(watched)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    while "told to end; once more, and they are killed" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    next(watched)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 137
    assert "swapd: SIGTERM: all stages are killed" in err


def test_what_outlives_the_first_process_of_a_stage_is_told_to_end(
    started: Callable[..., "subprocess.Popen[str]"],
) -> None:
    leaves = "sleep 1000 & echo $!; read wait < fifo"
    process = started(
        stage("fifo", ["mkfifo", "fifo"], ready="ended"),
        stage("leaves", ["sh", "-c", leaves], after=["fifo"]),
    )
    watched = ended(int(line(process, "leaves | ")))
    next(watched)
    Path(str(process.args[-1])).with_name("fifo").write_text("\n")  # type: ignore[index]
    _, err = process.communicate(timeout=60)
    next(watched)
    assert process.returncode == 0, err


def test_what_leaves_the_group_of_a_stage_is_reaped_when_it_has_ended(
    started: Callable[..., "subprocess.Popen[str]"],
) -> None:
    leave = "setsid sleep 1000 >&- & echo $! | tee left"
    ends = f"""if True:
        import os, select, signal, subprocess
        pid = int(subprocess.check_output(["sh", "-c", {leave!r}]))
        left = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([left], [], [])
    """
    process = started(
        stage("leaves", [sys.executable, "-c", ends], ready="ended"),
        stage("looks", ["sh", "-c", "test ! -e /proc/$(cat left)"], after=["leaves"]),
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


def test_a_program_that_is_gone_when_it_is_to_start_has_failed(
    file: Callable[..., Path], tmp_path: Path
) -> None:
    (gone := tmp_path / "gone").write_text("#!/bin/sh\n")
    gone.chmod(0o700)
    path = file(
        stage("removes", ["rm", "gone"], ready="ended"),
        stage("gone", ["./gone"], after=["removes"]),
    )
    done = swapd("run", path, status=127)
    assert "swapd: gone: there is no command './gone'" in done.stderr


def test_a_reader_that_has_seen_enough_ends_the_run(
    started: Callable[..., "subprocess.Popen[str]"],
) -> None:
    process = started(stage("says", ["sh", "-c", "while echo more; do :; done"]))
    line(process, "says | more")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(60) == 143, err
    assert "the output of stages cannot be shown: Broken pipe" in err


def test_one_ctrl_c_that_ends_the_reader_too_lets_the_stages_finish(
    started: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    """As in `swapd run FILE | tee log`: the terminal signals both."""
    saves = "trap 'echo saving; sleep 1.5; touch saved; exit 0' INT; echo ready"
    saves += "; while :; do sleep 0.1; done"
    process = started(stage("saves", ["sh", "-c", saves]))
    line(process, "saves | ready")
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(60) == 0, err
    assert (tmp_path / "saved").exists()


def test_on_a_terminal_names_are_coloured_and_nothing_moves_the_cursor(
    file: Callable[..., Path],
) -> None:
    shown = on_terminal("run", file(stage("a", ["printf", "1\\r2\\r\\033[2Jdone\\n"])))
    assert "a | \\x1b[2Jdone\n" in shown
    assert "swapd: a ended with status 0\n" in shown


def test_the_example_of_the_page_runs() -> None:
    done = swapd("run", EXAMPLE)
    assert {"thinker", "talker ", "client "} == {one[:7] for one in done.stdout.splitlines()}
    assert "swapd: client ended with status 0: the others are told to end" in done.stderr
    (client,) = [one for one in done.stderr.splitlines() if one.startswith("swapd: client: ")]
    assert client.endswith("; status 0")


def test_the_page_has_every_key_of_a_stage_and_its_default() -> None:
    text = EXAMPLE.parent.with_name("README.md").read_text()
    for field in msgspec.structs.fields(Table):
        assert f"| `{field.name}` | " in text
        default = {1.0: "1s", 30.0: "30s", False: "false"}.get(field.default, field.default)
        if isinstance(default, str):
            assert f"| `{field.name}` | `{default}` |" in text


def test_stages_start_again_while_nobody_reads_what_they_write(
    started: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    again = "if test -e died; then echo again > fifo; else touch died; exit 1; fi"
    started(
        stage("floods", ["yes"]),
        stage("dies", ["sh", "-c", again], restart="on-failure", backoff="10ms"),
    )
    assert (tmp_path / "fifo").read_text() == "again\n"


# --- before the start --------------------------------------------------------------------


def test_a_dry_run_of_a_file_starts_nothing(file: Callable[..., Path], tmp_path: Path) -> None:
    path = file(
        stage("a", ["touch", "ran"], restart="on-failure", retries=2),
        stage("b", ["touch", "x y"], after=["a"], env={"N": "1 2"}),
    )
    (vllm := tmp_path / "vllm").write_text("#!/bin/sh\n")
    vllm.chmod(0o700)
    path.write_text(path.read_text() + stage("c", ["./vllm", "serve", "m"], ready="registered"))
    daemon, a, b, c = swapd("run", "--dry-run", path).stdout.splitlines()
    assert daemon.startswith("swapd serve --device host --budget 16777216 --runtime-dir ")
    assert daemon.endswith(f"# 16 MiB: budget of {path}")
    assert a == f"cd {tmp_path} && touch ran    # a, restart on-failure 2 times"
    assert b == f"cd {tmp_path} && N='1 2' touch 'x y'    # b, after a"
    assert c == (
        f"cd {tmp_path} && ./vllm serve m --worker-cls swapd_client.vllm.cpu.CPUWorker"
        "    # c, ready when registered"
    )
    assert not (tmp_path / "ran").exists()


def test_a_daemon_that_is_there_is_joined_with_its_own_settings_or_has_too_little(
    file: Callable[..., Path], home: Path
) -> None:
    home.mkdir(parents=True, mode=0o700)
    home.parent.chmod(0o700)
    daemon = serve(home, budget="12MiB")
    try:
        said = swapd("run", path := file(stage("a", ["true"])), status=1).stderr
        assert f'`swapd stop --endpoint {home}`, or give budget = "12MiB" in {path}' in said
        path.write_text(path.read_text().replace('"16MiB"', '"8MiB"\npatience = 1'))
        said = swapd("run", path).stderr
        assert f"swapd on host at {home} (joined)" in said
        assert f"it keeps its own settings: not patience of {path}" in said
        assert daemon.process.poll() is None
    finally:
        daemon.stop()


def test_its_daemon_uses_nothing_of_the_unit_that_the_run_is_in(
    file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the daemon stored there would come back to the run, which cannot take it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unit:
        unit.bind(path := str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        monkeypatch.setenv("FDSTORE", "512")
        swapd("run", file(program("a", "")))
        with pytest.raises(BlockingIOError):
            unit.recv(1, socket.MSG_DONTWAIT)


def test_a_bad_file_is_one_clear_line_and_nothing_is_started(
    file: Callable[..., Path], tmp_path: Path
) -> None:
    path = file(stage("a", ["touch", "ran"]), stage("b", ["true"], after=["c"]))
    said = swapd("run", path, status=1).stderr
    assert said == f'swapd: {path}: stages.b.after: there is no stage "c"; there are: a, b\n'
    said = swapd("run", "--budget", "1GiB", path, status=1).stderr
    assert f"{path}: --budget is for a single command: write it into [daemon] of the file" in said
    said = swapd("run", path, "more", status=1).stderr
    assert "no word may follow a file of stages: more" in said
    assert not (tmp_path / "ran").exists()


def test_each_gpu_has_its_daemon(tmp_path: Path) -> None:
    tables = [f'[[daemon]]\ndevice = "cuda:{n}"\nbudget = "{n}GiB"\n' for n in (62, 63)]
    (path := tmp_path / "run.toml").write_text("".join(tables) + stage("a", ["true"]))
    first, second, _ = swapd("run", "-n", path).stdout.splitlines()
    assert first.startswith(f"swapd serve --device cuda:62 --budget {62 << 30} --runtime-dir ")
    assert second.startswith(f"swapd serve --device cuda:63 --budget {63 << 30} --runtime-dir ")
