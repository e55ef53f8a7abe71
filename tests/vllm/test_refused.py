"""Settings with which a stage is refused, and the error; each with a real engine."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.vllm.engines import (
    EngineFailed,
    Scene,
    await_components,
    on_swapd,
)


def refused(scene: Scene, settings: Mapping[str, object], **more: Any) -> EngineFailed:
    """The error of an engine that does not start, and leaves nothing on its daemon."""
    daemon = scene.daemon()
    engine = scene.process("talker")
    with pytest.raises(EngineFailed) as failed:
        engine.start(**on_swapd(scene.models / "talker", daemon.folder, settings, **more))
    await_components(daemon)
    return failed.value


@pytest.mark.parametrize(
    ("settings", "flags", "said"),
    [
        ({"componant": "x"}, {}, "did you mean component?"),
        (
            {"cpu_offload_enabled": True, "cpu_offload_components": ["visual"]},
            {},
            "cpu_offload_components names 'visual', but the stage has no such module",
        ),
        (
            {"cpu_offload_gb": 0.02},
            {"cpu_offload_gb": 0.01},
            "swapd.cpu_offload_gb: 0.02 contradicts vLLM's own flags (cpu_offload_gb: 0.01)",
        ),
        (
            {},
            {"cpu_offload_gb": 0.01, "additional_config": {"swapd": "auto"}},
            "swapd must have keys",
        ),
    ],
)
def test_settings_that_make_no_sense(
    scene: Scene, settings: Mapping[str, object], flags: Mapping[str, Any], said: str
) -> None:
    problem = refused(scene, settings, **flags)
    assert problem.kind == "InvalidArgument"
    assert said in problem.message
    assert "talker" in problem.message


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"cpu_offload_gb": 0.01, "enforce_eager": False},
            "cpu_offload_gb has layers come in when",
        ),
        ({"cpu_offload_gb": 0.01, "cpu_offload_params": ["mlp"]}, "leave out cpu_offload_params"),
        ({"weight_transfer_config": {"backend": "nccl_m2n"}}, "set the backend of weight_transfer"),
    ],
)
def test_what_does_not_go_with_swapd(scene: Scene, more: Mapping[str, Any], said: str) -> None:
    problem = refused(scene, {}, **more)
    assert problem.kind == "Unsupported"
    assert said in problem.message


def test_another_version_of_vllm(scene: Scene) -> None:
    engine = scene.process("talker")
    engine.imports("tests.vllm.another_version")
    with pytest.raises(EngineFailed) as failed:
        engine.start(**on_swapd(scene.models / "talker", scene.folder / "not asked"))
    assert failed.value.kind == "UnsupportedVersion"
    said = failed.value.message
    assert "are for vllm 0.30.x, 0.31.x, 0.32.x or 0.33.x, and this is 0.29.0" in said


def test_graphs_that_are_captured_in_loading_are_refused(scene: Scene) -> None:
    engine = scene.process("talker")
    engine.imports("tests.vllm.graphs_in_loading")
    options = on_swapd(scene.models / "talker", scene.daemon().folder)
    with pytest.raises(EngineFailed, match="set enforce_eager: true on this stage"):
        engine.start(**{**options, "hf_overrides": {"architectures": ["CapturingQwen2"]}})
