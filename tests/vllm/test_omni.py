"""vllm-omni's own model runners, under strict isolation, with room for one."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.engines import (
    MIB,
    NOTHING,
    REQUESTS,
    TOKENS,
    Engine,
    EngineDied,
    Nursery,
    Scene,
    on_swapd,
    plain,
    rounds_until,
)
from tests.vllm.test_kv import CACHES
from tests.vllm.test_kv_lost import lose, names

Expected = Mapping[str, list[list[list[int]]]]

OMNI: dict[str, Any] = {"distributed_executor_backend": "uni", "async_scheduling": False}
AR: dict[str, Any] = {**OMNI, "hf_overrides": {"architectures": ["SamplingQwen2"]}}
GENERATION: dict[str, Any] = {
    **OMNI,
    "hf_overrides": {"architectures": ["WaveQwen2"]},
    "scheduler_cls": "vllm_omni.core.sched.omni_generation_scheduler.OmniGenerationScheduler",
}
#: A prompt that is computed in several parts.
PARTS = [*range(10, 170)]


def process(scene: Scene, name: str) -> Engine:
    engine = scene.process(name)
    engine.imports("tests.vllm.omni")
    return engine


def worker(name: str) -> str:
    return f"tests.vllm.omni.{name}"


def on_omni(
    scene: Scene,
    endpoint: Path,
    *names: str,
    kind: str = "ARWorker",
    settings: Mapping[str, object] = NOTHING,
    **more: object,
) -> list[Engine]:
    engines = [process(scene, name) for name in names]
    for name, engine in zip(names, engines, strict=True):
        options = {"worker_cls": worker(kind), **AR, **more}
        engine.begin("start", **on_swapd(scene.models / name, endpoint, settings, **options))
    for engine in engines:
        engine.result()
    return engines


def test_two_stages_take_turns_and_say_what_plain_vllm_says(
    scene: Scene, expected: Expected
) -> None:
    daemon = scene.daemon()
    engines = on_omni(scene, daemon.folder, "thinker", "talker")
    assert "GPUARModelRunner" in engines[0].call("runs")[0]
    for engine in engines:
        engine.begin("serve", REQUESTS, TOKENS)
    for engine in engines:
        assert [tokens for tokens, _, _ in engine.result()] == expected[engine.label]
    status = daemon.status()
    assert status.evictions > 0
    assert status.bytes_out == 0


def test_their_kv_caches_take_turns_with_their_weights(scene: Scene, expected: Expected) -> None:
    daemon = scene.daemon(budget="96MiB", residency_factor=0.5, residency_bound=0.5)
    settings = {"kv": "auto", "finish_within_s": 0.0}
    cache: dict[str, Any] = {"kv_cache_memory_bytes": 32 * MIB, "enable_prefix_caching": False}
    engines = on_omni(scene, daemon.folder, "thinker", "talker", settings=settings, **cache)
    for number in rounds_until(
        lambda: names(daemon, "Evicted") >= CACHES and daemon.status().bytes_out > 0,
        "both caches left, and what was in one was saved",
    ):
        for engine in engines * number:
            engine.begin("serve", REQUESTS, TOKENS)
        for engine in engines * number:
            assert [tokens for tokens, _, _ in engine.result()] == expected[engine.label]
    assert daemon.status().bytes_out < len(daemon.watch.seen("CopyOut")) * 8 * MIB


def test_what_of_a_cache_could_not_be_saved_is_computed_again(scene: Scene) -> None:
    """By vllm-omni's scheduler, which learns it from a step that does not count."""
    daemon = scene.daemon(
        program="tests.guarantees.failing_saves",
        budget="160MiB",
        residency_factor=0.5,
        residency_bound=0.5,
    )
    more: dict[str, Any] = {
        "scheduler_cls": "vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler",
        "kv_cache_memory_bytes": 32 * MIB,
        "enable_prefix_caching": False,
        "dtype": "float32",  # last bits differ if all is computed at once; they decide no token
    }
    alone = {name: process(scene, name) for name in ("thinker", "talker")}
    for name, engine in alone.items():
        options = {"worker_cls": worker("PlainARWorker"), **AR, **more}
        engine.begin("start", **plain(scene.models / name, **options))
    for engine in alone.values():
        engine.result()
    said = {
        name: [engine.generate(prompts[:1], TOKENS) for prompts in REQUESTS]
        for name, engine in alone.items()
    }
    settings = {"kv": "auto", "finish_within_s": 0.0}
    engines = on_omni(scene, daemon.folder, "thinker", "talker", settings=settings, **more)
    for number in rounds_until(
        lambda: names(daemon, "Lost") == CACHES, "a cache of each could not be saved"
    ):
        for engine in engines * number:
            engine.begin("serve", [prompts[:1] for prompts in REQUESTS], TOKENS)
        for engine in engines * number:
            assert [tokens for tokens, _, _ in engine.result()] == said[engine.label]


@pytest.mark.parametrize("careless", ["NoLeaseWhileSampling", "NoLeaseWhileExecuting"])
def test_a_lease_that_ends_too_early_is_a_fault(scene: Scene, careless: str) -> None:
    """So the tests above would fail with it."""
    (engine,) = on_omni(scene, scene.daemon().folder, "talker", kind=careless)
    with pytest.raises(EngineDied):
        engine.generate(REQUESTS[0], TOKENS)


def sounds(engine: Engine, prompts: list[list[int]]) -> Any:
    """A generation stage's output for each prompt: it has no tokens."""
    assert engine.generate(prompts, 1) == [[] for _ in prompts]
    (made,) = engine.call("sounds")
    return made


def test_a_generation_stage_takes_turns_with_an_ar_stage(scene: Scene, expected: Expected) -> None:
    """It makes in one step the same as plain vllm-omni."""
    alone, stage = process(scene, "code2wav"), process(scene, "code2wav")
    model = scene.models / "code2wav"
    alone.begin("start", **plain(model, worker_cls=worker("PlainGenerationWorker"), **GENERATION))
    daemon = scene.daemon()
    options = {"worker_cls": worker("GenerationWorker"), **GENERATION}
    stage.begin("start", **on_swapd(model, daemon.folder, **options))
    alone.result()
    stage.result()
    (talker,) = on_omni(scene, daemon.folder, "talker")
    for prompts, said in zip(REQUESTS[:3], expected["talker"], strict=False):
        assert talker.generate(prompts, TOKENS) == said
        made = sounds(stage, prompts)
        assert made == sounds(alone, prompts)
        assert [len(sound) for sound in made] == [len(prompt) for prompt in prompts]
    status = daemon.status()
    assert status.evictions >= 5, "each time, the other had to go"
    assert status.bytes_out == 0
    assert "cannot run" not in stage.log, "all of its layers were checked"


def test_a_generation_stage_computes_again_what_a_prompt_had_in_a_cache_that_is_gone(
    scene: Scene,
) -> None:
    """Only a prompt computed in parts reads earlier parts from the cache.

    Though vLLM's default is a runner that could not.
    """
    model = scene.models / "code2wav"
    parts = {"max_num_batched_tokens": 32, "kv_cache_memory_bytes": 8 * MIB, "block_size": 32}
    more = {**GENERATION, **parts, "enable_prefix_caching": False}
    alone, stage = process(scene, "code2wav"), process(scene, "code2wav")
    alone.begin("start", **plain(model, worker_cls=worker("PlainGenerationWorker"), **more))
    failing = "tests.guarantees.failing_saves"
    daemon = scene.daemon(budget="96MiB", program=failing, residency_factor=0)
    options = {"worker_cls": worker("GenerationWorker"), **more}
    settings = {"kv": "auto", "finish_within_s": 0.0}
    stage.begin("start", **on_swapd(model, daemon.folder, settings, **options))
    alone.result()
    stage.result()
    stage.ask([PARTS], 1)
    stage.step(2)  # the first step schedules, or computes, at most a part
    lose(daemon, "96MiB")
    stage.finish()
    (made,) = stage.call("sounds")
    assert made == sounds(alone, [PARTS])
    assert "1 request(s) rescheduled" in stage.log
    assert sounds(stage, [[5, 6, 7]]) == sounds(alone, [[5, 6, 7]])


def compare_classes() -> None:
    """Compares swapd's classes with vllm-omni's, in a process that has those."""
    from vllm_omni.worker.gpu_ar_worker import GPUARWorker
    from vllm_omni.worker.gpu_generation_worker import GPUGenerationWorker

    from swapd_client.vllm.omni import ARWorker, GenerationWorker
    from swapd_client.vllm.refusals import Unsupported
    from swapd_client.vllm.worker import SwapdWorkerMixin, Worker
    from swapd_client.vllm.worker_start import WorkerStart

    later = {"discard", "compute_weight_checksums", "reset_weights"}  # since vLLM 0.31, and 0.32
    for mine, theirs in (ARWorker, GPUARWorker), (GenerationWorker, GPUGenerationWorker):
        assert mine.__mro__[:4] == (mine, SwapdWorkerMixin, WorkerStart, theirs)
        assert mine.model_runner_cls is theirs.model_runner_cls
        for name, method in (vars(WorkerStart) | vars(SwapdWorkerMixin)).items():
            if callable(method) and not name.startswith("_") and name not in later:
                assert callable(getattr(theirs, name)), name
    for wrong, kind, right in (
        (Worker, "ar", "ARWorker"),
        (ARWorker, "generation", "GenerationWorker"),
        (GenerationWorker, "ar", "ARWorker"),
    ):
        worker: Any = object.__new__(wrong)
        worker.model_config = SimpleNamespace(model_stage="talker", worker_type=kind)
        worker.parallel_config = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
        with pytest.raises(Unsupported, match=rf"'talker'.*{wrong.__name__}: .*omni\.{right}$"):
            worker.init_device()


def test_the_classes_that_a_stage_names_are_vllm_omnis_with_swapds_first(nursery: Nursery) -> None:
    """The classes themselves run on a GPU only."""
    nursery.call(f"{__name__}:{compare_classes.__name__}")


def test_a_worker_is_in_the_log_also_where_plugins_are_left_out(scene: Scene) -> None:
    engine = scene.process("talker", VLLM_PLUGINS="")
    flags: dict[str, Any] = {"cpu_offload_gb": 0.01}
    engine.start(**on_swapd(scene.models / "talker", scene.daemon().folder, **flags))
    assert "in swapd at " in engine.log
    assert "swapd streams these layers" in engine.log, "before it loads"
