"""vllm-omni's workers on a CPU for plain engines, and models: one reads weights while it samples.

Importing this registers the models.
"""

import dataclasses
from typing import Any

from vllm import ModelRegistry
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm_omni.config import OmniModelConfig
from vllm_omni.config.pipeline_registry import register_pipeline
from vllm_omni.config.stage_config import PipelineConfig, StagePipelineConfig
from vllm_omni.model_executor.models.output_templates import OmniOutput

from swapd_client.vllm.worker import SwapdWorkerMixin
from tests.vllm.omni_server import workers

#: A pipeline of three test models, registered like those of vllm-omni.
STAGES = ("thinker", "talker", "code2wav")
PIPELINE = PipelineConfig(
    model_type="qwen2",
    stages=tuple(
        StagePipelineConfig(
            stage_id=number,
            model_stage=name,
            input_sources=(number - 1,) if number else (),
            final_output=True,
        )
        for number, name in enumerate(STAGES)
    ),
)


class SamplingQwen2(Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2, called as by vllm-omni. Sampling reads all weights, as a talker's does."""

    prefer_model_sampler = True

    def forward(
        self,
        input_ids: Any,
        positions: Any,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **of_omni: Any,
    ) -> Any:
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    def sample(self, logits: Any, sampling_metadata: Any) -> None:
        """Leave sampling to the runner's own sampler."""
        for parameter in self.parameters():
            parameter.view(-1)[0].item()


class WaveQwen2(Qwen2ForCausalLM):  # type: ignore[misc]
    """Called as code2wav is: one step makes a sound of all tokens of each request."""

    have_multimodal_outputs = True

    def compute_logits(self, *given: Any) -> Any:
        """As the model around all stages of an omni model: asks the inner one, which has none."""
        return self.model.compute_logits(*given)

    def forward(
        self,
        input_ids: Any,
        positions: Any,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        seq_token_counts: Any = None,
        **of_omni: Any,
    ) -> Any:
        hidden = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        if seq_token_counts is None:
            return hidden
        ends = hidden[: sum(seq_token_counts)].float().mean(1).split(seq_token_counts)
        return OmniOutput(text_hidden_states=hidden, multimodal_outputs={"audio": list(ends)})


class PlainARWorker(workers.PlainARWorker):
    """Without swapd."""

    output_type = "text"
    worker_type = "ar"

    def init_device(self) -> None:
        for field in dataclasses.fields(OmniModelConfig):  # a plain engine's config lacks some
            if not hasattr(self.model_config, field.name):
                object.__setattr__(self.model_config, field.name, _default(field))
        object.__setattr__(self.model_config, "engine_output_type", self.output_type)
        object.__setattr__(self.model_config, "worker_type", self.worker_type)
        # vLLM has its second runner by default on a GPU, and vllm-omni the first all the same
        type(self.vllm_config).use_v2_model_runner = True
        super().init_device()

    def runs(self) -> list[str]:
        """The classes of the runner, by name."""
        return [kind.__name__ for kind in type(self.model_runner).__mro__]


class ARWorker(SwapdWorkerMixin, PlainARWorker):
    """As `swapd_client.vllm.omni.ARWorker`."""


class StagedWorker(ARWorker):
    """A worker that knows its stage of `PIPELINE` from its configuration, as vllm-omni's do."""

    def init_device(self) -> None:
        super().init_device()
        name = self.vllm_config.additional_config["swapd"]["component"]
        object.__setattr__(self.model_config, "stage_id", STAGES.index(name))
        object.__setattr__(self.model_config, "model_stage", name)


class PlainGenerationWorker(PlainARWorker):
    """Without swapd; keeps its output."""

    model_runner_cls = workers.GenerationRunner
    output_type = "audio"
    worker_type = "generation"

    def sample_tokens(self, grammar_output: Any) -> Any:
        result = super().sample_tokens(grammar_output)
        self._sounds = [one["audio"].tolist() for one in result.multimodal_outputs or ()]
        return result

    def sounds(self) -> list[list[float]]:
        """The output of the last step, for each request."""
        return self._sounds


class GenerationWorker(SwapdWorkerMixin, PlainGenerationWorker):
    """As `swapd_client.vllm.omni.GenerationWorker`."""


class NoLeaseWhileSampling(ARWorker):
    """Releases its lease one call too early."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._swapd.note((), list(self._swapd.turns.keeping.in_flight))
        self._swapd.end()
        return super().sample_tokens(grammar_output)


class NoLeaseWhileExecuting(ARWorker):
    """Takes no lease for a step."""

    def execute_model(self, scheduler_output: Any) -> Any:
        return PlainARWorker.execute_model(self, scheduler_output)


def _default(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    default: Any = None if field.default is dataclasses.MISSING else field.default
    return default.default if type(default).__name__ == "FieldInfo" else default


register_pipeline(PIPELINE)
ModelRegistry.register_model("SamplingQwen2", SamplingQwen2)
ModelRegistry.register_model("WaveQwen2", WaveQwen2)
