"""Importing this has vLLM make 8-bit floats of a tensor, for which its CPU build has no kernel."""

from unittest.mock import patch

import torch
from vllm import _custom_ops


def scaled(
    tensor: torch.Tensor, scale: torch.Tensor, *_: object, **__: object
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = torch.float8_e4m3fn
    most = torch.finfo(kind).max
    return (tensor.float() / scale).clamp(-most, most).to(kind), scale


patch.object(_custom_ops, "scaled_fp8_quant", scaled).start()
