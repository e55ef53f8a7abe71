"""Importing this has Wan's DiT note a number that loading computes from its weights."""

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

sys.modules.setdefault("av", ModuleType("av"))  # not installed, see diffusion.py

from vllm_omni.diffusion.models.wan2_2.wan2_2_transformer import (  # noqa: E402
    WanTransformer3DModel,
)

_load = WanTransformer3DModel.load_weights


def _and_sum(model: Any, weights: Iterable[Any]) -> Any:
    done = _load(model, weights)
    model.total = float(sum(one.double().sum() for one in model.parameters()))
    return done


WanTransformer3DModel.load_weights = _and_sum
