"""The tensors of a model that stay in private memory when it is attached, and the report. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import Module
from torch.nn.parameter import UninitializedBuffer

from swapd.shared.units import size
from swapd_client.memory.tensors import nbytes_of
from swapd_client.offload.automatic import MAY_STAY

#: A warning needs at least this much, however small the model.
_LEAST_BYTES = 1 << 20
#: So many are named, the largest first.
_NAMED = 4
_PARAMETERS = "Name them in components=, or give components='.': the whole model as one component"
_BUFFERS = (
    "A forward may write to buffers, so they are not lent: make those that never change parameters "
    "(requires_grad=False)"
)


@dataclass
class Staying:
    """Bytes by path: of outermost modules without components, or of components."""

    parameters: Counter[str] = field(default_factory=Counter)
    buffers: Counter[str] = field(default_factory=Counter)
    #: Paths of modules whose weights are in an object that exposes no tensors.
    packed: list[str] = field(default_factory=list)

    def line(self) -> str:
        """A part of the summary; "" if nothing stays."""
        said = " and ".join(
            f"{size(sum(counted.values()))} of {what}"
            for what, counted in (("other parameters", self.parameters), ("buffers", self.buffers))
            if counted
        )
        return f"{said} stay where they are" if said else ""

    def warnings(self, lent_bytes: int, *, named: bool) -> Iterator[str]:
        """Warnings for a user who expects the model's memory to be in swapd now.

        `lent_bytes`: of its components. `named`: the user named these, and knows the rest.
        """
        if self.packed:
            yield (
                f"{_some(self.packed)} hold weights packed (torch.ao's quantised modules), which "
                "stay in private memory. Quantise with torchao instead: its weights are tensors"
            )
        parameters = Counter[str]() if named else self.parameters
        stays = sum(parameters.values()) + sum(self.buffers.values())
        if stays < _LEAST_BYTES or stays <= MAY_STAY * (lent_bytes + stays):
            return
        for what, counted, advice in (
            ("parameters", parameters, _PARAMETERS),
            ("buffers", self.buffers, _BUFFERS),
        ):
            nbytes = sum(counted.values())
            if nbytes > MAY_STAY * stays:  # else the other kind is the problem
                where = _largest(counted)
                yield f"{size(nbytes)} of {what} stay in private memory: {where}. {advice}"


def staying(
    modules: Mapping[str, Module], found: Sequence[str], left: Mapping[str, int]
) -> Staying:
    """Find the tensors that stay private.

    `modules`: all modules of the model, by path. `found`: the paths of components. `left`: bytes of
    the parameters in no component, by path.
    """
    result = Staying()
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
            if buffer is None or id(buffer) in seen or isinstance(buffer, UninitializedBuffer):
                continue
            seen.add(id(buffer))
            if nbytes := nbytes_of(buffer):
                result.buffers[_place(f"{path}.{name}" if path else name, found)] += nbytes
    return result


def _place(path: str, found: Sequence[str]) -> str:
    """The outermost module around a tensor that contains no component; or the component."""
    parts = path.split(".")
    for n in range(1, len(parts)):
        where = ".".join(parts[:n])
        if where in found or not any(other.startswith(f"{where}.") for other in found):
            return where
    return path


def _largest(counted: Counter[str]) -> str:
    return _some([f"{path} ({size(nbytes)})" for path, nbytes in counted.most_common()])


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
