"""`make gpu-check` cannot rot: all of it runs on the fake driver, with tiny sizes.

What it says there of times is meaningless, and it says so; what it counts is not.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import __main__ as gpu_check_main
from benchmarks.gpu_check import identify, packages, plan, runner
from benchmarks.gpu_check.plan import Section
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.rows import Row
from benchmarks.gpu_check.settings import SMALL
from swapd import spawn
from swapd_client import connect
from tests import fakecuda, forked
from tests.processes import PYTHONPATH, ROOT

COMMAND = [sys.executable, "-m", "benchmarks.gpu_check"]
#: Finds no driver, wherever the tests run.
NO_DRIVER = {"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin"}


def gpu_check(
    *arguments: object, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    with forked.Popen(
        [*COMMAND, *map(str, arguments)],
        imported=("torch", "pytest", "cuda.bindings.driver"),
        everywhere=True,
        cwd=ROOT,
        env=env or NO_DRIVER,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


#: Of a section of these tests.
LIMIT_S = 60.0


class Clock:
    """The runner's, some time ahead."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def on_the_stub() -> Any:
    with fakecuda.machine(total=512 << 20, gbps=4) as fake:
        inherited = {**os.environ, "PYTHONPATH": PYTHONPATH}  # noqa: TID251
        yield {**inherited, **fake.environment()}
        assert fake.allocations() == [], "left on the device"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_with_a_code_of_its_own() -> None:
    done = gpu_check("--only", "facts")
    assert done.returncode == 3
    assert done.stdout.startswith("No GPU to check: ")
    assert "Traceback" not in done.stdout + done.stderr


def test_a_section_that_is_none_is_refused() -> None:
    done = gpu_check("--only", "fact")
    assert done.returncode == 2
    assert "fact is no section; there are: bounds, calls" in done.stdout


def test_a_package_that_is_missing_is_named_and_is_no_missing_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "CUDA", ("cuda.no_such_bindings", "json"))
    monkeypatch.setattr(sys, "argv", ["gpu-check"])
    assert gpu_check_main.main() == 4
    said = capsys.readouterr().out
    assert said.startswith("gpu-check needs cuda.no_such_bindings, which this Python lacks: pip in")
    assert packages.lacking(["cuda.bindings", "zmq"]).endswith("pip install cuda-bindings pyzmq")


def test_first_and_rest_are_all_there_is() -> None:
    first, rest = plan.first(), plan.rest()
    assert set(first) | set(rest) == set(plan.SECTIONS)
    assert not set(first) & set(rest)
    assert sum(section.limit_s for section in first) < 9 * 60


def test_a_run_goes_on_where_the_one_before_it_ended(
    on_the_stub: dict[str, str], tmp_path: Path
) -> None:
    """Also where that was killed in the middle of a section."""
    facts = gpu_check("--only", "facts", "--small", "--out", tmp_path, env=on_the_stub)
    assert facts.returncode == 0, facts.stdout
    (path,) = tmp_path.glob("*.json")
    before = json.loads(path.read_text())
    before["sections"].append({"module": "calls", "seconds": 1.0, "how": "killed", "said": ""})
    before["rows"].append({**before["rows"][0], "section": "calls", "name": "half"})
    path.write_text(json.dumps(before))
    settings = (before["settings"], before["machine"])
    sections = tuple(s for s in plan.SECTIONS if s.module in ("facts", "calls"))
    report = Report(settings[1], settings[0], sections, stub=True)
    assert report.resume(path.with_suffix("")) == ["facts"]
    assert [section.module for section in report.to_run] == ["calls"]
    assert {row.section for row in report.rows} == {"facts"}
    other = Report({**settings[1], "commit": "another"}, settings[0], sections, stub=True)
    assert other.resume(path.with_suffix("")) == []
    assert other.to_run == sections


def test_a_tree_without_git_says_which_version_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said = identify._sources()
    assert re.fullmatch(r"\S+, sources [0-9a-f]{12}", said)
    assert identify._sources() == said


def test_nothing_of_the_stub_goes_to_the_results(on_the_stub: dict[str, str]) -> None:
    done = gpu_check("--only", "facts", env=on_the_stub)
    assert done.returncode == 2
    assert "name a folder with --out" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)  # the run ends by itself before that
def test_every_section_runs_on_the_stub(on_the_stub: dict[str, str], tmp_path: Path) -> None:
    all_it_can = {**on_the_stub, "FAKECUDA_READ_ONLY_PINS": "1"}  # or a row is not measured
    done = gpu_check("--small", "--out", tmp_path, env=all_it_can)
    said = done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    report = json.loads(path.read_text())
    assert report["stub"]
    assert report["complete"]
    wrong = [row for row in report["rows"] if row["verdict"] in ("failed", "missing")]
    assert wrong == [], said
    assert done.returncode == 0, said
    assert {row["section"] for row in report["rows"]} == {s.module for s in plan.SECTIONS}
    table = path.with_suffix(".md").read_text()
    assert "On the stub driver" in table
    assert all(f"## {section.title}" in table for section in plan.SECTIONS)


def test_what_is_missing_is_said_and_costs_that_section_alone(tmp_path: Path) -> None:
    sections = (
        Section("try", "first", "First", 60, ("no_such_package", "no_such.bindings", "json")),
        Section("try", "second", "Second", 60),
    )
    report = Report({"gpu": "none"}, {}, sections, stub=True)
    gpu_check_main.run_all(report, tmp_path / "report", SMALL, limit_s=0)
    first, second = report.rows
    lacks = (
        "needs no_such_package, no_such.bindings, which this Python lacks: "
        "pip install no_such_package no_such.bindings"
    )
    assert (first.verdict, first.note) == ("missing", lacks)
    assert (second.verdict, second.note) == ("missing", "the 0 s of the whole run were over")
    assert json.loads((tmp_path / "report.json").read_text())["complete"]


def test_without_uvloop_and_typer_the_daemon_serves_on_another_loop() -> None:
    program = ("-m", "benchmarks.gpu_check.plain_daemon")
    with spawn.daemon(program, budget="4MiB") as daemon, connect(daemon.folder) as client:
        client.register("a", {"weights": bytearray(1 << 20)})
        with client.acquire("a") as lease:
            assert lease.loaded
    assert daemon.process.returncode == 0


def run_section(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    body: str,
    heard: Callable[[Row], None] = lambda _: None,
) -> tuple[list[Row], runner.Ended]:
    """Run a section whose module has `body` after the row "first", for a minute at most."""
    package = folder / "benchmarks" / "gpu_check"
    package.mkdir(parents=True)
    for name in ("__init__", "section", "rows", "settings"):
        source = ROOT / "benchmarks" / "gpu_check" / f"{name}.py"
        (package / f"{name}.py").write_text(source.read_text())
    lines = ["import os, signal, subprocess, sys, threading", "def measure(check, settings):"]
    lines += [f"    {line}" for line in ("check.row('first', 1)", *body.splitlines())]
    (package / "tried.py").write_text("\n".join(lines))
    monkeypatch.setattr(runner, "ROOT", folder)
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        heard(row)

    return rows, runner.run(Section("try", "tried", "Tried", LIMIT_S), SMALL, LIMIT_S, keep)


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("check.row('second', 2)", ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("raise RuntimeError('spoilt')", "exit code 1"),
        ("sys.exit(3)", "exit code 3"),
    ],
)
def test_a_section_that_ends_badly_keeps_the_rows_it_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, how: str
) -> None:
    rows, ended = run_section(monkeypatch, tmp_path, body)
    assert ended.how == how
    assert rows[0] == Row("tried", "first", 1)
    assert len(rows) == (1 if how else 2)
    assert ("spoilt" in ended.said) == ("spoilt" in body)


def test_a_section_that_hangs_is_ended_with_all_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    # the child holds the pipe open for as long as it lives
    hang = (
        f"child = subprocess.Popen(['sleep', '1000'], pass_fds=[{writing}])\n"
        "check.row('child', child.pid)\n"
        "threading.Event().wait()"
    )
    popen = subprocess.Popen

    def inheriting(*args: Any, **options: Any) -> Any:
        return popen(*args, **{**options, "pass_fds": (*options["pass_fds"], writing)})

    monkeypatch.setattr(subprocess, "Popen", inheriting)
    clock = Clock()
    monkeypatch.setattr(runner, "time", clock)

    def is_over(row: Row) -> None:
        clock.ahead_s = LIMIT_S * (
            row.name == "child"
        )  # it hangs now, so no more need be waited for

    rows, ended = run_section(monkeypatch, tmp_path, hang, is_over)
    os.close(writing)
    assert ended.how == "did not end within 60 s"
    assert [row.name for row in rows] == ["first", "child"]
    assert os.read(reading, 1) == b""  # EOF: nobody has it any more
    os.close(reading)
