"""Three stages that stream, each an engine: their options, and the way of one request."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.guarantees.harness import Daemon
from tests.vllm.engine import DRIVES
from tests.vllm.engines import Engine, Scene, on_swapd, plain

#: Thinker, talker, code2wav: 147, 51 and 20 MiB.
NAMES = ("deep", "talker", "wave")
#: The largest, plus a quarter.
BUDGET = "184MiB"
ROOM_FOR_ALL = "256MiB"
#: The tokens of each for a request; 8 of the talker's make a sound.
TOKENS = (24, 64, 1)

HERE = "tests.vllm.streaming"
DRIVEN: Any = {DRIVES: f"{HERE}:StreamingEngine"}
SCHED = "vllm_omni.core.sched"
_AR: Mapping[str, Any] = {
    "scheduler_cls": f"{SCHED}.omni_ar_scheduler.OmniARScheduler",
    "worker_cls": "StreamsAR",
}
_GENERATION: Mapping[str, Any] = {
    "scheduler_cls": f"{SCHED}.omni_generation_scheduler.OmniGenerationScheduler",
    "worker_cls": "StreamsGeneration",
}
_COMMON: Mapping[str, Any] = {
    "distributed_executor_backend": "uni",
    "async_scheduling": False,
    "enable_prefix_caching": False,
}
#: By stage: its options, its architecture, and more fields of its `model_config`.
_STAGES: tuple[tuple[Mapping[str, Any], str, Mapping[str, Any]], ...] = (
    (_AR, "SamplingQwen2", {"custom_process_next_stage_input_func": f"{HERE}.thinker2talker"}),
    (_AR, "StreamingQwen2", {"custom_process_next_stage_input_func": f"{HERE}.talker2code2wav"}),
    (_GENERATION, "StreamingWave", {"worker_type": "generation", "engine_output_type": "audio"}),
)


#: Float32: answers do not depend on the other requests in a batch, which vary.
EXACT = {"dtype": "float32"}
#: As vLLM schedules on GPUs (`running_ahead.py`).
AHEAD = {
    "async_scheduling": True,
    "scheduler_cls": f"{SCHED}.omni_ar_scheduler.OmniARAsyncScheduler",
}


class Heard(NamedTuple):
    """The answers to one request, or to several at once."""

    #: The output of thinker and talker, and the sounds; of several, of each.
    said: list[Any]
    #: Seconds until the first sound was there, and until all stages had ended.
    first_s: float
    whole_s: float


def start(
    scene: Scene, daemon: Daemon | None, settings: Mapping[str, object], **options: object
) -> list[Engine]:
    """All three, ready; without a daemon they are plain vllm-omni's. `options`: of each engine."""
    engines = []
    for number, (name, (common, architecture, more)) in enumerate(zip(NAMES, _STAGES, strict=True)):
        model = scene.models / name
        extra = {"name": "SharedMemoryConnector", "extra": {"stage_id": number}}
        streams = {
            "async_chunk": True,
            "stage_id": number,
            "stage_connector_config": extra,
            "engine_output_type": "latent",
            "worker_type": "ar",
            **more,
        }
        given: dict[str, Any] = {
            **_COMMON,
            **common,
            **(options if common is _AR else {k: v for k, v in options.items() if k not in AHEAD}),
            "hf_overrides": {"architectures": [architecture]},
        }
        kind = given.pop("worker_cls")
        if daemon is None:
            arguments = plain(model, worker_cls=f"{HERE}.Plain{kind}", **given)
            arguments["additional_config"] = {}
        else:
            ours = {"order": list(NAMES), **settings}
            arguments = on_swapd(model, daemon.folder, ours, worker_cls=f"{HERE}.{kind}", **given)
        arguments["additional_config"] = {**arguments["additional_config"], "streams": streams}  # type: ignore[dict-item]
        engine = scene.process(name, multiprocessing=False, **DRIVEN)
        if given["async_scheduling"]:
            engine.imports("tests.vllm.running_ahead")
        engine.begin("start", **arguments)
        engines.append(engine)
    for engine in engines:
        engine.result()
    return engines


def ask(engines: list[Engine], number: int) -> Heard:
    """One request, which all stages are given at once, as vllm-omni's orchestrator does."""
    heard = ask_together(engines, [number])
    return heard._replace(said=heard.said[0])


def ask_together(engines: list[Engine], numbers: Sequence[int]) -> Heard:
    """Requests that come at the same time."""
    names = [f"swapd-{uuid.uuid4().hex}" for _ in numbers]  # shared memory is called after it
    began = time.time()  # noqa: TID251 - compared with other processes'
    first = [[5 + number, 6, 7, 8] for number in numbers]
    others = [[0] * 4 for _ in numbers]
    for engine, prompts, tokens in zip(engines, (first, others, others), TOKENS, strict=True):
        engine.begin("stream", names, prompts, tokens)
    ends = [engine.result() for engine in engines]
    (made,) = engines[-1].call("made")
    said = [
        [*(tokens[at] for tokens, _ in ends[:-1]), [sound for _, sound, of in made if name in of]]
        for at, name in enumerate(names)
    ]
    whole = max(ended for _, ended in ends)
    return Heard(said, made[0][0] - began, whole - began)
