"""A pipeline of vllm-omni's that streams (`async_chunk: true`), on a CPU, and its driver.

Schedulers, runners, the chunk transfer adapter and its connector are vllm-omni's own; each stage is
an engine in a process of its own. The orchestrator is left out, because its worker classes refuse a
CPU: the test gives each request to all stages at once, as that does. Importing this registers the
models.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm import ModelRegistry
from vllm_omni.data_entry_keys import CodesStruct, IdsStruct, MetaStruct, OmniPayloadStruct

from tests.vllm.engine import Engine
from tests.vllm.omni import (
    ARWorker,
    GenerationWorker,
    PlainARWorker,
    PlainGenerationWorker,
    SamplingQwen2,
    WaveQwen2,
)

#: Tokens of the talker that code2wav makes one sound of.
FRAMES = 8


# --- what goes from stage to stage: functions as vllm-omni's `stage_input_processors` has ---------


def thinker2talker(
    transfer_manager: Any,
    multimodal_output: Any,
    request: Any,
    is_finished: bool = False,
    new_token_ids: Sequence[int] = (),
) -> OmniPayloadStruct:
    """A chunk for each step, with its tokens."""
    return OmniPayloadStruct(ids=IdsStruct(output=list(new_token_ids)))


def talker2code2wav(
    transfer_manager: Any,
    multimodal_output: Any,
    request: Any,
    is_finished: bool = False,
    new_token_ids: Sequence[int] = (),
) -> OmniPayloadStruct | None:
    """A chunk for each `FRAMES` tokens, and for the rest at the end."""
    said = transfer_manager.code_prompt_token_ids[request.external_req_id]
    said.extend(new_token_ids)
    if not said or (len(said) < FRAMES and not is_finished):
        return None
    codes = torch.tensor(said)
    said.clear()
    return OmniPayloadStruct(
        codes=CodesStruct(audio=codes),
        meta=MetaStruct(left_context_size=0, finished=torch.tensor(is_finished)),
    )


# --- models --------------------------------------------------------------------------------------


class StreamingQwen2(SamplingQwen2):
    """Its output depends on each chunk that it has got."""

    has_preprocess = True

    def preprocess(self, input_ids: Any, input_embeds: Any, **info: Any) -> Any:
        chunk = (info.get("ids") or {}).get("output") or [0]
        heard = self.model.embed_tokens(torch.as_tensor(chunk, device=input_ids.device)).mean(0)
        return input_ids, self.model.embed_tokens(input_ids) + heard, {}


class StreamingWave(WaveQwen2):
    """One sound for each chunk."""


# --- workers -------------------------------------------------------------------------------------


class _Streams:
    """Mixed into a worker class, first: which stage it is comes from `additional_config`."""

    model_config: Any
    vllm_config: Any

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        for key, value in self.vllm_config.additional_config["streams"].items():
            object.__setattr__(self.model_config, key, value)


class PlainStreamsAR(_Streams, PlainARWorker):
    output_type = "latent"


class StreamsAR(_Streams, ARWorker):
    output_type = "latent"


class _Sounds(_Streams):
    """Keeps each sound, when it was made (Unix time, seconds), and of which request."""

    _sounds: list[list[float]]

    def sample_tokens(self, grammar_output: Any) -> Any:
        result = super().sample_tokens(grammar_output)  # type: ignore[misc]
        now = time.time()  # noqa: TID251 - compared with other processes'
        made = zip(result.req_ids, self._sounds, strict=True)
        self.__dict__.setdefault("_made", []).extend((now, one, of) for of, one in made)
        return result

    def made(self) -> list[tuple[float, list[float], str]]:
        """The sounds since the last call."""
        made: list[tuple[float, list[float], str]] = self.__dict__.pop("_made", [])
        return made


class PlainStreamsGeneration(_Sounds, PlainGenerationWorker):
    pass


class StreamsGeneration(_Sounds, GenerationWorker):
    pass


# --- driving -------------------------------------------------------------------------------------


class StreamingEngine(Engine):
    """One stage."""

    def stream(
        self, names: Sequence[str], prompts: Sequence[Sequence[int]], tokens: int
    ) -> tuple[list[list[int]], float]:
        """Requests with these names in all stages: the tokens of each, and the time when all had
        ended (Unix time)."""
        from vllm import SamplingParams

        settings = SamplingParams(
            max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        engine = self._llm.llm_engine
        said: dict[str, list[int]] = {}
        for name, prompt in zip(names, prompts, strict=True):
            said[name] = []
            engine.add_request(name, {"prompt_token_ids": list(prompt)}, settings)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            for output in outputs:
                said[output.request_id] = list(output.outputs[0].token_ids)
            if not outputs:
                time.sleep(0.001)  # as a server's loop does, which has nothing scheduled
        ended = time.time()  # noqa: TID251
        core = engine.engine_core.engine_core
        while core.scheduler.has_requests() or core.batch_queue:
            engine.step()  # of nothing: as a server's engine does, it says that the requests ended
        return list(said.values()), ended


ModelRegistry.register_model("StreamingQwen2", StreamingQwen2)
ModelRegistry.register_model("StreamingWave", StreamingWave)
