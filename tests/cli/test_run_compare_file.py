"""`swapd run --compare FILE.toml` runs all stages in both ways, or says why it cannot."""

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.processes import line_of

from .conftest import start, swapd
from .test_run import PROGRAM, home
from .test_run_compare import cells
from .test_run_file import stage

__all__ = ["home"]
DAEMON = '[daemon]\ndevice = "host"\nbudget = "16MiB"\n'
#: Uses swapd if $SWAPD_ENDPOINT is set.
EITHER = f'[ -z "$SWAPD_ENDPOINT" ] || exec {sys.executable} {PROGRAM} end; echo alone'


def file(folder: Path, *stages: str) -> Path:
    (path := folder / "run.toml").write_text(DAEMON + "\n".join(stages))
    return path


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """A file with a server, which runs until its client has ended."""
    return file(
        tmp_path,
        stage("serves", ["sleep", "1000"]),
        stage("uses", ["sh", "-c", EITHER], after=["serves"], ends_all=True),
    )


def test_stages_are_run_without_swapd_and_with_it_until_one_ends_all(
    both: Path, tmp_path: Path
) -> None:
    done = swapd("run", "--compare", "--rounds", "2", both)
    lines = [line for line in done.stdout.splitlines() if " | " in line]
    assert lines == ["uses   | alone", "uses   | used"] * 2
    found = cells(done.stdout)
    assert found[""] == ["without swapd", "with swapd", "ratio"]
    assert found["swaps"] == ["3"]
    assert found["copied in"] == ["36 MiB"]
    assert len(found["whole time"]) == len(found["the load"]) == 3, "two and a ratio"
    assert "MiB" in found["host memory, at most"][1]
    (path,) = (tmp_path / "swapd" / "comparisons").glob("*.json")
    assert json.loads(path.read_bytes())["command"] == ["swapd", "run", str(both)]
    listed = swapd("run", "--list").stdout
    assert listed.startswith(f"{path.stem}  status 0  swapd run {both}\n")
    assert cells(listed)["whole time"] == found["whole time"]


def test_a_stage_that_connects_runs_without_swapd_too(tmp_path: Path) -> None:
    path = file(tmp_path, stage("uses", [sys.executable, str(PROGRAM), "end"], ends_all=True))
    done = swapd("run", "--compare", path)
    assert done.stdout.count("uses | used\n") == 2
    assert done.stdout.count("without swapd, as $SWAPD_DISABLE says\n") == 1
    assert cells(done.stdout)["swaps"] == ["3"]


def test_two_settings_of_its_daemon_are_compared_and_the_others_stay(both: Path) -> None:
    both.write_text(both.read_text().replace("[stages", "patience = 9\n[stages", 1))
    done = swapd("run", "--compare", "--set", "budget=32MiB", both)
    found = cells(done.stdout)
    assert found[""] == ["budget=16MiB", "budget=32MiB", "ratio"]
    assert found["swaps"] == ["3", "2", "0.667"]
    shown = swapd("run", "-n", "--compare", "--set", "budget=32MiB", both).stdout.splitlines()
    assert [line for line in shown if line.startswith("# ")] == ["# budget=16MiB", "# budget=32MiB"]
    serves = [line for line in shown if line.startswith("swapd serve")]
    assert ["--budget 16777216" in serves[0], "--budget 33554432" in serves[1]] == [True, True]
    assert all("--patience 9" in line for line in serves)


def test_a_signal_ends_the_stages_and_no_other_side_is_run(tmp_path: Path) -> None:
    waits = stage(
        "waits", ["sh", "-c", "trap 'exit 7' TERM; echo runs; while :; do sleep 0.1; done"]
    )
    process = start("run", "--compare", file(tmp_path, waits))
    assert line_of(process) == "waits | runs\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 7, (out, err)
    assert "2 of 2" not in err


REGISTERS = stage("a", ["sleep", "1"], ready="registered")
SERVER = stage("a", ["./vllm", "serve", "m"])
LOAD = stage("load", ["true"], ends_all=True)
OURS = stage("a", ["./vllm", "serve", "m", "--worker-cls=swapd_client.x"])
OVERLAY = stage("a", ["./vllm-omni", "serve", "m", "--deploy-config", "o.yaml"])


@pytest.mark.parametrize(
    ("words", "stages", "said"),
    [
        (["--compare"], REGISTERS, 'a.ready = "registered" would never come true without swapd'),
        (["--compare"], SERVER, "a is a server and does not end by itself: write a stage"),
        (["--compare"], OURS + LOAD, "--worker-cls swapd_client.x needs swapd, so it cannot run"),
        (["--compare"], OVERLAY + LOAD, "--deploy-config o.yaml needs swapd, so it cannot run"),
        (["--compare", "--until", "true"], LOAD, "--until is for a single command: write a stage"),
        (["--compare", "--for", "0"], LOAD, "--for is for a single command: write a stage"),
        (["--set", "chunk=4MiB"], LOAD, "--set is for a single command: write it"),
        (["--config", "x.toml"], LOAD, "--config is for a single command: write it into [daemon]"),
        (["--compare", "--set", "budget=16MiB"], LOAD, "both sides have that already"),
        (["--compare", "--set", "bugdet=16MiB"], LOAD, "did you mean budget?"),
    ],
)
def test_stages_that_cannot_be_compared_are_refused_before_anything_runs(
    words: list[str], stages: str, said: str, tmp_path: Path
) -> None:
    for name in ("vllm", "vllm-omni"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "o.yaml").write_text("worker_cls: swapd_client.vllm.omni.ARWorker")
    done = swapd("run", *words, file(tmp_path, stages), status=1)
    assert said in done.stderr
    assert not (tmp_path / "swapd").exists()
