"""`swapd serve --device cuda:0` where it cannot start, or where it has warnings.

Each refusal is one line with the remedy; and nothing is left on the GPU.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import fakecuda, forked
from tests.cuda.gpu_world import MIB, PROGRAM, World
from tests.guarantees import harness
from tests.processes import PYTHONPATH

GIB = 1 << 30
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def limits(**most: int) -> Callable[[], None]:
    """For a child, before it runs: at most this much of each resource."""

    def set_them() -> None:
        for name, value in most.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))

    return set_them


def refusal(
    folder: Path,
    env: Mapping[str, str],
    *flags: str,
    before: Callable[[], None] | None = None,
) -> str:
    """The one line that `swapd serve` prints instead of serving."""
    settings = {"device": "cuda:0", "budget": "16MiB", "chunk": "2MiB", "runtime-dir": folder}
    command = [sys.executable, "-m", "swapd", "serve"]
    command += [f"--{name}={value}" for name, value in settings.items()]
    env = {"PYTHONPATH": PYTHONPATH, **env}
    with forked.Popen([*command, *flags], env=env, preexec_fn=before, **PIPES) as done:
        out, err = done.communicate(timeout=harness.PATIENCE_S)
    assert done.returncode == 1, err
    assert out == ""
    assert not list(folder.glob("*.sock"))
    (line,) = str(err).strip().splitlines()
    return line.removeprefix("swapd: ")


def test_no_driver(folder: Path) -> None:
    said = refusal(folder, {})
    assert said.startswith("there is no NVIDIA driver here")
    assert "--gpus all" in said
    assert "--device host" in said


#: Each fault: knobs of the machine, the environment, flags, and the parts of the message.
WRONG: dict[str, tuple[dict[str, object], dict[str, str], list[str], list[str]]] = {
    "no GPU": (
        {},
        {"CUDA_VISIBLE_DEVICES": ""},
        [],
        ["CUDA_ERROR_NO_DEVICE (100)", "CUDA_VISIBLE_DEVICES", "--gpus all"],
    ),
    "driver too old": (
        {"version": 11080},
        {},
        [],
        ["it is for CUDA 11.8", "CUDA 12.0 (driver 525) or newer is needed", "update the driver"],
    ),
    "no such index": (
        {"devices": 2},
        {},
        ["--device=cuda:5"],
        ["there is no cuda:5", "cuda:0 (Fake GPU 0), cuda:1 (Fake GPU 1)", "--device cuda:0"],
    ),
    "budget larger than the card": (
        {},
        {},
        ["--budget=2GiB"],
        ["budget of 2 GiB", "cuda:0 (Fake GPU 0)", "which is 1 GiB", "lower --budget"],
    ),
    "no pinned memory": (
        {"pin_total": MIB},
        {},
        [],
        ["could not pin a staging buffer of 12 MiB", "CUDA_ERROR_OUT_OF_MEMORY (2)", "`ulimit -l`"],
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_it_is_said_what_is_wrong_and_what_to_do(folder: Path, wrong: str) -> None:
    knobs, env, flags, words = WRONG[wrong]
    with fakecuda.machine(**{"total": GIB, **knobs}) as fake:
        said = refusal(folder, {**fake.environment(), **env}, *flags)
        assert fake.allocations() == []
    for word in words:
        assert word in said


def test_another_process_has_the_memory(folder: Path) -> None:
    with (
        fakecuda.machine(total=GIB) as fake,
        fake.occupied(800 * MIB, pid=4000001, name="/usr/bin/ollama"),
    ):
        said = refusal(folder, fake.environment(), "--budget=512MiB")
        assert "budget of 512 MiB, but only 224 MiB of the 1 GiB" in said
        assert "ollama (process 4000001) has 800 MiB" in said
        assert "lower --budget to 224MiB, or end processes on it" in said
        assert fake.held_bytes() == 0


def test_too_few_descriptors(folder: Path) -> None:
    with fakecuda.machine(total=GIB) as fake:
        said = refusal(folder, fake.environment(), "--budget=512MiB", before=limits(NOFILE=200))
        assert fake.allocations() == []
    assert said.startswith("256 chunks need ")
    assert "this process may have 200: set `ulimit -n " in said
    assert "a larger --chunk" in said


def test_mig_and_mps_are_said_at_the_start_in_status_and_by_the_doctor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        fakecuda.shown(monkeypatch, total=128 * MIB, mig=1) as fake,
        fake.occupied(MIB, mps=True),
        harness.world(PROGRAM) as made,
    ):
        daemon = World(made, fake).daemon()
        command = [sys.executable, "-m", "swapd"]
        at = ["-e", str(daemon.folder)]
        env = harness.environment()
        with forked.Popen([*command, "doctor", "--json", *at], env=env, **PIPES) as doctor:
            checks = json.loads(doctor.communicate()[0])
        notes = daemon.status().notes
        with forked.Popen([*command, "status", *at], env=env, **PIPES) as status:
            shown = status.communicate()[0]
        assert status.returncode == 0
        warned = [c["found"] for c in checks if c["status"] == "warn"]
        mig, mps = notes
        assert mig.startswith("MIG is on")
        assert mps.startswith("MPS is running")
        for note in notes:
            assert note in daemon.log
            assert note in shown
            assert note in warned
