"""Finds the weights of a stage that are not parameters but can move into swapd with them.

Kernels keep such weights in wrapper objects, on quantisation methods, in closures. Two kinds move:

- Aliases: tensors in the storage of a parameter, wherever they are kept.
- Tensors of a layer that processes its weights after loading (`Candidates`), if nothing seems to
  write to them, because a component is read-only. They are large, not one repeated value, not named
  like scratch memory, and unchanged by a dummy forward. A dummy forward does not run attention, so
  tensors of attention must also be named like a weight.
"""

import functools
import gc
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import compress
from math import prod
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from swapd_client.offload.copies import start_of

#: Bytes; smaller tensors are not worth a place in a component.
LARGE = 64 << 10

_SCRATCH = re.compile("workspace|scratch|buf|cache|(?<!b)lock|semaphore|counter|lora|state")

#: Names of weights: MLA has `W_UK_T`, and for AMX `_w_uk_packed`.
_WEIGHT = re.compile("weight|packed|^_?w_")

#: Python modules whose objects belong to the process and not to a layer.
_FOREIGN = (
    *("torch.", "vllm.config.", "vllm.distributed.", "transformers."),
    *("logging.", "threading.", "_thread."),
)

INPUT = ("input_size_per_partition", "input_size", "in_features")
OUTPUT = ("output_size_per_partition", "output_size", "out_features")
#: A layer with less than this share of its full size has no weight: formats have 2 of 32 bits or
#: more.
_NONE = 1 / 32

#: Greatest distance of a tensor from its layer, and length of a container.
_DEEP = 6
_LONG = 4096


class KernelTensor(NamedTuple):
    """A tensor that is not a parameter. `name`: its module's path, then `kept`."""

    name: str
    tensor: torch.Tensor
    #: Whether its layer may keep weights this way.
    of_layer: bool
    #: The path from its module, in lower case.
    kept: str


class Candidates:
    def __init__(self, models: Mapping[str, Module]) -> None:
        """Read the bytes of possible weights, before a dummy forward."""
        self.found = found_in(models)
        self._likely = [(one, _sum(one.tensor)) for one in self.found if _may_be_a_weight(one)]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors that can move into swapd, by name, after the dummy forward."""
        return {one.name: one.tensor for one, before in self._likely if _sum(one.tensor) == before}


def aliases_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    given = list(tensors)
    known = {id(tensor) for tensor in given}
    stores = {start_of(tensor) for tensor in given} - {0}
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    are_tensors = map(kinds.__contains__, map(type, objects))  # fast: of a million objects
    with torch._C.DisableTorchFunctionSubclass():  # ignore the behaviour of tensor subclasses
        found = [
            thing
            for thing in compress(objects, are_tensors)
            if id(thing) not in known and start_of(thing) in stores
        ]
    return sorted(found, key=lambda one: (one.data_ptr(), one.dtype.itemsize, tuple(one.shape)))


def width_of(layer: Module, names: Iterable[str]) -> int | None:
    widths = (getattr(layer, name, None) for name in names)
    return next((width for width in widths if isinstance(width, int)), None)


def packed_bytes(models: Mapping[str, Module], found: Iterable[KernelTensor]) -> int:
    """Return the bytes of linear layers that a kernel has packed where Python cannot see them."""
    packed = 0
    for key, model in models.items():
        for path, layer in model.named_modules(prefix=key):
            if whole := _whole_bytes(layer):
                inside = (one.tensor for one in found if one.name.startswith(f"{path}."))
                seen = sum(one.nbytes for one in (*layer.parameters(), *inside))
                packed += whole if seen < whole * _NONE else 0
    return packed


def _whole_bytes(layer: Module) -> int:
    widths = width_of(layer, INPUT), width_of(layer, OUTPUT)
    dtype = getattr(layer, "params_dtype", None)
    if getattr(layer, "quant_method", None) is None or None in widths or dtype is None:
        return 0
    return prod(filter(None, widths)) * int(dtype.itemsize)


def largest(left: Iterable[KernelTensor], count: int) -> list[KernelTensor]:
    by_store = {start_of(one.tensor): one for one in left if one.tensor.nbytes >= LARGE}
    return sorted(by_store.values(), key=lambda one: -one.tensor.nbytes)[:count]


def _may_be_a_weight(one: KernelTensor) -> bool:
    return (
        one.of_layer
        and one.tensor.nbytes >= LARGE
        and not _SCRATCH.search(one.kept)  # the whole path: also members of lists
        and not _is_one_value(one.tensor)
    )


def found_in(models: Mapping[str, Module]) -> list[KernelTensor]:
    seen = {id(one) for model in models.values() for one in model.parameters()}
    return [
        _outside(module, path, name, tensor)
        for key, model in models.items()
        for path, module in model.named_modules(prefix=key)
        for name, tensor in _reached(_attributes(module), path, seen, _DEEP)
    ]


def _outside(module: Module, path: str, name: str, tensor: torch.Tensor) -> KernelTensor:
    kept = name.removeprefix(path).lstrip(".").lower()
    return KernelTensor(name, tensor, _may_keep_weights(module, kept.rpartition(".")[2]), kept)


def _may_keep_weights(layer: Module, name: str) -> bool:
    if getattr(layer, "quant_method", None) is not None and not hasattr(layer, "kv_cache"):
        return True
    processed = hasattr(layer, "process_weights_after_loading")
    return processed and _WEIGHT.search(name) is not None


def _attributes(module: Module) -> dict[str, Any]:
    hidden = ("_parameters", "_modules", "_buffers", "_forward", "_backward", "_state")
    own = {name: value for name, value in vars(module).items() if not name.startswith(hidden)}
    return own | module._buffers


def _reached(
    things: Mapping[str, Any], path: str, seen: set[int], deep: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for key, thing in things.items():
        if id(thing) in seen or isinstance(thing, Module | type | types.ModuleType):
            continue
        name = f"{path}.{key}".lstrip(".")
        if issubclass(type(thing), torch.Tensor):
            seen.add(id(thing))
            if is_plain(thing) and start_of(thing):
                yield name, thing
        elif deep and (inner := inside(thing)):
            seen.add(id(thing))
            yield from _reached(inner, name, seen, deep - 1)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can move: it wraps no other, and no computation has made it."""
    kind = type(tensor)
    return (kind is torch.Tensor or issubclass(kind, torch.nn.Parameter)) and tensor.is_leaf


def inside(thing: Any) -> Mapping[str, Any]:
    """Return the objects that `thing` refers to, by name; {} for what belongs to the process."""
    if isinstance(thing, dict | list | tuple | set):
        if len(thing) >= _LONG:
            return {}
        items = thing.items() if isinstance(thing, dict) else enumerate(thing)
        return {str(key): value for key, value in items}
    for kind, inner in _KINDS:
        if isinstance(thing, kind):
            return inner(thing)
    if f"{type(thing).__module__}.".startswith(_FOREIGN):
        return {}
    return in_slots(thing) | getattr(thing, "__dict__", {})


def in_slots(thing: Any) -> dict[str, Any]:
    return {
        name: getattr(thing, name)
        for kind in type(thing).__mro__
        for name in _listed(vars(kind).get("__slots__", ()))
        if hasattr(thing, name)
    }


def _closure(function: types.FunctionType) -> dict[str, Any]:
    defaults = {one.name: one.default for one in inspect.signature(function).parameters.values()}
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return defaults | found


_KINDS: tuple[tuple[Any, Callable[[Any], Mapping[str, Any]]], ...] = (
    (str | bytes | int | float | None, lambda _: {}),
    (types.FunctionType, _closure),
    (types.MethodType, lambda method: {"self": method.__self__, "function": method.__func__}),
    (
        functools.partial,
        lambda call: {"function": call.func, "args": call.args, "keywords": call.keywords},
    ),
)


def _listed(names: str | Iterable[str]) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _sum(tensor: torch.Tensor) -> int:
    return int(_bytes(tensor).sum(dtype=torch.int64))


def _is_one_value(tensor: torch.Tensor) -> bool:
    low, high = _bytes(tensor).aminmax()
    return bool(low == high)
