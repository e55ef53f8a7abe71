"""A diffusion stage that is driven as an engine is (`engine.py`).

vllm-omni's own executor, worker and runner; only the platform and the pipeline are of the tests.
"""

import hashlib
from typing import Any

PIPELINE = "tests.vllm.toy_pipeline.ToyPipeline"


class Diffusion:
    """One stage. What its methods return must be JSON."""

    def __init__(self) -> None:
        self._config: Any = None
        self._executor: Any = None

    def start(self, *, native: bool = False, pipeline: Any = None, **given: Any) -> None:
        """Build the stage. `native`: its pipeline is known to vllm-omni by name."""
        from vllm_omni.diffusion.data import OmniDiffusionConfig
        from vllm_omni.diffusion.executor.abstract import DiffusionExecutor
        from vllm_omni.diffusion.registry import register_diffusion_model
        from vllm_omni.plugins import load_omni_general_plugins

        load_omni_general_plugins()  # as a stage's process does

        module, _, name = PIPELINE.rpartition(".")
        custom = dict(pipeline or {})
        if native:
            register_diffusion_model(name, module, name)
        else:
            custom["pipeline_class"] = PIPELINE
        self._config = OmniDiffusionConfig.from_kwargs(
            **{"enforce_eager": True, **given},
            model_class_name=name,
            dtype="float32",
            num_gpus=1,
            custom_pipeline_args=custom,
        )
        self._executor = DiffusionExecutor.get_class(self._config)(self._config)

    def draw(self, seed: int, prompt: str = "go", lora: str = "") -> str:
        """A request, with the adapter in folder `lora`; what its picture's bytes come to."""
        from vllm_omni.diffusion.request import OmniDiffusionRequest
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams
        from vllm_omni.lora.request import LoRARequest

        adapter = LoRARequest(lora_name=lora, lora_int_id=1, lora_path=lora) if lora else None
        request = OmniDiffusionRequest(
            prompt={"prompt": prompt},
            sampling_params=OmniDiffusionSamplingParams(seed=seed, lora_request=adapter),
            request_id=f"r{seed}",
        )
        output = self.call("execute_model", request, self._config, None).output
        return hashlib.sha256(output.contiguous().numpy().tobytes()).hexdigest()

    def draw_many(self, seeds: list[int]) -> list[str]:
        return [self.draw(seed) for seed in seeds]

    def call(self, method: str, *arguments: Any) -> Any:
        return self._executor.collective_rpc(method, args=arguments, unique_reply_rank=0)

    def build_again(self, **pipeline: Any) -> None:
        """Have another pipeline in the place of this one."""
        self.call("re_init_pipeline", {"pipeline_class": PIPELINE, **pipeline})

    def shut_down(self) -> None:
        self._executor.shutdown()
