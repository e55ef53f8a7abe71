"""Casts and moves of a module whose weights are in swapd: allowed only if they change nothing."""

from collections.abc import Callable
from typing import Any

import torch

from swapd_client.errors import NotWhileAttached


def refuse_move(
    name: str, tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor], component: str
) -> None:
    """Raise NotWhileAttached unless `fn`, the argument of `Module._apply`, returns its input.

    Tries `fn` on a few elements of the tensor's kind, since the tensor may be absent.
    """
    probe = _like(tensor)
    shared = probe.is_shared()
    with torch.no_grad():
        made: Any = fn(probe)
    if made is probe and made.is_shared() == shared:
        return
    what = "be moved to shared memory" if made is probe else _difference(probe, made)
    raise NotWhileAttached(
        f"{name!r} cannot {what}: its memory is swapd's, as part of {component!r}. Nothing was "
        "changed. detach() first, then do this, then attach() again"
    )


def _difference(probe: torch.Tensor, made: torch.Tensor) -> str:
    if made.device != probe.device:
        return f"be moved from {probe.device} to {made.device}"
    if made.dtype != probe.dtype:
        return f"be cast from {probe.dtype} to {made.dtype}"
    return "be replaced"


def _like(tensor: torch.Tensor) -> Any:
    """A small tensor of the same type and order of dimensions, on the same device."""
    shape = [min(n, 2) for n in tensor.shape]
    strides = [0] * len(shape)
    step = 1
    for at in sorted(range(len(shape)), key=lambda i: (tensor.stride(i), -i)):
        strides[at] = step
        step *= max(shape[at], 1)
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
