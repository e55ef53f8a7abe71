"""A diffusion stage with the commands of an engine (`engine.py`).

vllm-omni's own executor, worker and runner; only the platform and the pipeline are of the tests.
"""

import hashlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.vllm.engine import Program

PIPELINE = "tests.vllm.toy_pipeline.ToyPipeline"


class Diffusion(Program):
    """One stage. Its methods return values for JSON."""

    def __init__(self) -> None:
        self._config: Any = None
        self._executor: Any = None
        self._read: list[str] = []

    def configured(self, pipeline: str, path: str, model: str) -> dict[str, Any]:
        """vllm-omni's configuration of a deploy file's first stage, before a worker sees it."""
        from vllm_omni.config.omni_config import VllmOmniConfig
        from vllm_omni.config.pipeline_registry import resolve_pipeline_config
        from vllm_omni.config.stage_config import load_deploy_config
        from vllm_omni.engine.stage_init_utils import build_diffusion_config

        config = VllmOmniConfig.from_pipeline_config(
            resolve_pipeline_config(pipeline, None),
            user_deploy_config=load_deploy_config(path),
            cli_overrides={"model": model},
        )
        metadata = SimpleNamespace(
            stage_id=0,
            default_sampling_params=None,
            cfg_kv_collect_func=None,
            stage_input_payload_keys=(),
            stage_output_payload_keys=(),
        )
        made = build_diffusion_config(model, config.stage_configs[0], metadata)
        names = ("worker_extension_cls", "additional_config", "num_gpus", "enable_cpu_offload")
        return {name: getattr(made, name) for name in names}

    def start(self, *, known: str = "", pipeline: Any = None, **given: Any) -> None:
        """Build the stage. `known`: the pipeline is one of vllm-omni's own."""
        from vllm_omni.diffusion.data import OmniDiffusionConfig
        from vllm_omni.diffusion.executor.abstract import DiffusionExecutor
        from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
        from vllm_omni.plugins import load_omni_general_plugins

        from swapd_client.vllm.cpu import keep_weights

        weights = DiffusersPipelineLoader._get_weights_iterator

        def counted(*given: Any, **more: Any) -> Iterator[tuple[str, Any]]:
            for name, tensor in weights(*given, **more):
                self._read.append(name)
                yield name, tensor

        DiffusersPipelineLoader._get_weights_iterator = counted
        load_omni_general_plugins()  # as in a stage's process

        keep_weights()
        name = PIPELINE.rpartition(".")[2]
        custom = dict(pipeline or {})
        if known:
            name = known
            # vllm-omni writes films to files with it; no test does, and it is not installed
            sys.modules.setdefault("av", ModuleType("av"))
        else:
            custom["pipeline_class"] = PIPELINE
        self._config = OmniDiffusionConfig.from_kwargs(
            **{"enforce_eager": True, **given},
            model_class_name=name,
            dtype="float32",
            num_gpus=1,
            custom_pipeline_args=custom,
        )
        if known:
            self._config.enrich_config()  # from its files, as in a stage's process
        self._executor = DiffusionExecutor.get_class(self._config)(self._config)

    def tensors_read(self) -> int:
        """How many vllm-omni's loader has read from files."""
        return len(self._read)

    def draw(self, seed: int, prompt: str = "go", lora: str = "") -> str:
        """Make a request, with the adapter in folder `lora`; returns a digest of its picture."""
        request = _request(seed, prompt, lora)
        return _digest(self.call("execute_model", request, self._config, None))

    def draw_many(self, seeds: list[int]) -> list[str]:
        return [self.draw(seed) for seed in seeds]

    def call(self, method: str, *arguments: Any) -> Any:
        return self._executor.collective_rpc(method, args=arguments, unique_reply_rank=0)

    def sleep(self, level: int) -> list[Any]:
        """Give it vllm-omni's task; returns the status, and the bytes that are free."""
        said = self.call("handle_sleep_task", {"level": level, "task_id": "sleep"})
        return [said.status, said.freed_bytes]

    def wake_up(self, *tags: str) -> str:
        said = self.call("handle_wake_task", {"tags": list(tags) or None, "task_id": "wake"})
        return str(said.status)

    def film(self, seed: int, steps: int) -> str:
        """Request a short film; returns a digest of its frames."""
        request = _request(seed, "a boat at sea", negative="a sea")
        size: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5}
        for name, value in {**size, "num_inference_steps": steps, "output_type": "pt"}.items():
            setattr(request.sampling_params, name, value)
        return _digest(self.call("execute_model", request, self._config, None))

    def draw_by_steps(self, seeds: list[int]) -> list[str]:
        """Make requests that are computed together, a step at a time."""
        from vllm_omni.diffusion.sched.interface import (
            CachedRequestData,
            DiffusionSchedulerOutput,
            NewRequestData,
        )

        requests = [_request(seed) for seed in seeds]
        names = [request.request_id for request in requests]
        new = [NewRequestData(one.request_id, one) for one in requests]
        cached, done = CachedRequestData.make_empty(), dict[str, str]()
        for step in range(100):
            output = DiffusionSchedulerOutput(step, new, cached, set(), len(names), 0)
            for one in self.call("execute_stepwise", output).runner_outputs:
                if one.finished:
                    done[one.request_id] = _digest(one.result)
            if len(done) == len(names):
                break
            new, cached = [], CachedRequestData([name for name in names if name not in done])
        return [done[name] for name in names]

    def build_again(self, **pipeline: Any) -> None:
        """Replace the pipeline with this one."""
        self.call("re_init_pipeline", {"pipeline_class": PIPELINE, **pipeline})

    def shut_down(self) -> None:
        self._executor.shutdown()


def _request(seed: int, prompt: str = "go", lora: str = "", negative: str = "") -> Any:
    from vllm_omni.diffusion.request import OmniDiffusionRequest
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams
    from vllm_omni.lora.request import LoRARequest

    adapter = LoRARequest(lora_name=lora, lora_int_id=1, lora_path=lora) if lora else None
    return OmniDiffusionRequest(
        prompt={"prompt": prompt, "negative_prompt": negative},
        sampling_params=OmniDiffusionSamplingParams(seed=seed, lora_request=adapter),
        request_id=f"r{seed}",
    )


def _digest(drawn: Any) -> str:
    assert drawn.error is None, drawn.error
    tensor = drawn.output if drawn.media is None else drawn.media.video.tensor
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
