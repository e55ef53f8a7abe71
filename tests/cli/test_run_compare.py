"""`swapd run --compare` runs both ways, reports both and their failures, writes good settings."""

import json
import os
import signal
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from swapd.cli.comparisons import Comparison, Round, Side, better, rows
from swapd.run import ready
from swapd.run.commands import command_of
from swapd.run.outcome import Outcome
from swapd.run.ready import ServerAddress
from tests.processes import line_of

from .conftest import environment, serve, start, swapd
from .test_run import PROGRAM, home

MIB = 1 << 20
PROGRAMS = PROGRAM.parent
__all__ = ["home"]


@pytest.fixture
def either(tmp_path: Path) -> Path:
    """A command that uses swapd if $SWAPD_ENDPOINT is set."""
    (made := tmp_path / "either").write_text(
        f'#!/bin/sh\n[ -z "$SWAPD_ENDPOINT" ] || exec {sys.executable} {PROGRAM} end\necho alone\n'
    )
    made.chmod(0o755)
    return made


@pytest.fixture
def vllm(tmp_path: Path, folder: Path) -> list[object]:
    """The command line of a program that plays vLLM."""
    (made := tmp_path / "vllm").write_text(
        f'#!/bin/sh\nexec {sys.executable} {PROGRAMS / "serves.py"} "$@"\n'
    )
    made.chmod(made.stat().st_mode | stat.S_IXUSR)
    (model := tmp_path / "Model").mkdir()
    tensor = {"dtype": "U8", "shape": [8 * MIB], "data_offsets": [0, 8 * MIB]}
    header = json.dumps({"w": tensor}).encode()
    (model / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(model / "m.safetensors", 8 + len(header) + 8 * MIB)
    return [made, "serve", model, "--uds", folder / "s"]


def cells(table: str) -> dict[str, list[str]]:
    """The cells of a table, by the name of their line."""
    split = [line.split("  ") for line in table.splitlines()]
    return {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in split}


# --- without and with --------------------------------------------------------------------


def test_a_command_is_run_without_swapd_and_with_it_and_both_are_told(
    either: Path, tmp_path: Path
) -> None:
    done = swapd("run", "--compare", "--rounds", "2", "--budget", "16MiB", "--", either)
    assert done.stdout.startswith("alone\nused\nalone\nused\n")
    found = cells(done.stdout)
    assert found["copied in"] == ["36 MiB"]
    assert found["swaps"] == ["3"]
    assert found["arena, at most"] == ["12 MiB"]
    assert found["device memory, at most"] == ["not measured", "not measured"]
    assert len(found["whole time"]) == 3, "two and a ratio"
    assert "MiB" in found["host memory, at most"][1]
    assert "medians of 2 rounds" in done.stdout
    (path,) = (tmp_path / "swapd" / "comparisons").glob("*.json")
    assert len(json.loads(path.read_bytes())["sides"][1]["rounds"]) == 2
    listed = swapd("run", "--list").stdout
    assert listed.startswith(f"{path.stem}  status 0  {either}\n")
    assert cells(listed)["whole time"] == found["whole time"]
    path.write_text('{"version": 1, "command": [')
    said = swapd("run", "--list")
    assert (said.stdout, f"{path} cannot be read" in said.stderr) == ("", True)
    path.unlink()
    assert "nothing was compared yet" in swapd("run", "--list").stdout


def test_a_program_that_connects_is_run_in_both_ways_whatever_the_environment_says() -> None:
    words = ("run", "--compare", "--budget", "16MiB", "--", sys.executable, str(PROGRAM), "end")
    done = swapd(*words, env=environment(SWAPD_DISABLE="1"))
    assert done.stdout[:10] == "used\nused\n", done.stderr
    assert done.stderr.count("without swapd, as $SWAPD_DISABLE says") == 1, "the first side alone"
    found = cells(done.stdout)
    assert (found["swaps"], len(found["whole time"])) == (["3"], 3)
    shown = swapd("run", "-n", *words[1:]).stdout.splitlines()
    assert shown[1].startswith("SWAPD_DISABLE=1 SWAPD_DEVICE=host "), shown
    assert shown[-1].startswith(sys.executable), shown


def test_a_side_that_fails_is_said_and_the_other_is_run_all_the_same(tmp_path: Path) -> None:
    fails = 'test -n "$SWAPD_ENDPOINT" || exit 3'
    done = swapd(
        *("run", "--compare", "--rounds", "9", "--budget", "8MiB", "--", "sh", "-c", fails),
        status=3,
    )
    assert "without swapd: failed with status 3" in done.stderr
    assert done.stderr.count("swapd: 2 of 2: with swapd") == 1, "no other round after that"
    found = cells(done.stdout)
    assert found["whole time"][0] == "failed"
    assert len(found["whole time"]) == 2
    (path := tmp_path / "large.toml").write_text('chunk = "4MiB"\nbudget = "2MiB"\n')
    none = swapd("run", "--compare", "--config", path, "--", "true", status=1)
    assert "with swapd: failed with status 1: no daemon was started: " in none.stderr
    assert cells(none.stdout)["whole time"][1] == "failed"
    strange = ("sh", "-c", "exit 4", os.fsdecode(b"\xff"))
    done = swapd("run", "--compare", "--budget", "8MiB", "--", *strange, status=4)
    assert ".json: `swapd run --list` shows it" in done.stderr
    assert "'exit 4' '\\udcff'\n" in swapd("run", "--list").stdout
    gone = swapd("run", "--compare", "--", "no-such-command", status=127).stderr
    assert gone.splitlines()[-1] == (
        "swapd: there is no command 'no-such-command': install it, or write its whole path"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_no_other_is_started(
    number: signal.Signals, home: Path
) -> None:
    waits = "trap 'exit 7' INT TERM; echo runs; while :; do sleep 0.1; done"
    process = start("run", "--compare", "--set", "budget=8MiB", "--", "sh", "-c", waits)
    assert line_of(process) == "runs\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", 7), err
    assert "2 of 2" not in err
    assert "no swapd at" in swapd("status", "-e", home, status=1).stderr


# --- servers, and better settings --------------------------------------------------------


def test_a_server_ends_with_its_load_and_the_better_settings_are_in_a_file(
    vllm: list[object], tmp_path: Path, folder: Path
) -> None:
    load = f"test -S {folder / 's'}"
    words = ("run", "--compare", "--set", "budget=32MiB", "--until", load, "--budget", "16MiB")
    done = swapd(*words, "--", *vllm)
    found = cells(done.stdout)
    assert found[""] == ["budget=16MiB", "budget=32MiB", "ratio"]
    assert found["swaps"] == ["1", "1", "1"]
    assert len(found["the load"]) == len(found["until it was ready"]) == 3
    (path,) = (tmp_path / "swapd" / "comparisons").glob("*.toml")
    assert f"swapd: {path}: the better settings (" in done.stderr
    budget = tomllib.loads(path.read_text())["budget"]
    assert budget in ("16MiB", "32MiB")
    used = swapd("run", "-n", "--config", path, "--", *vllm)
    assert f"--budget {int(budget[:2]) * MIB} " in used.stdout
    assert used.stderr == ""
    assert f"the better settings: {path}\n" in swapd("run", "--list").stdout


def test_a_load_that_fails_fails_its_side_and_a_server_that_ends_early_does(
    vllm: list[object], folder: Path
) -> None:
    done = swapd("run", "--compare", "--until", "sh -c 'exit 5'", "--", *vllm, status=5)
    assert "without swapd: failed with status 5: sh ended with status 5" in done.stderr
    done = swapd("run", "--compare", "--until", "no-such-load", "--", *vllm, status=127)
    assert "load: there is no command 'no-such-load'" in done.stderr
    assert not (folder / "s").exists(), "the server has ended"
    words = ("run", "--compare", "--for", "1h", "--ready", folder / "x", "--", "true")
    done = swapd(*words, status=1)
    assert "it ended by itself, before it was told to" in done.stderr


def test_where_no_log_can_be_written_the_other_side_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (no_folder := tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(no_folder))
    done = swapd("run", "--compare", "--budget", "8MiB", "--", "true", status=1)
    assert "Not a directory; $XDG_STATE_HOME names another place" in done.stderr
    assert cells(done.stdout)["whole time"][1:] == ["failed"]


#: A server that SIGTERM does not end.
DEAF = """
import os, signal, socket, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(sys.argv[1])
    listening.listen()
    print("pid", os.getpid(), flush=True)
    signal.pause()
"""
#: `swapd`, which gives a server less time to end.
HURRIED = """
from swapd.cli import main, run_compare
run_compare._ENDS_IN_S = 0.05
main()
"""


def test_a_server_that_does_not_end_is_killed_and_its_side_has_failed(folder: Path) -> None:
    words = ("--until", "true", "--ready", folder / "s", "--budget", "8MiB", "--")
    deaf = (sys.executable, "-c", DEAF, folder / "s")
    run = (sys.executable, "-c", HURRIED, "run", "--compare", *words, *deaf)
    done = subprocess.run(
        [str(word) for word in run], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 137, done.stderr
    said = "without swapd: failed with status 137: it did not end within 0 s of SIGTERM, and was"
    assert said in done.stderr
    (first, _) = [line.split()[-1] for line in done.stdout.splitlines() if "pid" in line]
    assert not Path(f"/proc/{first}").exists()


# --- refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--compare", "--", "vllm", "serve", "m"), "a server does not end by itself"),
        (("--compare", "--until", "true", "--", "true"), "give --ready, a port"),
        (("--compare", "--until", "a", "--for", "1", "--", "true"), "not both"),
        (("--compare", "--until", "'", "--", "true"), "No closing quotation"),
        (("--compare", "--ready", "99999", "--for", "1", "--", "true"), "--ready 99999: write a"),
        (
            ("--compare", "--ready", "https://h/", "--for", "1", "--", "true"),
            "--ready https://h/: write a port, HOST:PORT, http://HOST:PORT/PAGE or the path",
        ),
        (("--compare", "--ready", "a..b:80", "--for", "1", "--", "true"), "--ready a..b:80: write"),
        (
            ("--compare", "--for", "1", "--", "vllm", "serve", "m", "--port", "70000"),
            "--port 70000: it is no port: write a number from 1 to 65535",
        ),
        (("--compare", "--set", "budget", "--", "true"), "--set budget: write NAME=VALUE"),
        (("--compare", "--set", "http=1:2", "--", "true"), "a NAME of budget, chunk"),
        (("--compare", "--set", "chunk=3MB3", "--", "true"), "'3MB3' is not a size"),
        (("--set", "chnk=2MiB", "--", "true"), "did you mean chunk?"),
        (
            ("--compare", "--budget", "8MiB", "--set", "budget=8MiB", "--", "true"),
            "have that already",
        ),
        (
            ("--compare", "--for", "1", "--", "vllm", "serve", "m", "--worker-cls=swapd_client.x"),
            "swapd_client.x needs swapd",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    assert said in swapd("run", *words, status=1).stderr
    assert not (tmp_path / "swapd").exists()


def test_options_of_a_comparison_are_refused_without_one_and_a_dry_run_writes_nothing(
    either: Path, tmp_path: Path
) -> None:
    said = swapd("run", "--compare", "--for", "soon", "--", "true", status=2).stderr
    assert "for '--for': 'soon' is not a time span" in said
    said = swapd("run", "--rounds", "2", "--", "true", status=2).stderr
    assert "are for --compare" in said
    done = swapd(
        *("run", "-n", "--compare", "--set", "chunk=4MiB", "--budget", "8MiB", "--", either)
    )
    lines = done.stdout.splitlines()
    assert [lines[0], lines[3]] == ["# chunk=default", "# chunk=4MiB"]
    assert "--chunk 4MiB" in lines[4]
    assert not (tmp_path / "swapd").exists()


def test_a_daemon_that_is_there_and_a_server_that_answers_are_not_measured(
    home: Path, vllm: list[object]
) -> None:
    home.mkdir(parents=True)
    home.parent.chmod(0o700)
    home.chmod(0o700)
    daemon = serve(home)
    try:
        said = swapd("run", "--compare", "--", "true", status=1).stderr
        assert f"a swapd serves host at {home}, and would be measured too: end it first" in said
    finally:
        daemon.stop()
    other = subprocess.Popen([str(word) for word in vllm], stdout=subprocess.PIPE)
    assert other.stdout is not None
    with other.stdout:
        try:
            assert other.stdout.readline() == b"listens\n"
            said = swapd("run", "--compare", "--for", "1", "--", *vllm, status=1).stderr
            assert f"http://{vllm[4]}/health answers already" in said
        finally:
            other.terminate()
            other.wait(60)


@pytest.mark.parametrize(
    ("said", "address", "page"),
    [
        ("8000", ("127.0.0.1", 8000), ""),
        ("[::1]:8000", ("::1", 8000), ""),
        ("http://h:1/models?key=2", ("h", 1), "/models?key=2"),
    ],
)
def test_a_server_is_asked_where_it_is_said_to_be(
    said: str, address: tuple[str, int], page: str
) -> None:
    host, port = address
    assert ready.parsed(said) == ServerAddress(host, port, page=page)


@pytest.mark.parametrize("option", ["--ssl-certfile", "--ssl-keyfile"])
def test_a_server_that_speaks_tls_is_ready_once_it_listens(option: str) -> None:
    plain = command_of(["vllm", "serve", "m", "--port", "1"])
    assert ready.of_server(plain) == ServerAddress(port=1, page="/health")
    assert ready.of_server(plain.with_option(option, "file")) == ServerAddress(port=1)


# --- messages ----------------------------------------------------------------------------


def one(whole_s: float, status: int = 0, **more: float) -> Round:
    outcome = Outcome(device="host", swaps=2, bytes_in=4 * MIB, waits=1, waited_s=0.5)
    return Round(status, whole_s, None, more.get("load_s"), 8 * MIB, None, (outcome,))


def test_medians_are_of_the_rounds_that_ended_well() -> None:
    without = Side("without", None, (one(1.0), one(9.0), one(2.0), one(0.1, status=1)))
    found = Comparison(1, ("x",), (without, Side("with", {}, (one(3.0),))))
    whole = rows(found)[0]
    assert whole == ("whole time", "2 s", "3 s", "1.5")
    assert found.status == 1


def test_the_better_of_two_settings_is_that_with_the_shorter_load() -> None:
    slow = Side("a", {}, (one(1.0, load_s=3.0),))
    quick = Side("b", {}, (one(9.0, load_s=1.5),))
    assert better(Comparison(1, ("x",), (slow, quick))) == (quick, "0.5 times the time with a")
    assert better(Comparison(1, ("x",), (quick, slow))) == (quick, "0.5 times the time with a")
    failed = Side("c", {}, (one(1.0, status=1),))
    assert better(Comparison(1, ("x",), (failed, quick))) is None
    bare = Side("without", None, (one(1.0, status=1),))
    assert better(Comparison(1, ("x",), (bare, quick))) == (quick, "fails without swapd")


def test_a_server_can_be_ended_after_so_many_seconds(vllm: list[object]) -> None:
    done = swapd("run", "--compare", "--for", "50ms", "--", *vllm)
    found = cells(done.stdout)
    assert "the load" not in found
    assert len(found["until it was ready"]) == 3
