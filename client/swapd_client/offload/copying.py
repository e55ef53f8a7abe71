"""Copies of modules whose weights are in swapd: plain modules, with weights of their own."""

import copy
from collections.abc import Iterator
from typing import Any

import torch

from swapd_client.memory.tensors import is_wrapper
from swapd_client.offload.copies import Copies
from swapd_client.offload.ours import without_ours


def tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The module's own tensors: parameters, buffers, attributes, and tensors in lists and dicts."""
    for value in vars(module).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            inside = value.values() if isinstance(value, dict) else value
            yield from (one for one in inside if isinstance(one, torch.Tensor))


def stand_in(
    tensor: torch.Tensor, copies: Copies, device: torch.device | None = None
) -> torch.Tensor:
    """The tensor to pickle instead of `tensor`: an equal one, private, on the CPU or `device`."""
    with torch.inference_mode(False):
        made = copies.of(tensor).to(device or "cpu")
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        if not is_wrapper(tensor):  # a wrapper's attributes are its inner tensors
            vars(made).update(vars(tensor))
        return made


def private(tensor: torch.Tensor, copies: Copies) -> torch.Tensor:
    """As `copy.deepcopy` of an ordinary tensor."""
    return copy.deepcopy(stand_in(tensor, copies, tensor.device))


def copied(module: torch.nn.Module, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy` of a module without swapd's attributes. `memo` has its tensors' copies."""
    if (own := getattr(type(module), "__deepcopy__", None)) is not None:
        made = own(module, memo)
        object.__setattr__(made, "__dict__", without_ours(vars(made)))
        return made
    reduced: Any = type(module).__reduce_ex__(module, 4)
    make, arguments, *rest = reduced
    state: Any = rest[0] if rest else None
    made = memo[id(module)] = make(*copy.deepcopy(arguments, memo))
    if isinstance(state, dict):
        state = without_ours(state)
    # a second item: the state in slots
    elif isinstance(state, tuple) and isinstance(state[0], dict):
        state = without_ours(state[0]), *state[1:]
    if state is not None:
        made.__setstate__(copy.deepcopy(state, memo))
    return made
