"""Real engines whose kernels keep their weights, or addresses of them, where no parameter is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from swapd_client import connect
from tests.guarantees.harness import Daemon
from tests.vllm.engines import (
    REQUESTS,
    TOKENS,
    Engine,
    EngineFailed,
    Scene,
    by_component,
    on_swapd,
    plain,
)
from tests.vllm.models import MODELS, write_int8


def started(scene: Scene, kind: str, arguments: Mapping[str, Any]) -> Engine:
    engine = scene.process("talker")
    engine.imports("tests.vllm.keeping")
    engine.start(**arguments, hf_overrides={"architectures": [kind]})
    return engine


def answers(engine: Engine) -> list[Any]:
    return [engine.generate(prompts, TOKENS) for prompts in REQUESTS[:2]]


def evict(daemon: Daemon, name: str) -> None:
    """Let another session take all of the memory for a moment."""
    with connect(daemon.folder) as client, client.acquire_workspace("64MiB"):
        assert {one.state for one in by_component(daemon)[name]} == {"absent"}


def held(daemon: Daemon, name: str) -> int:
    """The bytes of this component in swapd."""
    return sum(one.nbytes for one in by_component(daemon)[name])


def on_file(model: Path) -> int:
    return (model / "model.safetensors").stat().st_size


def test_weights_that_an_object_wraps_take_turns_too(scene: Scene) -> None:
    model = scene.models / "talker"
    alone = started(scene, "WrappingQwen2", plain(model))
    daemon = scene.daemon()
    engine = started(scene, "WrappingQwen2", on_swapd(model, daemon.folder))
    assert held(daemon, "talker") >= 0.99 * on_file(model)
    for prompts in REQUESTS[:2]:
        assert engine.generate(prompts, TOKENS) == alone.generate(prompts, TOKENS)
        evict(daemon, "talker")
    assert "weights, and" not in engine.log, "no warning"


def test_new_weights_that_an_object_wraps_are_right_and_said_to_stay(
    scene: Scene, other: Path
) -> None:
    model = scene.models / "talker"
    alone = started(scene, "WrappingQwen2", plain(other))
    daemon = scene.daemon()
    engine = started(scene, "WrappingQwen2", on_swapd(model, daemon.folder))
    engine.call("reload_weights", None, str(other))
    evict(daemon, "talker")
    assert engine.generate(REQUESTS[0], TOKENS) == alone.generate(REQUESTS[0], TOKENS)
    assert "kernels of talker have put 9 MiB of its new weights into private memory" in engine.log


def test_a_kernel_that_keeps_a_pointer_is_refused_by_its_layers_name(scene: Scene) -> None:
    daemon = scene.daemon()
    with pytest.raises(EngineFailed) as refused:
        started(scene, "PointingQwen2", on_swapd(scene.models / "talker", daemon.folder))
    assert refused.value.kind == "PointerKept"
    assert "model.layers.0.mlp.down_proj (RowParallelLinear with Points)" in refused.value.message
    while daemon.status().components:
        daemon.await_record("SessionGone")


def test_weights_that_nothing_can_see_are_warned_of(scene: Scene) -> None:
    daemon = scene.daemon()
    model = scene.models / "talker"
    engine = started(scene, "HidingQwen2", on_swapd(model, daemon.folder))
    (warning,) = [line for line in engine.log.splitlines() if "stays there when the stage" in line]
    assert "talker has 50.52 MiB of weights, and 41.52 MiB of them in swapd (82 %)" in warning
    before = engine.generate(REQUESTS[0], TOKENS)
    evict(daemon, "talker")
    assert engine.generate(REQUESTS[0], TOKENS) == before


def test_more_weights_than_the_files_have_are_warned_of(scene: Scene) -> None:
    daemon = scene.daemon()
    model = scene.models / "talker"
    engine = started(scene, "LargerQwen2", on_swapd(model, daemon.folder))
    (warning,) = [line for line in engine.log.splitlines() if "counts the files alone" in line]
    assert "talker has 58.52 MiB of weights in swapd" in warning
    assert "its tensors in the model's files are 50.52 MiB" in warning
    assert warning.endswith("in place of the model's folder, with talker=59MiB")


@pytest.fixture(scope="session")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    write_int8(folder / "symmetric", MODELS["talker"], symmetric=True)
    write_int8(folder / "asymmetric", MODELS["talker"], symmetric=False)
    return folder


@pytest.mark.parametrize("name", ["symmetric", "asymmetric"])
def test_8_bit_integers_are_right_or_refused(scene: Scene, quantised: Path, name: str) -> None:
    """The CPU decides the kernel: oneDNN's, which keeps an address, or that for AMX."""
    model = quantised / name
    (alone,) = scene.start(plain(model))
    daemon = scene.daemon()
    said = ""
    try:
        (engine,) = scene.start(on_swapd(model, daemon.folder))
    except EngineFailed as refused:
        said = f"{refused.kind} {refused.message}"
    if said:
        assert "PointerKept" in said
        assert "qkv_proj (QKVParallelLinear with CompressedTensors" in said
        return
    assert held(daemon, name) >= 0.95 * on_file(model)
    for prompts in REQUESTS[:2]:
        assert engine.generate(prompts, TOKENS) == alone.generate(prompts, TOKENS)
        evict(daemon, name)


def test_all_weights_are_swapds_whatever_the_cpu_keeps_them_as(scene: Scene) -> None:
    """With AMX, vLLM packs them, and keeps them in closures."""
    daemon = scene.daemon()
    (engine,) = scene.on_swapd(daemon, "talker")
    assert held(daemon, "talker") >= 0.99 * on_file(scene.models / "talker")
    assert "talker computes the same, bit for bit, in 39 layers" in engine.log
