"""`swapd bench` prints the promised results, and judges those that it can.

Its times are for people. These tests check its counts, which also hold on a busy machine, and its
verdict on a busy or slow machine.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import sides
from swapd import bench as suite
from swapd.bench import FIGURES, Report, judge, leaks, machine
from swapd.bench.machine import (
    REFERENCE_US,
    Conditions,
    CpuTimes,
    Machine,
    Surroundings,
    cpu_times,
    too_busy,
)
from swapd.cli import bench as command
from swapd.cli.bench import exit_code
from tests import forked
from tests.once import made_once
from tests.processes import output_of

#: The first test waits for a whole run, possibly on a busy machine.
pytestmark = pytest.mark.timeout(600)

QUIET = Conditions(10.0, 0.01, 0.05, 0.0)
COUNTS = {key for key, figure in FIGURES.items() if figure.kind == "count"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> "subprocess.CompletedProcess[str]":
    """One whole run, with as few rounds as possible."""

    def make(path: Path) -> None:
        ran = bench()
        path.write_text(json.dumps([ran.returncode, ran.stdout, ran.stderr]))

    ended = json.loads(made_once(tmp_path_factory, "bench.json", make).read_text())
    return subprocess.CompletedProcess("bench", *ended)


def bench() -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", "swapd", "bench", "--quick", "--json"]
    with forked.Popen(
        words,
        imported=("torch",),
        everywhere=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture(scope="module")
def printed(done: "subprocess.CompletedProcess[str]") -> Any:
    return json.loads(done.stdout)


@pytest.fixture
def report(printed: Any) -> Report:
    """The results, as if from a full run on a quiet machine, and well within bounds."""
    figures = {key: printed[key] for key in COUNTS} | {
        key: figure.bound * (0.5 if figure.side == "at most" else 2.0)
        for key, figure in FIGURES.items()
        if key not in COUNTS
    }
    found = msgspec.json.decode(json.dumps({**printed, "figures": figures}), type=Report)
    conditions = dict.fromkeys(found.machine.conditions, QUIET)
    return msgspec.structs.replace(found, machine=surroundings(conditions), judged={})


@pytest.fixture
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SLICES", 1)
    monkeypatch.setattr(machine, "SLICE_S", 0.002)


def surroundings(conditions: dict[str, Conditions], cpus: int = 2) -> Surroundings:
    return Surroundings(cpus, 10.0, conditions, [])


def judged(report: Report, machine: Surroundings | None = None, **figures: float) -> Report:
    """The report with these figures, and its verdicts."""
    changed = msgspec.structs.replace(
        report, figures=report.figures | figures, machine=machine or report.machine
    )
    return msgspec.structs.replace(changed, judged=judge(changed))


@pytest.mark.slow
def test_bench_prints_every_figure_with_both_sides(printed: Any) -> None:
    assert printed.keys() == {
        "swap_in_ratio",
        "bytes_back",
        "hit_rtt_ratio",
        "decode_share",
        "hooks_share",
        "handle_us",
        "handle_busy_us",
        "fd_growth",
        "rss_growth_bytes",
        "stream_ratio",
        "stream_peak_blocks",
        "load_speed_ratio",
        "load_memory_ratio",
        "raw",
        "machine",
        "device",
        "judged",
    }
    raw = printed["raw"]
    assert raw["swap_in"].keys() >= {"swap_s", "copy_s"}
    assert raw["hit"].keys() >= {"hit_s", "two_round_trips_s"}
    assert raw["hooked"].keys() >= {"bare_s", "whole_s", "streamed_s"}
    assert raw["handle"].keys() >= {"mean_us", "loop_us"}
    assert raw["load"].keys() >= {"load_s", "read_s"}
    assert raw["stream"].keys() >= {"stream_s", "alone_s"}
    assert printed["machine"]["conditions"].keys() == raw.keys()


def test_a_long_path_of_temporary_files_does_not_matter(tmp_path: Path) -> None:
    (folder := tmp_path / ("x" * 100)).mkdir()
    program = "from swapd.bench import hit\nif __name__ == '__main__': print(hit.measure(blocks=1))"
    (script := tmp_path / "script.py").write_text(program)
    run = [sys.executable, str(script)]
    environment = {**os.environ, "TMPDIR": str(folder)}  # noqa: TID251
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("Hit("), done.stderr


@pytest.mark.slow
def test_what_bench_counts_is_within_its_bounds(printed: Any) -> None:
    assert printed["bytes_back"] == 0
    assert printed["fd_growth"] == 0
    assert printed["rss_growth_bytes"] < 2 << 20
    assert printed["load_memory_ratio"] < 1.15
    assert printed["raw"]["leaks"]["swaps"] == 2000
    assert printed["raw"]["leaks"]["idle_wakeups_per_s"] < 1
    streaming = printed["raw"]["stream"]
    assert printed["stream_peak_blocks"] <= 3
    assert streaming["kept"] == {"4": "..k...k...k...k.", "8": ".k.k.k.k.k.k.k.k"}
    for kept, copied in streaming["copied"].items():
        assert abs(copied - (16 - int(kept))) <= 2, "but for those on their way as it was counted"


@pytest.mark.slow
def test_few_rounds_judge_counts_and_no_times(
    done: "subprocess.CompletedProcess[str]", printed: Any
) -> None:
    verdicts = {key: judged["verdict"] for key, judged in printed["judged"].items()}
    assert verdicts == {key: "ok" if key in COUNTS else "not judged" for key in FIGURES}
    assert done.returncode == 3


@pytest.mark.slow
def test_bench_ends_with_0_if_all_holds_with_1_if_not_with_3_if_nobody_can_say(
    report: Report,
) -> None:
    assert exit_code(judged(report)) == 0
    assert exit_code(judged(report, hit_rtt_ratio=99.0)) == 1
    busy = surroundings(report.machine.conditions | {"hit": Conditions(10.0, 0.31)})
    assert exit_code(judged(report, busy, hit_rtt_ratio=99.0)) == 3
    assert exit_code(judged(report, busy, hit_rtt_ratio=99.0, bytes_back=1)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("as_json", "begins"), [(False, "swapd bench on host"), (True, "{")])
def test_a_pipe_changes_nothing_and_json_is_asked_for(
    report: Report,
    as_json: bool,
    begins: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(suite, "run", lambda *_, **__: judged(report))
    command.bench(json=as_json)
    assert capsys.readouterr().out.startswith(begins)


@pytest.mark.slow
def test_on_a_busy_machine_times_are_not_judged_and_counts_are(report: Report) -> None:
    busy = dict.fromkeys(report.machine.conditions, Conditions(10.0, 0.31, 0.0, 0.04))
    found = judged(report, surroundings(busy), fd_growth=1).judged
    why = "machine busy: waited 31 % of the time for a CPU, steal 4 %"
    assert {one.why for key, one in found.items() if key not in COUNTS} == {why}
    assert found["fd_growth"].verdict == "failed"
    assert found["bytes_back"].verdict == "ok"


@pytest.mark.slow
def test_a_bound_in_microseconds_is_twice_as_many_on_a_machine_half_as_fast(report: Report) -> None:
    for times in (1, 2):
        handle = msgspec.structs.replace(report.raw.handle, loop_us=times * REFERENCE_US)
        raw = msgspec.structs.replace(report.raw, handle=handle)
        slower = msgspec.structs.replace(report, raw=raw)
        found = judged(slower, handle_us=42.0).judged["handle_us"]
        assert found.bound == pytest.approx(30 * times)
        assert found.verdict == ("failed" if times == 1 else "ok")


def test_what_is_opened_once_is_no_leak_and_what_each_round_leaves_open_is() -> None:
    assert leaks.growth([9, 9, 9, 12, 12, 13, 13, 13, 13]) == 0
    assert leaks.growth([9, 10, 11, 12, 13, 14, 15, 16, 17]) == 1
    assert leaks.growth([9, 9, 10, 10, 11, 11, 12, 12, 13]) > 0, "in every other round"


def test_one_descriptor_left_open_in_each_round_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[int] = []
    cycle = leaks._cycle

    def leaking(client: Any, count: int) -> None:
        cycle(client, count)
        opened.append(os.dup(0))

    monkeypatch.setattr(leaks, "_cycle", leaking)
    monkeypatch.setattr(leaks, "WARM_UP", 1)
    monkeypatch.setattr(leaks, "IDLE_S", 0.01)
    found = leaks.measure(rounds=5, cycles=1, nbytes=4 << 20)
    for fd in opened:
        os.close(fd)
    assert found.worker_fds == 1
    assert found.daemon_fds == 0
    assert found.swaps == 10


def test_a_process_that_computes_on_the_same_cpu_is_noticed() -> None:
    said = output_of(Path(__file__).parent / "programs" / "busy.py")
    assert "of the time for a CPU" in said
    assert "other processes used" in said


@pytest.mark.parametrize(
    ("found", "cpus", "why"),
    [
        (QUIET, 2, ""),
        (Conditions(10.0, 0.31), 2, "waited 31 % of the time for a CPU"),
        (Conditions(10.0, 0.0, 1.9), 2, "other processes used 1.9 of 2 CPUs"),
        (Conditions(10.0, 0.0, 1.9), 16, ""),
        (Conditions(10.0, 0.0, 15.2), 16, "other processes used 15.2 of 16 CPUs"),
        (Conditions(10.0, 0.0, 0.0, 0.04), 2, "steal 4 %"),
        (Conditions(21.0, 0.0), 2, "a plain loop took 2.1 times as long as at best"),
        (Conditions(0.0, 0.0), 2, ""),
        (Conditions(10.0, None), 2, ""),
    ],
)
def test_a_busy_machine_is_told_by_what_it_was_busy_with(
    found: Conditions, cpus: int, why: str
) -> None:
    assert too_busy(found, surroundings({}, cpus)) == why
    assert too_busy(found, Surroundings(cpus, 0.0, {}, [])) == why.replace(
        "a plain loop took 2.1 times as long as at best", ""
    )


def test_the_cpus_times_are_read_as_the_kernel_counts_them() -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    stat = "cpu  9 9 9 9\ncpu0 1 2 3 40 5 6 7 8 9 9\ncpu1 1 2 3 40 5 6 7 8 0 0\nintr 5\n"
    assert cpu_times(stat, {0, 1}) == CpuTimes(2, 144 / hertz, 90 / hertz, 16 / hertz)
    assert cpu_times(stat, {1}) == CpuTimes(1, 72 / hertz, 45 / hertz, 8 / hertz)


@pytest.mark.usefixtures("short_probes")
@pytest.mark.parametrize(
    ("stat", "lacks"),
    [
        (None, "No such file"),
        ("", "lacks the times"),
        ("cpu 1 2 3 4\n", "lacks the times"),
        ("cpu0 1 2\n", "lacks the times"),
        ("cpu0 one two three four\n", "invalid literal"),
        ("zeros", "does not count here"),
        ("no steal", "does not count here"),
    ],
)
def test_what_the_kernel_does_not_say_is_named_and_the_rest_is_looked_at(
    tmp_path: Path, stat: str | None, lacks: str
) -> None:
    path = tmp_path / "stat"
    fields = {"zeros": "0 0 0 0 0 0 0 0 0 0", "no steal": "0 0 0 0"}
    if stat is not None:
        lines = [f"cpu{cpu} {fields[stat]}" for cpu in os.sched_getaffinity(0) if stat in fields]
        path.write_text("\n".join(lines) or stat)
    watched = Machine(path)
    assert watched.watch("work", lambda: 5) == 5
    found = watched.surroundings()
    assert any(lacks in what for what in found.not_probed)
    assert found.conditions["work"].others_cpus is None
    assert found.conditions["work"].steal is None
    assert found.conditions["work"].loop_us > 0


@pytest.mark.usefixtures("short_probes")
def test_a_kernel_without_steal_time_still_says_what_others_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: Iterator[CpuTimes] = iter((CpuTimes(1, 0.0, 0.0, None), CpuTimes(1, 9e9, 0.0, None)))
    monkeypatch.setattr(Machine, "_times", lambda _: next(looks))
    watched = Machine(tmp_path / "stat")
    watched.watch("work", lambda: None)
    found = watched.surroundings()
    assert found.conditions["work"].others_cpus is not None
    assert found.conditions["work"].steal is None
    assert found.not_probed == [f"steal time: {tmp_path / 'stat'} has none"]


@pytest.mark.slow
def test_where_cpu_time_goes_in_long_steps_no_microseconds_are_judged(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "clock_step_s", lambda: 0.01)
    watched = Machine()
    watched.watch("work", lambda: None)
    found = watched.surroundings()
    assert found.conditions["work"].waited is None
    assert found.not_probed[0] == "waiting for a CPU: CPU time has steps of 0.01 s"
    conditions = dict.fromkeys(report.machine.conditions, Conditions(10.0, None))
    by_key = judged(report, surroundings(conditions)).judged
    assert by_key["handle_us"].verdict == "not judged"
    assert by_key["hit_rtt_ratio"].verdict == "ok"


def test_two_checkouts_are_shown_side_by_side_with_the_ratio_of_their_medians() -> None:
    raw = {"handle": {"mean_us": 40.0, "loop_us": 10.0}, "handle_busy": {"mean_us": 40.0}}
    report = {
        "bytes_back": 0,
        "handle_us": 40.0,
        "stream_ratio": None,
        "device": "host",
        "raw": raw,
    }
    found = sides.figures(report)
    assert found == {"bytes_back": 0.0, "handle_us": 40.0, "handle_passes": 4.0}
    old = {"bytes_back": [0.0], "handle_us": [40.0, 60.0, 50.0], "gone": [1.0]}
    assert sides.table(old, {"bytes_back": [0.0], "handle_us": [100.0], "more": [2.0]}).split(
        "\n"
    ) == [
        "| figure | old | new | new over old |",
        "| --- | --- | --- | --- |",
        "| bytes_back | 0 (0 to 0) | 0 (0 to 0) |  |",
        "| handle_us | 50 (40 to 60) | 100 (100 to 100) | 2.00 |",
        "| gone | 1 (1 to 1) |  |  |",
        "| more |  | 2 (2 to 2) |  |",
    ]
