"""The GPU that a worker means, and the message if it cannot use it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import fakecuda
from tests.cuda import gpu_world
from tests.cuda.gpu_world import MIB, World
from tests.guarantees import harness
from tests.processes import output_of, run_python

PROGRAM = Path(__file__).parent / "programs" / "visible_gpu.py"


@contextmanager
def machine(monkeypatch: pytest.MonkeyPatch, **knobs: object) -> Iterator[World]:
    with fakecuda.shown(monkeypatch, total=64 * MIB, **knobs) as fake:
        with harness.world(gpu_world.PROGRAM) as made:
            yield World(made, fake)
        assert [fake.held_bytes(gpu) for gpu in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("visible", "index"), [("0,1", 1), ("1,0", 0), ("1", 0), (None, 1)], ids=str
)
def test_the_same_card_whatever_its_index(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int
) -> None:
    with machine(monkeypatch, devices=2) as world:
        daemon = world.daemon(device="cuda:1")
        env = dict(world.fake.environment())
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        assert output_of(PROGRAM, "use", daemon.folder, env=env) == f"{index} True\n"
        assert world.fake.held_bytes(0) == 0


def failure(world: World, folder: object, **env: str) -> str:
    done = run_python(PROGRAM, "use", folder, env={**world.fake.environment(), **env})
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_a_card_that_is_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch, devices=2) as world:
        daemon = world.daemon(device="cuda:1")
        said = failure(world, daemon.folder, CUDA_VISIBLE_DEVICES="0")
    assert "DeviceFailed: swapd serves cuda:1 (GPU-" in said
    assert "does not see the GPU" in said
    assert "CUDA_VISIBLE_DEVICES" in said


def test_without_a_driver_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch, devices=2) as world:
        daemon = world.daemon()
        said = failure(world, daemon.folder, LD_LIBRARY_PATH="/nowhere")
    assert "DeviceFailed: swapd serves cuda:0" in said
    assert "no NVIDIA driver here" in said
    assert "--gpus all" in said


def test_without_the_bindings_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch, devices=2) as world:
        daemon = world.daemon()
        env = world.fake.environment()
        done = run_python(PROGRAM, "use_without_bindings", daemon.folder, env=env)
    assert "pip install 'swapd[cuda]'" in done.stderr.splitlines()[-1]


def test_a_process_may_connect_and_then_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch) as world:
        daemon = world.daemon()
        output_of(PROGRAM, "fork", daemon.folder, env=world.fake.environment())


def test_the_context_that_was_current_still_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two cards, the process works on the other one all the time."""
    with machine(monkeypatch, devices=2) as world:
        daemon = world.daemon()
        output_of(PROGRAM, "keep_the_context", daemon.folder, env=world.fake.environment())
