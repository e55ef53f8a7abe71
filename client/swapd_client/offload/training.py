"""Parameters that are trained stay private: weights in swapd are read-only.

Lives here: which parameters those are, and the error for an optimizer of other parameters.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from swapd_client.errors import InvalidSource, NotWhileAttached
from swapd_client.memory import ranges
from swapd_client.memory.tensors import extent, inner_names, is_wrapper

#: An argument of `attach`: all that require gradients, none, or those of these names; None: see
#: `trained_of`.
Trainable = bool | Sequence[str] | None

#: By id, since `==` on tensors computes.
Trained = dict[int, torch.Tensor]


def trained_of(
    components: Iterable[Iterable[Module]], modules: Mapping[str, Module], trainable: Trainable
) -> Trained:
    """The parameters that stay private. `components`: the modules of each; `modules`: by path.

    Default: in grad mode, the parameters that require gradients, in components where they are less
    than half of those that could. A model that was built, and is not trained, requires gradients of
    all, or nearly all, that could. Quantised weights could not.

    Raises: InvalidSource for a name without a parameter.
    """
    if trainable is False or (trainable is None and not torch.is_grad_enabled()):
        return {}
    if trainable is not None and trainable is not True:
        return _named(modules, trainable)
    trained: Trained = {}
    for component in components:
        parameters: Trained = {
            id(p): p for m in component for p in m._parameters.values() if _has_bytes(p)
        }
        mine = {key: p for key, p in parameters.items() if p.requires_grad}
        could = {key: p for key, p in parameters.items() if p.requires_grad or _could_require(p)}
        if trainable or 2 * _nbytes(mine) < _nbytes(could):
            trained |= mine
    return trained


def _named(modules: Mapping[str, Module], names: Iterable[str]) -> Trained:
    there = {
        f"{path}.{name}".lstrip("."): parameter
        for path, module in modules.items()
        for name, parameter in module._parameters.items()
        if _has_bytes(parameter)
    }
    trained: Trained = {}
    for name in names:
        found = {id(p): p for path, p in there.items() if path == name or fnmatchcase(path, name)}
        if not found:
            raise InvalidSource(
                f"trainable: no parameter is called, or matches, {name!r}; they are called like "
                f"{next(iter(there), 'nothing')!r}"
            )
        trained |= found
    return trained


def _has_bytes(parameter: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return not (
        parameter is None
        or parameter.is_meta
        or isinstance(parameter, torch.nn.parameter.UninitializedParameter)
    )


def _could_require(parameter: torch.Tensor) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not is_wrapper(parameter)


def _nbytes(parameters: Trained) -> int:
    return sum(p.numel() * p.element_size() for p in parameters.values())


def move(trained: Trained, device: torch.device) -> None:
    """Move them to the device that computes with the other weights, as `module.to()`."""
    for parameter in trained.values():
        if parameter.device != device and not is_wrapper(parameter):
            parameter.data = parameter.data.to(device)


# --- optimizers --------------------------------------------------------------------------


def refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise NotWhileAttached before a step that would write to swapd's weights."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and (owner := _owner(parameter)) is not None:
                raise NotWhileAttached(
                    f"{type(optimizer).__name__}.step() would write to weights of {owner!r}, which "
                    "are in swapd, and read-only. Nothing was changed. Trained parameters must "
                    "stay private: attach(..., trainable=True) for all that require gradients, or "
                    'names or patterns of parameters ("*.lora_*")'
                )


def _owner(parameter: Parameter) -> str | None:
    """The component that owns a parameter as read-only."""
    if is_wrapper(parameter):
        owners = (_owner(getattr(parameter, name)) for name in inner_names(parameter))
        return next((owner for owner in owners if owner is not None), None)
    found = ranges.find(*extent(parameter))
    if found is None or found.part is None or found.part.mutable:
        return None
    return found.name
