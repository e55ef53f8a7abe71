"""Model Runner V2, which vLLM has by default on GPUs: engines with it on swapd say what they say
without, token for token; by vLLM's own code, its kernels run by Triton's interpreter.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.vllm import engines, test_kv, test_kv_lost
from tests.vllm import test_pipeline_parallel as pipeline
from tests.vllm.engines import REQUESTS, TOKENS, Scene, by_component, on_swapd, plain
from tests.vllm.second_runner import WORKER, SecondRunnerNursery
from tests.vllm.test_kv import ALONE, BUDGET, CACHE, NAMES, PROMPTS, Said
from tests.vllm.test_kv_features import RUNNING_AHEAD
from tests.vllm.test_tensor_parallel import HEARS_AHEAD, lose_often

#: Of `REQUESTS`, so many: the interpreter is slow.
FEW = REQUESTS[:3]


@pytest.fixture(scope="module")
def second() -> Iterator[SecondRunnerNursery]:
    made = SecondRunnerNursery()
    yield made
    made.close()


@pytest.fixture
def scene(models: Path, second: SecondRunnerNursery) -> Iterator[Scene]:
    with engines.scene(models, second) as made:
        yield made


class Answers(NamedTuple):
    """The answers of vLLM with this runner, without swapd."""

    few: Said
    prompts: Said
    alone: Said


@pytest.fixture(scope="module")
def answers(models: Path, second: SecondRunnerNursery) -> Answers:
    options = test_kv.options(prefixes=False)
    with engines.scene(models, second) as made:
        started = made.start(
            *(
                plain(made.models / name, worker_cls="tests.vllm.warming.PlainWorker", **options)
                for name in NAMES
            )
        )
        for one in started:
            assert one.call("runner") == ["vllm.v1.worker.gpu.model_runner"]
        return Answers(
            *(
                {one.label: [one.generate(few, test_kv.TOKENS) for few in asked] for one in started}
                for asked in (FEW, PROMPTS, ALONE)
            )
        )


def test_engines_take_turns_and_lose_nothing(scene: Scene, answers: Answers) -> None:
    """Their start included, for which vLLM takes steps inside of a call that has the lease."""
    daemon = scene.daemon()
    both = scene.start(
        *(on_swapd(scene.models / name, daemon.folder, worker_cls=WORKER) for name in NAMES)
    )
    for one in both:
        assert one.call("runner") == ["vllm.v1.worker.gpu.model_runner"]
        assert one.call("turns") == [[0, 0]], "nothing of the warm-up is left"
        assert "before its weights move" not in one.log
    before = daemon.status().evictions
    for number, prompts in enumerate(FEW):
        for one in both:
            assert one.generate(prompts, test_kv.TOKENS) == answers.few[one.label][number]
    status = daemon.status()
    assert status.evictions > before
    assert status.bytes_out == 0
    for one in both:
        one.shut_down()


@pytest.mark.parametrize("loser", [0, 1])
def test_pipelines_take_turns_and_compute_lost_contents_again(scene: Scene, loser: int) -> None:
    """With the scheduler that vLLM has on GPUs, whose steps rank 0 begins without the tokens of the
    last ones; one rank's saves fail."""
    of_engine = {**pipeline.PIPELINE, "kv_cache_memory_bytes": CACHE, "async_scheduling": True}
    model, few = scene.models / "thinker", pipeline.REQUESTS[:2]
    (without,) = scene.start(
        plain(model, worker_cls="tests.vllm.warming.PlainWorker", **of_engine),
        imports=RUNNING_AHEAD,
    )
    expected = [without.generate(prompts, TOKENS) for prompts in few]
    without.close()
    programs = {loser: {"program": test_kv_lost.FAILING}}
    daemons = [
        scene.daemon(budget=test_kv_lost.BUDGET, residency_factor=0, **programs.get(rank, {}))
        for rank in range(2)
    ]
    settings = {"kv": "auto", "finish_within_s": 0}
    here = {"worker_cls": WORKER, "scheduler_cls": HEARS_AHEAD, **of_engine}
    place = daemons[0].folder.with_name("d{gpu}")
    (engine,) = scene.start(on_swapd(model, place, settings, **here), imports=RUNNING_AHEAD)
    assert engine.call("runner") == ["vllm.v1.worker.gpu.model_runner"] * 2
    for answers in lose_often(daemons[loser], engine, few):
        assert answers == expected
    assert "WorkerProc hit an exception" not in engine.log


def test_requests_in_flight_keep_their_cache_from_turn_to_turn(
    scene: Scene, answers: Answers
) -> None:
    daemon = scene.daemon(budget=BUDGET, residency_factor=0.5, residency_bound=0.5)
    test_kv.serve(
        scene,
        daemon,
        "auto",
        expected=answers.prompts,
        prefixes=False,
        seen=lambda: test_kv.copied_out(daemon).keys() == test_kv.CACHES,
        what="a turn of each ended inside of requests, so that its cache was saved",
        finish_within_s=0,
        worker_cls=WORKER,
        async_scheduling=True,
    )


def test_a_cache_is_dropped_between_requests_and_nothing_is_copied_out(
    scene: Scene, answers: Answers
) -> None:
    daemon = scene.daemon(budget=BUDGET)
    test_kv.serve(
        scene,
        daemon,
        "drop",
        expected=answers.alone,
        prefixes=False,
        finish_within_s=10,
        prompts=ALONE,
        multiprocessing=True,
        worker_cls=WORKER,
    )
    assert daemon.status().bytes_out == 0
    assert set(by_component(daemon)) >= {f"{name}.kv" for name in NAMES}
