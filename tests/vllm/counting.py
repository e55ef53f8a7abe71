"""Workers that count the tensors which vLLM reads from files, and what may go wrong beside that."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import vllm
from vllm import envs
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader import default_loader
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

import swapd_client
from swapd_client.vllm import kept_start, kept_weights
from swapd_client.vllm.cpu import CPUWorker

_of_vllm = default_loader.safetensors_weights_iterator
_read: list[str] = []


def _counted(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    for name, tensor in _of_vllm(*args, **kwargs):
        _read.append(name)
        yield name, tensor


default_loader.safetensors_weights_iterator = _counted


class Worker(CPUWorker):
    def tensors_read(self) -> int:
        return len(_read)

    def keys(self) -> dict[str, str]:
        """Its key, under "", and the keys after a change of each thing that makes the weights."""
        found = {"": kept_weights.key_of(self), "again": kept_weights.key_of(self)}
        for name, change in self._changes().items():
            with change:
                found[name] = kept_weights.key_of(self)
        self.__class__, mine = Other, self.__class__
        found["worker"] = kept_weights.key_of(self)
        self.__class__ = mine
        return found

    def _changes(self) -> dict[str, AbstractContextManager[Any]]:
        config = self.vllm_config
        model, hf = config.model_config, config.model_config.hf_config
        changes: dict[str, AbstractContextManager[Any]] = {
            "reader": patch.object(kept_start, "READER", 99),
            "swapd": patch.object(swapd_client, "__version__", "99"),
            "torch": patch.object(torch, "__version__", "99"),
            "vllm": patch.object(vllm, "__version__", "99"),
            "transformers": patch.object(__import__("transformers"), "__version__", "99"),
            "rank": patch.object(self, "rank", 1),
            "cpu": patch.object(torch.backends.cpu, "get_cpu_capability", lambda: "another"),
            "ranks": patch.object(config.parallel_config, "world_size", 2),
            "shards": patch.object(config.parallel_config, "tensor_parallel_size", 2),
            "pipeline": patch.object(config.parallel_config, "pipeline_parallel_size", 2),
            "architecture": patch.object(hf, "architectures", ["Another"]),
            "size": patch.object(hf, "rms_norm_eps", 1e-5),
            "loader": patch.object(config.load_config, "load_format", "safetensors"),
            "additional_config": patch.dict(config.additional_config, {"another": 1}),
            "adapters": patch.object(config, "lora_config", "of rank 8"),
            "a variable": patch.object(envs, "compile_factors", lambda: {"VLLM_X": 1}),
        }
        others = {"revision": "main", "dtype": torch.float16, "model_impl": "transformers"}
        others |= {"quantization": "fp8", "quantization_config": {"ignore": ["lm_head"]}}
        return changes | {name: patch.object(model, name, to) for name, to in others.items()}


class Other(Worker):
    """The same under another name."""


class Loaded(Worker):
    """Its model has a number that loading computes from the weights."""

    def load_model(self, **how: Any) -> None:
        load = Qwen2ForCausalLM.load_weights

        def and_sum(model: Any, weights: Any) -> Any:
            done = load(model, weights)
            model.total = float(model.model.embed_tokens.weight.float().sum())
            return done

        with patch.object(Qwen2ForCausalLM, "load_weights", and_sum):
            super().load_model(**how)


class Processed(Worker):
    """Its layers keep, in an object, copies of their weights that processing makes."""

    def load_model(self, **how: Any) -> None:
        process = UnquantizedLinearMethod.process_weights_after_loading

        def and_copy(method: Any, layer: Any) -> None:
            process(method, layer)
            layer.helper = {"row": layer.weight[0].clone()}

        with patch.object(UnquantizedLinearMethod, "process_weights_after_loading", and_copy):
            super().load_model(**how)


class Checked(Worker):
    """Its layers refuse weights that nobody has read, as a check of their values does."""

    def load_model(self, **how: Any) -> None:
        process = UnquantizedLinearMethod.process_weights_after_loading

        def and_check(method: Any, layer: Any) -> None:
            if not _read:
                raise ValueError("a scale is 0")
            process(method, layer)

        with patch.object(UnquantizedLinearMethod, "process_weights_after_loading", and_check):
            super().load_model(**how)
