"""Importing this has pipelines refuse weights that nobody has read, as a check of values does."""

from typing import Any

from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

_process = DiffusersPipelineLoader._process_weights_after_loading


def _and_check(loader: Any, model: Any, *given: Any, **more: Any) -> None:
    if not loader.counter_after_loading_weights:
        raise ValueError("a scale is 0")
    _process(loader, model, *given, **more)


DiffusersPipelineLoader._process_weights_after_loading = _and_check
