"""Tensors of an attached model that stay in private memory: trained parameters, buffers, the rest.

Weights in swapd are read-only, so trained parameters stay private, and a step of an optimizer over
other parameters is refused.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedBuffer
from torch.optim import Optimizer

from swapd.shared.units import size
from swapd_client.errors import InvalidSource, NotWhileAttached
from swapd_client.memory.movable import UNINITIALISED, is_wrapper, nbytes_of
from swapd_client.offload.automatic import MAY_STAY
from swapd_client.offload.ownership import components_at, own_parameters
from swapd_client.offload.search import matching
from swapd_client.weights.safetensors import listed

#: Argument of `attach`: True for all that require gradients, or names. None: see `trained_of`.
Trainable = bool | Sequence[str] | None

#: By id, since `==` on tensors computes.
Trained = dict[int, torch.Tensor]


def trained_of(
    components: Iterable[Iterable[Module]], modules: Mapping[str, Module], trainable: Trainable
) -> Trained:
    """Return the parameters that stay private.

    `components`: the modules of each. `modules`: by path. Default, in grad mode: the parameters
    that require gradients, in each component where they have less than half of the bytes that
    could. A model that was built, and is not trained, requires gradients of nearly all that could.
    Quantised weights could not. Raises: InvalidSource for a name without a parameter.
    """
    if trainable is False or (trainable is None and not torch.is_grad_enabled()):
        return {}
    if not isinstance(trainable, bool | None):
        return _named(modules, trainable)
    trained: Trained = {}
    for component in components:
        parameters = (p for module in component for _, p in own_parameters(module))
        with_bytes: Trained = {id(p): p for p in filter(_has_bytes, parameters)}
        trained |= _trained_in(with_bytes, everything=bool(trainable))
    return trained


def _trained_in(parameters: Trained, *, everything: bool) -> Trained:
    mine = {key: p for key, p in parameters.items() if p.requires_grad}
    could = {key: p for key, p in parameters.items() if _could_be_trained(p)}
    return mine if everything or 2 * _nbytes(mine) < _nbytes(mine | could) else {}


def _could_be_trained(parameter: torch.Tensor) -> bool:
    numbers = parameter.is_floating_point() or parameter.is_complex()
    return numbers and not is_wrapper(parameter)


def _named(modules: Mapping[str, Module], names: Iterable[str]) -> Trained:
    there = {
        f"{path}.{name}".lstrip("."): parameter
        for path, module in modules.items()
        for name, parameter in own_parameters(module)
        if _has_bytes(parameter)
    }
    trained: Trained = {}
    for name in names:
        found = {id(p): p for p in matching(name, there).values()}
        if not found:
            raise InvalidSource(
                f"trainable: no parameter is called, or matches, {name!r}; they are called like "
                f"{next(iter(there), 'nothing')!r}"
            )
        trained |= found
    return trained


def _has_bytes(parameter: torch.Tensor) -> bool:
    return not (parameter.is_meta or isinstance(parameter, UNINITIALISED))


def _nbytes(parameters: Trained) -> int:
    return sum(map(nbytes_of, parameters.values()))


def move(trained: Trained, device: torch.device) -> None:
    """Move parameters as `module.to()` would, to the device that computes with the weights."""
    for parameter in trained.values():
        if parameter.device != device and not is_wrapper(parameter):
            parameter.data = parameter.data.to(device)


# --- optimizers --------------------------------------------------------------------------


def refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
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
    found = (one for one in components_at([parameter]) if one.part and not one.part.mutable)
    return next((one.name for one in found), None)


#: Fewer bytes are no reason for a warning, however small the model.
_LEAST_BYTES = 1 << 20
_NAMED = 4
_PARAMETERS = "Name them in components=, or give components='.': the whole model as one component"
_BUFFERS = (
    "A forward may write to buffers, so they are not lent: make those that never change parameters "
    "(requires_grad=False)"
)


@dataclass
class PrivateBytes:
    """Bytes by path: of components, or of outermost modules without components."""

    parameters: Counter[str] = field(default_factory=Counter)
    buffers: Counter[str] = field(default_factory=Counter)
    #: Modules whose weights are in an object that exposes no tensors.
    packed: list[str] = field(default_factory=list)

    def line(self) -> str:
        said = " and ".join(
            f"{size(counted.total())} of {what}"
            for what, counted in (("other parameters", self.parameters), ("buffers", self.buffers))
            if counted
        )
        return f"{said} stay where they are" if said else ""

    def warnings(self, lent_bytes: int, *, named: bool) -> Iterator[str]:
        """Yield warnings for a user who expects the model's memory to be in swapd now.

        `lent_bytes`: of components. `named`: the user named these, and knows what stays.
        """
        if self.packed:
            yield (
                f"{listed(self.packed, _NAMED)} hold weights packed (torch.ao's quantised "
                "modules), which stay in private memory. Quantise with torchao instead: its "
                "weights are tensors"
            )
        parameters = Counter[str]() if named else self.parameters
        stays = parameters.total() + self.buffers.total()
        if stays < _LEAST_BYTES or stays <= MAY_STAY * (lent_bytes + stays):
            return
        for what, counted, advice in (
            ("parameters", parameters, _PARAMETERS),
            ("buffers", self.buffers, _BUFFERS),
        ):
            nbytes = counted.total()
            if nbytes > MAY_STAY * stays:  # else the other kind is the problem
                all_of_it = [f"{path} ({size(n)})" for path, n in counted.most_common()]
                where = listed(all_of_it, _NAMED)
                yield f"{size(nbytes)} of {what} stay in private memory: {where}. {advice}"


def staying(
    modules: Mapping[str, Module], found: Sequence[str], left: Mapping[str, int]
) -> PrivateBytes:
    """Return the bytes that stay private.

    `modules`: all modules of the model, by path. `found`: paths of components. `left`: bytes of the
    parameters in no component, by path.
    """
    result = PrivateBytes()
    for path, nbytes in left.items():
        result.parameters[_place(path, found)] += nbytes
    seen: set[int] = set()
    for path, module in modules.items():
        if id(module) in seen:
            continue
        seen.add(id(module))
        if any(isinstance(value, torch.ScriptObject) for value in vars(module).values()):
            result.packed.append(path)
        for name, buffer in module._buffers.items():
            if not isinstance(buffer, UninitializedBuffer | None) and id(buffer) not in seen:
                seen.add(id(buffer))
                result.buffers[_place(f"{path}.{name}".lstrip("."), found)] += nbytes_of(buffer)
    return result


def _place(path: str, found: Sequence[str]) -> str:
    """Return the path of the component around a tensor, or of the outermost module without any."""
    parts = path.split(".")
    for n in range(1, len(parts)):
        where = ".".join(parts[:n])
        if where in found or not any(other.startswith(f"{where}.") for other in found):
            return where
    return path
