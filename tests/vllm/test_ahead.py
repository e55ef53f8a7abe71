"""Three real engines of a pipeline, with room for two: the next one loads while one computes."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from swapd_client.vllm.neighbours import Neighbours, neighbours_of
from swapd_client.vllm.options import Options
from tests.guarantees.harness import Daemon
from tests.vllm.engines import (
    REQUESTS,
    TOKENS,
    Engine,
    Nursery,
    Scene,
    await_leases_back,
    by_component,
    on_swapd,
)
from tests.vllm.swaps import whole
from tests.vllm.test_omni import on_omni

Expected = Mapping[str, list[list[list[int]]]]

#: Models of 54, 51 and 39 MiB.
ORDER = ("thinker", "talker", "code2wav")
ROOM_FOR_TWO = "108MiB"
COMING = ("absent", "loading", "revoking", "writing back")
NEXT = dict(zip(ORDER, (*ORDER[1:], ORDER[0]), strict=True))


def copied(daemon: Daemon) -> list[str]:
    return [whole(copy.name) for copy in daemon.watch.seen("CopyIn")]


def await_in(daemon: Daemon, name: str) -> None:
    while any(one.state in COMING for one in by_component(daemon)[name]):
        daemon.await_record("CopiedIn")


def run(daemon: Daemon, engines: list[Engine], expected: Expected) -> None:
    """Each request goes through all stages; from the second on, each stage is loaded in time."""
    for number, prompts in enumerate(REQUESTS):
        for engine in engines:
            before = len(copied(daemon))
            engine.ask(prompts, TOKENS)
            engine.step(1)
            await_in(daemon, NEXT[engine.label])
            assert engine.finish() == expected[engine.label][number]
            engine.step(1)  # without requests: it ends the turn, as in a server
            came = copied(daemon)[before:]
            if number:
                assert came == [NEXT[engine.label]], "of the next stage, while this one computed"
            await_leases_back(daemon)
    status = daemon.status()
    assert status.bytes_out == 0
    assert status.peak_bytes <= status.budget_bytes < sum(c.nbytes for c in status.components)


def test_a_stage_is_there_when_its_request_comes(scene: Scene, expected: Expected) -> None:
    daemon = scene.daemon(budget=ROOM_FOR_TWO)
    settings = {"order": list(ORDER)}
    engines = scene.start(
        *(on_swapd(scene.models / name, daemon.folder, settings) for name in ORDER)
    )
    run(daemon, engines, expected)


def test_it_is_as_well_where_vllm_omni_says_the_order(scene: Scene, expected: Expected) -> None:
    daemon = scene.daemon(budget=ROOM_FOR_TWO)
    engines = on_omni(scene, daemon.folder, *ORDER, kind="StagedWorker")
    run(daemon, engines, expected)


def test_stages_that_are_busy_at_once_say_what_they_say_alone(
    scene: Scene, expected: Expected
) -> None:
    """Prefetching delays nobody for long, and causes no swap inside a request."""
    daemon = scene.daemon()  # room for one
    settings = {"order": list(ORDER)}
    engines = scene.start(
        *(on_swapd(scene.models / name, daemon.folder, settings) for name in ORDER)
    )
    for engine in engines:
        engine.begin("serve", REQUESTS, TOKENS)
    for engine in engines:
        assert [tokens for tokens, _, _ in engine.result()] == expected[engine.label]
    assert daemon.status().bytes_out == 0


def config(hf_config: Any, stage: int, name: str, arch: str) -> Any:
    return SimpleNamespace(hf_config=hf_config, stage_id=stage, model_stage=name, model_arch=arch)


def compare_orders() -> None:
    """Runs in a process that has vllm-omni."""
    from transformers import Qwen2_5OmniConfig, Qwen2Config
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeConfig

    two, three = "Qwen2_5OmniForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"
    speaks, captions = (Qwen3OmniMoeConfig(enable_audio_output=out) for out in (True, False))
    for model, found in (
        (config(Qwen2_5OmniConfig(), 0, "thinker", two), (("talker",), ("code2wav",))),
        (config(Qwen2_5OmniConfig(), 1, "talker", two), (("code2wav",), ("thinker",))),
        (config(speaks, 2, "code2wav", three), (("thinker",), ("talker",))),
        (config(captions, 0, "thinker", three), ((), ())),
        (config(Qwen2Config(), 0, "fused_thinker_talker", "MiMoAudioModel"), (("code2wav",), ())),
        (config(Qwen2Config(), 0, "thinker", "Qwen2ForCausalLM"), ((), ())),
    ):
        assert neighbours_of(Options(), model, "any") == Neighbours(*found), model


def test_the_order_of_the_real_pipelines_is_known(nursery: Nursery) -> None:
    nursery.call(f"{__name__}:{compare_orders.__name__}")
