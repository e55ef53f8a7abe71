"""Copies of tensors and modules whose bytes may not be on the device.

Copies of a clean component need no lease and no device memory: they map its host copy privately,
and pages are copied on write. A mutable component's latest bytes may be on the device only, so they
are copied under a lease. Copies and pickles of a module are without swapd's attributes (`Marker`).
"""

import copy
import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from inspect import getattr_static
from typing import Any

import torch

from swapd.shared import vm
from swapd_client.memory.movable import inner_names, is_wrapper
from swapd_client.memory.part import Part
from swapd_client.memory.tensors import view
from swapd_client.session.session import Session

#: Memory that is freed with the last tensor over it.
_Memory = ctypes.Array[ctypes.c_ubyte]


def start_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage; 0 if there is none."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.numel() else 0
    except (RuntimeError, NotImplementedError):  # sparse, fake, uninitialised
        return 0


@dataclass(eq=False)
class Copies:
    """Makes private copies on the CPU. Tensors on one storage get copies on one storage."""

    session: Session
    #: Finds a component by address.
    find: Callable[[int], Part | None]
    #: Acquires all of these components.
    hold: Callable[[], AbstractContextManager[object]]
    #: Mapped host copies, by component; None if it has been unregistered.
    _masters: dict[str, _Memory | None] = field(default_factory=dict, init=False)
    #: The copied storages, by the address of the original.
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict, init=False)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a private copy of a tensor; of a wrapper, one around copies of its inner tensors.

        A tensor outside all components is returned itself, detached. Blocks for a lease if the
        component is mutable, and raises as `Client.acquire`.
        """
        with torch.inference_mode(False), torch.no_grad():
            if is_wrapper(tensor):
                return self._of_wrapper(tensor)
            part = self.find(start_of(tensor))
            if part is None:
                return tensor.detach()
            storage = self._storage(part, tensor.untyped_storage())
            place = int(tensor.storage_offset()) * tensor.element_size()
            return view(storage, place, tensor)

    def _of_wrapper(self, tensor: torch.Tensor) -> torch.Tensor:
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(tensor, name) for name in names}
        inner |= {name: self.of(inner[name]) for name in inner_names(tensor)}
        copy: torch.Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, context, tensor.size(), tensor.stride()
        )
        return copy

    def _storage(self, part: Part, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        key = storage.data_ptr()
        if key not in self._storages:
            if part.mutable:
                with self.hold():
                    copied = _copied(storage)
            elif (master := self._master(part)) is not None:
                copied = torch.frombuffer(
                    master, dtype=torch.uint8, offset=key - part.address, count=storage.nbytes()
                )
            else:
                copied = _copied(storage)
            self._storages[key] = copied.untyped_storage()
        return self._storages[key]

    def _master(self, part: Part) -> _Memory | None:
        if part.name not in self._masters:
            memory: _Memory | None = None
            if (address := self.session.registry.map_master(part)) is not None:
                memory = (ctypes.c_ubyte * part.span).from_address(address)
                vm.free_with(memory, address, part.span)
            self._masters[part.name] = memory
        return self._masters[part.name]


def _copied(storage: torch.UntypedStorage) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage).to("cpu", copy=True)


def tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for value in vars(module).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            inside = value.values() if isinstance(value, dict) else value
            yield from (one for one in inside if isinstance(one, torch.Tensor))


def stand_in(
    tensor: torch.Tensor, copies: Copies, device: torch.device | None = None
) -> torch.Tensor:
    """Return the tensor to pickle instead of `tensor`: equal, private, on the CPU or `device`."""
    with torch.inference_mode(False):
        made = copies.of(tensor).to(device or "cpu")
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        if not is_wrapper(tensor):  # a wrapper's attributes are its inner tensors
            vars(made).update(vars(tensor))
        return made


def private(tensor: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Return what `copy.deepcopy` would return for an ordinary tensor."""
    return copy.deepcopy(stand_in(tensor, copies, tensor.device))


def copied(module: torch.nn.Module, memo: dict[int, Any]) -> Any:
    """Deep-copy a module without swapd's attributes. `memo` has the copies of its tensors."""
    if (own := getattr(type(module), "__deepcopy__", None)) is not None:
        made = own(module, memo)
        object.__setattr__(made, "__dict__", without_markers(vars(made)))
        return made
    reduced: Any = type(module).__reduce_ex__(module, 4)
    make, arguments, *rest = reduced
    state: Any = rest[0] if rest else None
    made = memo[id(module)] = make(*copy.deepcopy(arguments, memo))
    if isinstance(state, dict):
        state = without_markers(state)
    # the second item is the state in slots
    elif isinstance(state, tuple) and isinstance(state[0], dict):
        state = without_markers(state[0]), *state[1:]
    if state is not None:
        made.__setstate__(copy.deepcopy(state, memo))
    return made


class Marker:
    """Base of every hook and attribute that swapd puts on a module."""

    __slots__ = ()

    def before(self, name: str) -> Any:
        """Return the module's own attribute that this one replaced; None if it had none."""
        return None


def put_back(attributes: dict[str, Any], name: str, before: Any) -> None:
    """Undo the replacement of an attribute; `before` is None if there was none."""
    if before is None:
        attributes.pop(name, None)
    else:
        attributes[name] = before


#: Keeps the undo of a change. Call it before the change: an interrupt may come in between.
ToUndo = Callable[[Callable[[], None]], object]
Run = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


class Method(Marker):
    """Replaces a method of one module. `run` gets the original method and its arguments."""

    def __init__(self, module: torch.nn.Module, name: str, run: Run | None) -> None:
        self._module = module
        self._run = run
        #: Where calls wait during `attach`.
        self.door: Callable[[torch.nn.Module], None] | None = None
        self.__name__ = name
        self._before = module.__dict__.get(name)
        found = getattr_static(type(module), name, None)
        #: Static and class methods do not get it, nor does a function of C.
        never = isinstance(found, (staticmethod, classmethod))
        self._gets_module = hasattr(found, "__get__") and not never

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None, "door": None}

    def __repr__(self) -> str:
        return f"<{self.__wrapped__!r}, run by swapd>"

    def before(self, name: str) -> Any:
        return self._before

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        if self._before is not None:
            method: Callable[..., Any] = self._before
        else:
            method = getattr(type(self._module), self.__name__)
            if self._gets_module:
                method = method.__get__(self._module)
        return method

    @property
    def __code__(self) -> Any:  # torch.export asks a forward for it
        return self.__wrapped__.__code__

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__wrapped__.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (door := self.door) is not None:  # read once: another thread may take it away
            door(self._module)
        if self._run is None:
            return self.__wrapped__(*args, **kwargs)
        return self._run(self.__wrapped__, args, kwargs)


def without_markers(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a module's `__dict__` without swapd's attributes and hooks; it stays as it is."""
    plain = {}
    for name, value in attributes.items():
        own = _own(name, value)
        if own is not None or value is None:
            plain[name] = own
    gone = _numbers_of_markers(plain)
    for name, table in plain.items():
        if _is_hooks(name, table) and not gone.isdisjoint(table):
            plain[name] = type(table)((k, v) for k, v in table.items() if k not in gone)
    return plain


def _numbers_of_markers(attributes: dict[str, Any]) -> set[int]:
    """Return the ids of swapd's hooks; tables with options of hooks use the same ids."""
    tables = (table for name, table in attributes.items() if _is_hooks(name, table))
    return {n for table in tables for n, hook in table.items() if _marker_of(hook)}


def _own(name: str, value: Any) -> Any:
    while (marker := _marker_of(value)) is not None:
        value = marker.before(name)
    return value


def _is_hooks(name: str, value: object) -> bool:
    return "_hooks" in name and isinstance(value, dict)


def _marker_of(value: object) -> Marker | None:
    function = getattr(value, "__func__", None)
    for one in (value, getattr(value, "__self__", None), getattr(function, "marker", None)):
        if isinstance(one, Marker):
            return one
    return None
