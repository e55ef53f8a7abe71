"""A hash of everything in a model but the bytes of its parameters.

It covers the kinds, places and attributes of parameters, the bytes of all other tensors, every
number, string and flag in the modules and in objects that they refer to, and the source files of
the modules' classes, but no state in compiled code. Equal models may have different fingerprints,
because some objects have addresses or counters.
"""

import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from swapd_client.memory.layout import Buffer
from swapd_client.offload.copies import start_of
from swapd_client.vllm.kernel_tensors import in_slots, inside, is_plain

#: A model with more objects may reach its whole process.
MOST = 1_000_000
_DEEP = 200

_VALUES = frozenset({str, int, float, bool, type(None), torch.dtype, torch.device, torch.Size})
_VALUES_TOO = (str, bytes, int, float, complex, Enum, torch.layout)
_NAMED = (type, types.BuiltinFunctionType, types.ModuleType, weakref.ref)
#: Where vLLM's classes are whose tensors belong to a step: nobody has written to them yet.
_OF_STEPS = "vllm.lora.punica_wrapper."


class UnhashableState(Exception):
    """A model has state that cannot be hashed."""


def fingerprint(models: Mapping[str, Module]) -> str:
    """Raises: UnhashableState. Reads the bytes of all tensors but parameters."""
    walk = _Walk(models)
    with torch.no_grad():
        walk.through(models)
    return walk.digest()


class _Walk:
    def __init__(self, models: Mapping[str, Module]) -> None:
        self._said: list[str] = []
        self._kinds: dict[type, str] = {}
        #: Number and object by id. The reference keeps the id from being reused.
        self._seen: dict[int, tuple[int, object]] = {}
        parameters = [one for model in models.values() for one in model.parameters()]
        #: Number of each storage of parameters, by address.
        stores = dict.fromkeys(start_of(one) for one in parameters)
        self._stores = {start: number for number, start in enumerate(stores) if start}

    def digest(self) -> str:
        return hashed("\0".join(self._said).encode())

    def through(self, thing: Any, deep: int = 0) -> None:
        kind, note = type(thing), self._said.append
        if kind not in self._kinds:
            self._kinds[kind] = f"{kind.__module__}.{kind.__qualname__} {source_of(kind)}"
        note(self._kinds[kind])
        if kind in _VALUES or isinstance(thing, _VALUES_TOO):
            return note(repr(thing))
        if (known := self._seen.get(id(thing))) is not None:
            return note(f"again {known[0]}")
        self._seen[id(thing)] = len(self._seen), thing
        if len(self._seen) > MOST or deep > _DEEP:
            raise UnhashableState("it has too many objects, or they nest too deep")
        for name, inner in self._inside(thing):
            note(name)
            self.through(inner, deep + 1)
        note("end")

    def _note(self, *said: object) -> None:
        self._said.append(repr(said))

    def _inside(self, thing: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, torch.Tensor):
            self._note_tensor(thing)
            yield from vars(thing).items()
        elif isinstance(thing, set | frozenset):
            yield from (("", repr(one)) for one in sorted(thing, key=repr))
        elif isinstance(thing, list | tuple):
            yield from (("", one) for one in thing)
        elif isinstance(thing, Mapping) and not isinstance(thing, types.MappingProxyType):
            for key, value in list(thing.items()):
                yield "", key
                yield "", value
        elif _is_named(thing):
            self._note(getattr(thing, "__module__", ""), getattr(thing, "__qualname__", ""))
        elif isinstance(thing, Module):
            yield from list((in_slots(thing) | vars(thing)).items())
        elif callable(bytes_of := getattr(thing, "tobytes", None)):  # arrays, memoryviews
            self._note(hashed(bytes_of()))
        else:
            if isinstance(thing, types.FunctionType):
                self._note(thing.__module__, thing.__qualname__)
            yield from list(inside(thing).items())

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        self._note(tensor.dtype, tuple(tensor.shape), str(tensor.device))
        if tensor.is_meta or not tensor.numel():
            return
        if not is_plain(tensor):
            raise UnhashableState(f"it has a {type(tensor).__name__}, which may wrap others")
        self._note(tensor.stride())
        if (store := self._stores.get(start_of(tensor))) is not None:
            self._note("parameter", store, tensor.storage_offset())
        else:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
            self._note(hashed(flat.numpy().data))


def _is_named(thing: Any) -> bool:
    return isinstance(thing, _NAMED) or type(thing).__module__.startswith(_OF_STEPS)


def hashed(data: Buffer) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def source_of(kind: type) -> str:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or not issubclass(kind, Module):
        return ""
    with suppress(OSError):
        status = Path(file).stat()
        return f"{status.st_size} {status.st_mtime_ns}"
    return ""
