"""Watches for parameters and modules that a model gains after it was attached.

torch calls a hook for each registration in the process. If a component has grown (LoRA, new heads),
its next call logs the parameters that stay private. Traces and wrappers that would use the weights
without the hooks are refused: a `torch.fx` trace takes over modules and parameters;
DistributedDataParallel and FSDP read and write all weights in their constructors.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module
from torch.nn.modules import module as torchs

from swapd.shared.system import process_lock
from swapd_client.errors import NotWhileAttached
from swapd_client.log import log
from swapd_client.offload import guards, tools
from swapd_client.offload.copies import ToUndo
from swapd_client.offload.dynamo import uncompiled
from swapd_client.offload.ownership import components_at, own_parameters
from swapd_client.offload.search import join

#: An adapter may add hundreds of parameters.
_NAMED = 8


@dataclass(eq=False)
class Growth:
    name: str
    #: By path.
    modules: Callable[[], Mapping[str, Module]]
    #: Whether a tensor is in swapd, or is meant to stay private.
    is_known: Callable[[Any], bool]
    changed: bool = False

    def tell(self) -> None:
        self.changed = False
        private = []
        for path, module in self.modules().items():
            _watched.setdefault(module, set()).add(self)
            new = (n for n, p in own_parameters(module) if not self.is_known(p))
            private += [join(path, name) for name in new]
        more = f", and {len(private) - _NAMED} more" if len(private) > _NAMED else ""
        if private:
            log.warning(
                "%r has parameters that stay in private memory, since they were added after "
                "attach: %s. refresh() of its attachment registers them",
                self.name,
                ", ".join(private[:_NAMED]) + more,
            )


#: Several models may share a module.
_watched: "WeakKeyDictionary[Module, set[Growth]]" = WeakKeyDictionary()
_lock = process_lock()
_handles: list[Any] = []


def watch(growth: Growth, modules: Iterable[Module], to_undo: ToUndo) -> None:
    def end() -> None:
        with _lock:
            for module, growths in list(_watched.items()):
                growths.discard(growth)
                if not growths:
                    del _watched[module]
        rest()

    to_undo(end)
    with _lock:
        for module in modules:
            _watched.setdefault(module, set()).add(growth)
        if not _handles:
            _handles.append(torchs.register_module_parameter_registration_hook(_registered))
            _handles.append(torchs.register_module_module_registration_hook(_registered))


def rest() -> None:
    """Remove the hooks from torch if no module is watched."""
    with _lock:
        if not _watched:
            for handle in _handles:
                handle.remove()
            _handles.clear()


@uncompiled
def _note(module: Module, name: str, new: object) -> None:
    tools.look()
    _refuse(module, new)
    guards.follow(module, new)
    if isinstance(new, torch.Tensor) and module._parameters.get(name) is not new:
        _tell_of_tied(module, new)
    if new is not None:
        for growth in tuple(_watched.get(module, ())):
            growth.changed = True


def _tell_of_tied(module: Module, new: torch.Tensor) -> None:
    owner = guards.owner_of(new)
    if owner is None or owner.has_inside(module):
        return
    growths = {growth for watching in tuple(_watched.values()) for growth in watching}
    if any(module in growth.modules().values() for growth in growths):
        return
    log.warning(
        "a %s outside of %r got a weight of it after attach: its calls would read that without a "
        "lease. If it is in the attached model, call refresh() of the attachment; else hold the "
        "weight: with attachment.use(%r)",
        type(module).__name__,
        owner.name,
        owner.name,
    )


def _registered(module: Module, name: str, new: object) -> None:
    _note(module, name, new)


_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
#: Frames to search: torch's own calls, its registration of a parameter, the module's `__setattr__`,
#: and the frames that keep these from being compiled.
_NEAR = 8


def _refuse(module: Module, new: object) -> None:
    if type(module).__name__ in _WRAPPERS:
        if isinstance(new, Module) and (owner := _owner(new)) is not None:
            kind = type(module).__name__
            raise NotWhileAttached(
                f"{owner!r} is attached to swapd, and a {kind} reads and writes all weights in its "
                "constructor, without a lease: call detach() on its attachment first. An existing "
                "DistributedDataParallel can be attached"
            )
    elif _is_copied_by_fx() and (owner := _owner(new)) is not None:
        raise NotWhileAttached(
            f"{owner!r} is attached to swapd, and a module traced by torch.fx would not "
            "load its weights: call detach() on its attachment first"
        )


def _is_copied_by_fx() -> bool:
    fx = sys.modules.get("torch.fx.graph_module")
    copying: CodeType | None = getattr(getattr(fx, "_copy_attr", None), "__code__", None)
    frame = sys._getframe(1)
    for _ in range(_NEAR):
        if frame.f_back is None:
            return False
        if frame.f_code is copying:
            return torch._guards.TracingContext.try_get() is None  # torch.compile does it, too
        frame = frame.f_back
    return False


def _owner(new: object) -> str | None:
    tensors = [new] if isinstance(new, torch.Tensor) else []
    if isinstance(new, Module):
        tensors += new.parameters()
    return next((found.name for found in components_at(tensors)), None)
