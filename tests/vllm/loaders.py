"""The tensors of a checkpoint that vllm-omni's own loaders take for each stage.

A loader that sorts tensors by stages runs on a stand-in for its model, without weights.
"""

import ast
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
from transformers import CONFIG_MAPPING
from vllm_omni.config.pipeline_registry import OMNI_PIPELINES
from vllm_omni.model_executor import models
from vllm_omni.model_executor.models.registry import _OMNI_MODELS

from swapd.plan.sizes import STAGES

_PREFIXES = tuple(f"{name}." for name in STAGES)


class Loader(NamedTuple):
    """The loader of one stage. `shown`: names of tensors; `taken`: those that it keeps."""

    model_type: str
    stage: str
    shown: list[str]
    taken: list[str]


def all_of_them(folder: str) -> list[Loader]:
    """The loaders that vllm-omni ships whose code names tensors of several stages.

    `folder`: of a model without files.
    """
    found = []
    for model_type, stage, (package, module, name) in _stages():
        shown = _named_in(Path(models.__file__).parent / package / f"{module}.py", name)
        if len({one.partition(".")[0] for one in shown}) > 1:
            kind = getattr(import_module(f"{models.__name__}.{package}.{module}"), name)
            found.append(Loader(model_type, stage, shown, _taken(kind, stage, shown, folder)))
    return found


def _stages() -> Iterator[tuple[str, str, tuple[str, str, str]]]:
    """Each model type and stage whose tensors may have its prefix, and the class that loads it."""
    for key, entry in OMNI_PIPELINES.items():
        pipeline = entry(CONFIG_MAPPING[key]()) if callable(entry) else entry
        for stage in pipeline.stages:
            if stage.model_stage in STAGES:
                yield key, stage.model_stage, _OMNI_MODELS[stage.model_arch or pipeline.model_arch]


def _named_in(source: Path, name: str) -> list[str]:
    """A tensor for each text in a class's loader that begins with a stage's prefix.

    Not every module can be imported here.
    """
    classes = [n for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.ClassDef)]
    methods = [n for one in classes if one.name == name for n in one.body]
    loader = [n for n in methods if isinstance(n, ast.FunctionDef) and n.name == "load_weights"]
    found = [n.value for one in loader for n in ast.walk(one) if isinstance(n, ast.Constant)]
    texts = {text for text in found if isinstance(text, str) and text.startswith(_PREFIXES)}
    return sorted(f"{text}probe" if text.endswith(".") else text for text in texts)


def _taken(kind: Any, stage: str, shown: list[str], folder: str) -> list[str]:
    """Those of the tensors `shown` that the loader gives to the stage's part, or keeps itself."""
    tensors = [torch.full((1, 1), float(number)) for number, _ in enumerate(shown)]
    kept: list[torch.Tensor] = []

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *more: object) -> set[str]:
        kept.extend(tensor for _, tensor in weights)
        return set()

    own, model = MagicMock(load_weights=load_weights), MagicMock(model_stage=stage)
    for name in STAGES:
        here = stage == name or (stage, name) == ("code2wav", "token2wav")
        setattr(model, name, own if here else None)
    model._module_device = lambda module: torch.device("cpu")
    model.vllm_config.model_config.model = folder
    kind.load_weights(model, zip(shown, tensors, strict=True))
    modules = [one for one in vars(model).values() if isinstance(one, torch.nn.Module)]
    kept += [parameter for module in modules for parameter in module.parameters()]
    return sorted(shown[int(tensor.item())] for tensor in kept)
