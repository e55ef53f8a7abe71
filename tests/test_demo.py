"""The demo keeps its promises: real models, real processes, identical bits."""

import json
import os
import signal
import subprocess
import sys
import wave
from contextlib import suppress
from pathlib import Path

import pytest

from swapd.cli import INTERRUPTED
from tests import forked
from tests.cli.conftest import environment, start, swapd
from tests.processes import line_of

#: The imports of transformers for the demo's stages.
STAGES = ("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni",)


def test_a_file_that_cannot_be_written_is_named_before_the_work(tmp_path: Path) -> None:
    done = swapd("demo", "--wav", tmp_path / "no" / "out.wav", status=1)
    assert done.stderr == (f"swapd: [Errno 2] No such file or directory: '{tmp_path}/no/out.wav'\n")


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine its stages compute for minutes
def test_three_stages_that_do_not_fit_give_identical_bits(tmp_path: Path) -> None:
    wav = tmp_path / "out.wav"
    command = [sys.executable, "-m", "swapd", "demo", "--json", "--rounds", "2", "--wav", str(wav)]
    with forked.Popen(
        command, imported=("torch", *STAGES), everywhere=True, stdout=subprocess.PIPE, text=True
    ) as demo:
        summary = json.loads(demo.communicate()[0])
    assert demo.returncode == 0
    assert summary.keys() == {
        "bit_identical",
        "evictions",
        "loads",
        "bytes_in",
        "bytes_out",
        "peak_bytes",
        "budget_bytes",
        "sum_bytes",
        "wait_seconds",
        "total_seconds",
        "baseline_seconds",
    }
    assert summary["bit_identical"] is True
    assert summary["sum_bytes"] >= 300 << 20
    assert summary["budget_bytes"] < summary["sum_bytes"] / 2
    assert summary["peak_bytes"] <= summary["budget_bytes"]
    assert summary["loads"] == 6
    assert summary["evictions"] == 5
    # each storage is aligned, so a component is a little more than its parameters
    assert 1 <= summary["bytes_in"] / (2 * summary["sum_bytes"]) < 1.01
    assert summary["bytes_out"] == 0
    with wave.open(str(wav)) as sound:
        assert sound.getframerate() == 24000
        assert any(sound.readframes(sound.getnframes()))


def test_ctrl_c_ends_it_at_once_without_a_word(tmp_path: Path) -> None:
    """The terminal sends it to all processes, while the stages import and build."""
    words = ("demo", "--wav", str(tmp_path / "out.wav"))
    demo = start(*words, start_new_session=True, env=environment(PYTHONUNBUFFERED="1"))
    while not line_of(demo).startswith("Building "):
        pass
    os.killpg(demo.pid, signal.SIGINT)
    _, said = demo.communicate(timeout=60)
    assert (demo.returncode, said) == (INTERRUPTED, "")
    assert not any(tmp_path.iterdir()), "no empty file of sound"


def test_nothing_of_it_outlives_it_if_it_is_killed(tmp_path: Path) -> None:
    """As by `timeout` or a container that stops."""
    words = ("demo", "--wav", str(tmp_path / "out.wav"))
    demo = start(*words, start_new_session=True, env=environment(PYTHONUNBUFFERED="1"))
    while "  start  " not in line_of(demo):  # its daemon serves, and its stages begin
        pass
    demo.kill()
    demo.communicate(timeout=60)  # its stages have the output, too
    with suppress(ProcessLookupError):
        while True:  # until its daemon has ended
            os.killpg(demo.pid, 0)
            os.sched_yield()
