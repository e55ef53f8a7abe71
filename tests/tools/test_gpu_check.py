"""`make gpu-check` runs completely on the driver stub, with tiny sizes, so it does not rot.

Times measured there are meaningless, and it says so; counts are valid.
"""

import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import __main__ as gpu_check_main
from benchmarks.gpu_check import (
    identify,
    pipeline,
    plan,
    runner,
)
from benchmarks.gpu_check.plan import Section
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.rows import Row
from benchmarks.gpu_check.runner import Ended
from benchmarks.gpu_check.settings import SMALL, STAGES
from swapd import spawn
from swapd_client import connect
from tests import fakecuda, forked
from tests.device.backends import Backend
from tests.processes import PYTHONPATH, ROOT

COMMAND = [sys.executable, "-m", "benchmarks.gpu_check"]
#: Modules that take long to import, and that the processes of all sections need.
IMPORTED = ("torch", "pytest", "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni")
#: The modules of the section of facts, once torch has run a kernel.
OF_FACTS = ("torch",)
#: An environment in which no driver is found.
NO_DRIVER = {"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin"}


def gpu_check(
    *arguments: object, env: dict[str, str] | None = None, imported: tuple[str, ...] = ()
) -> "subprocess.CompletedProcess[str]":
    with forked.Popen(
        [*COMMAND, *map(str, arguments)],
        imported=(*imported, "cuda.bindings.driver"),
        everywhere=True,
        cwd=ROOT,
        env=env or NO_DRIVER,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


#: Sections that need vLLM, which is in another environment; tests/vllm checks their rows.
OF_VLLM = ("engines", "kernels")


def only_hardware_answers() -> list[tuple[str, str]]:
    """Each row that the page names as the answer to a question, with its section."""
    page = (ROOT / "benchmarks" / "README.md").read_text()
    said = page.partition("#### Questions for the hardware")[2].partition("\n### ")[0]
    found: list[tuple[str, str]] = []
    for line in said.splitlines():
        if line.startswith("| ") and "`" in line:
            _, _, sections, rows, _ = line.split("|")
            where, names = re.findall("`(.+?)`", sections), re.findall("`(.+?)`", rows)
            # the last section has all remaining rows
            found += zip([*where, *where[-1:] * (len(names) - len(where))], names, strict=True)
    return found


#: The time limit of a section in these tests.
LIMIT_S = 60.0


class Clock:
    """The runner's clock, moved ahead."""

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
    assert "fact is no section; there are: attached, bounds, calls" in done.stdout


def test_a_package_that_is_missing_is_named_and_is_no_missing_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "CUDA", ("cuda.no_such_bindings", "json"))
    monkeypatch.setattr(sys, "argv", ["gpu-check"])
    assert gpu_check_main.main() == 4
    said = capsys.readouterr().out
    assert said.startswith("gpu-check needs cuda.no_such_bindings, which this Python lacks: pip in")
    assert plan.lacking(["cuda.bindings", "zmq"]).endswith("pip install cuda-bindings pyzmq")


def test_first_and_rest_are_all_there_is() -> None:
    first, rest = plan.first(), plan.rest()
    assert set(first) | set(rest) == set(plan.SECTIONS)
    assert not set(first) & set(rest)
    assert sum(section.limit_s for section in first) < 9 * 60


def test_a_run_goes_on_where_the_one_before_it_ended(
    on_the_stub: dict[str, str], tmp_path: Path
) -> None:
    """It repeats a section that was killed half-way."""
    command = ("--only", "facts", "--small", "--out", tmp_path)
    facts = gpu_check(*command, env=on_the_stub, imported=OF_FACTS)
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
    another = Report({**settings[1], "uuid": "GPU-2"}, settings[0], sections, stub=True)
    assert another.resume(path.with_suffix("")) == ["facts"], "of the same kind"
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


def test_torch_has_run_a_kernel_before_the_time_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[tuple[str, float]] = []
    clock = Clock()

    def run(section: Section, _: object, limit_s: float, heard: object) -> Ended:
        ran.append((section.module, limit_s))
        clock.ahead_s += 1000 * (section is plan.WARM)
        return Ended(section.module, 1.0, "", "")

    machine = {"gpu": "none", "uuid": "GPU-0", "driver": "", "stub": True, "date": "today"}
    monkeypatch.setattr(gpu_check_main, "_identify", lambda _: machine)
    monkeypatch.setattr(plan, "missing", lambda _: [])
    monkeypatch.setattr(gpu_check_main, "time", clock)
    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(sys, "argv", ["", "--first", "--limit", "500", "--out", str(tmp_path)])
    assert gpu_check_main.main() == 0
    assert [module for module, _ in ran] == ["warm", *plan.FIRST]
    assert [limit for _, limit in ran[1:]] == [section.limit_s for section in plan.first()]
    # all results are there, so not even the warm-up runs
    ran.clear()
    assert gpu_check_main.main() == 0
    assert ran == []


def test_the_device_stays_open_between_sections(tmp_path: Path) -> None:
    dev, proc = tmp_path / "dev", tmp_path / "proc"
    dev.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (dev / name).touch()
    (proc / "0000:01:00.0").mkdir(parents=True)
    said = "Model:\t\tNone\nGPU UUID:\t GPU-b\nDevice Minor: \t 1\n"
    (proc / "0000:01:00.0" / "information").write_text(said)
    with runner.device_kept_open("GPU-b", proc, dev) as held:
        assert held == [str(dev / "nvidia1")]
        assert str(dev / "nvidia1") in _open_here()
    assert str(dev / "nvidia1") not in _open_here()
    with runner.device_kept_open("GPU-of-which-nothing-is-said", proc, dev) as held:
        assert held == [str(dev / "nvidia0"), str(dev / "nvidia1")]
    with runner.device_kept_open("GPU-b", tmp_path / "none", tmp_path / "none") as held:
        assert held == []


def _open_here() -> list[str]:
    fds = Path("/proc/self/fd")
    return [os.readlink(path) for path in fds.iterdir() if path.is_symlink()]


def test_memory_that_a_driver_gives_back_late_is_waited_for() -> None:
    held = iter([3, 3, 2, 1])
    backend = Backend(lambda *_: None, "none", lambda _: next(held))  # type: ignore[arg-type]
    assert backend.comes_to_hold(None, 1)  # type: ignore[arg-type]


def test_real_stages_make_the_same_by_all_ways_on_the_host_too(tmp_path: Path) -> None:
    """Without a driver: on swapd's host device, with torch on the CPU."""
    rows = tmp_path / "rows"
    with rows.open("w") as out:
        settings = replace(SMALL, device="host", requests=1)
        command = [sys.executable, "-m", "benchmarks.gpu_check.section", "pipeline"]
        with forked.Popen(
            [*command, settings.encode(), str(out.fileno())],
            imported=IMPORTED,
            everywhere=True,
            cwd=ROOT,
            env=NO_DRIVER,
            pass_fds=(out.fileno(),),
        ) as process:
            assert process.wait() == 0
    told = [json.loads(row) for row in rows.read_text().splitlines()]
    wrong = [row for row in told if row["verdict"] in ("failed", "missing")]
    assert wrong == []
    ways = (pipeline.RESIDENT, pipeline.SWAPD, pipeline.MODULE_TO, pipeline.RESTART)
    by_name = {row["name"]: row for row in told}
    assert all(by_name[f"tokens a second: {way}"]["value"] > 0 for way in ways)
    assert f"{', '.join(ways)}; 14 tokens" in by_name["the same tokens by all ways"]["note"]
    assert [row["value"] for row in told[-3:]] == ["holds"] * 3
    came = by_name[f"tokens a second: {pipeline.SWAPD}"]["note"]
    assert "weights came in for 3 of 3 turns" in came


@pytest.mark.parametrize(("nbytes", "depth"), [(8 << 30, 8), (40 << 30, 58)])
def test_real_stages_are_as_large_as_the_card_allows(nbytes: int, depth: int) -> None:
    import torch

    from benchmarks.gpu_check import omni  # only this test's worker imports transformers

    size = omni.size_for(nbytes)
    assert size.depths["text"] == depth
    meta = torch.device("meta")
    made = [omni.make(stage, size, meta) for stage in STAGES]
    total = sum(weight.nbytes for model in made for weight in model.parameters())
    assert 0.9 * nbytes < total <= 1.02 * nbytes


def test_each_test_of_the_contract_is_a_row_when_it_has_ended(tmp_path: Path) -> None:
    """Tests that passed before one that ends the process have rows, too."""
    tests = tmp_path / "tests" / "device"
    tests.mkdir(parents=True)
    (tests / "test_some.py").write_text(
        "import os, pytest\n"
        "def test_right(): pass\n"
        "@pytest.mark.parametrize('x', [1, 2])\n"
        "def test_wrong(x): assert x == 1, 'it is 2'\n"
        "def test_fatal(): os.abort()\n"
    )
    rows, ended = contract_of(tmp_path)
    told = [(row["name"], row["verdict"]) for row in rows]
    assert told == [
        ("test_some.py::test_right", "ok"),
        ("test_some.py::test_wrong[1]", "ok"),
        ("test_some.py::test_wrong[2]", "failed"),
    ]
    assert "it is 2" in rows[-1]["note"]
    assert ended.returncode == -signal.SIGABRT
    assert "test_fatal" in ended.stdout.splitlines()[-1]  # the test that ended the process


def contract_of(root: Path) -> tuple[list[dict[str, Any]], "subprocess.CompletedProcess[str]"]:
    """The rows of the contract whose tests are in `root`, and how the process has ended."""
    program = (
        "import sys; from pathlib import Path\n"
        "from benchmarks.gpu_check import contract; from benchmarks.gpu_check.rows import Check\n"
        "from benchmarks.gpu_check.settings import Settings\n"
        "contract.ROOT = Path(sys.argv[1])\n"
        "with open(sys.argv[2], 'w') as out:\n"
        "    contract.measure(Check('contract', out), Settings(stub=True))\n"
    )
    out = root / "rows"
    ended = subprocess.run(
        [sys.executable, "-c", program, str(root), str(out)],
        cwd=ROOT,
        env=NO_DRIVER,
        capture_output=True,
        text=True,
        check=False,
    )
    return [json.loads(row) for row in out.read_text().splitlines()], ended


def test_a_run_of_the_contract_has_one_context_for_all_of_it(
    on_the_stub: dict[str, str], tmp_path: Path
) -> None:
    """The suite runs as on a GPU; only the check for one is replaced."""
    trace = tmp_path / "trace"
    trace.touch()
    program = (
        "import sys, pytest; from tests.device import backends\n"
        "backends.gpu_here = lambda: True\n"
        "sys.exit(pytest.main(['-q', '-m', 'gpu', '-p', 'no:cacheprovider', 'tests/device', '-k',"
        " 'a_size_that_makes_no_sense or many_pieces or open_and_close_leave']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**on_the_stub, "FAKECUDA_TRACE": str(trace)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    calls = [call.split() for call in trace.read_text().splitlines()]
    changes = {"cuDevicePrimaryCtxRetain": 1, "cuDevicePrimaryCtxRelease_v2": -1}
    held = [changes[call] for pid, _, call, *_ in calls if pid == calls[0][0] and call in changes]
    assert held[:2] == [1, 1], "a device's beside the session's"
    assert [sum(held[:n]) for n in range(1, len(held))].count(0) == 0, "given up in between"


def test_each_question_that_only_hardware_answers_has_its_row() -> None:
    """This looks for its name in the section's code; the run on the stub checks that it is made."""
    found = only_hardware_answers()
    assert len(found) > 30
    for section, name in found:
        assert section in {one.module for one in plan.SECTIONS}
        folder = ROOT / "benchmarks" / "gpu_check"
        source = (folder / f"{section}.py").read_text() + (folder / "plan.py").read_text()
        if section in OF_VLLM:
            assert f'"{name}"' in source, f"{section} has no row {name}"


@pytest.mark.slow
@pytest.mark.timeout(600)  # the run has its own, shorter limit
def test_every_section_runs_on_the_stub(on_the_stub: dict[str, str], tmp_path: Path) -> None:
    all_it_can = {**on_the_stub, "FAKECUDA_READ_ONLY_PINS": "1"}  # else one row is not measured
    done = gpu_check("--small", "--out", tmp_path, env=all_it_can, imported=IMPORTED)
    said = done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    report = json.loads(path.read_text())
    assert report["stub"]
    assert report["complete"]
    wrong = [row for row in report["rows"] if row["verdict"] in ("failed", "missing")]
    assert [(row["section"], row["note"]) for row in wrong] == [
        (section, "needs vllm, which this Python lacks: pip install vllm") for section in OF_VLLM
    ], said
    assert done.returncode == 0, said
    told = {(row["section"], row["name"]) for row in report["rows"]}
    for section, name in only_hardware_answers():
        if section not in OF_VLLM:
            rows = [row for where, row in told if where == section]
            assert fnmatch.filter(rows, name), f"{section} has no row {name}"
    sections = {s.module for s in (plan.WARM, *plan.SECTIONS)}
    assert {row["section"] for row in report["rows"]} == sections
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
    # the child holds the pipe open as long as it runs
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
        clock.ahead_s = LIMIT_S * (row.name == "child")  # it hangs now: end the wait

    rows, ended = run_section(monkeypatch, tmp_path, hang, is_over)
    os.close(writing)
    assert ended.how == "did not end within 60 s"
    assert [row.name for row in rows] == ["first", "child"]
    assert os.read(reading, 1) == b""  # EOF: no process has it any more
    os.close(reading)
