"""Refuses wrappers and traces of attached modules, which would use the weights without the hooks.

They show when a module is registered. A `torch.fx` trace takes over modules and parameters;
DistributedDataParallel and FSDP read and write all weights in their constructors. Both get an error
before they read anything.
"""

import sys
from types import CodeType

import torch
from torch.nn import Module

from swapd_client.errors import NotWhileAttached
from swapd_client.memory import ranges
from swapd_client.offload import find

#: Their constructors broadcast or flatten all parameters.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
#: Frames searched above `_is_copied_by_fx`: torch's own calls, its registration of a parameter, the
#: module's `__setattr__`, and the frames that keep these from being compiled.

_NEAR = 8


def refuse(module: Module, new: object) -> None:
    """Raise NotWhileAttached if `new` may not be registered on `module`."""
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
    """Whether `torch.fx` is copying attributes of a traced module."""
    fx = sys.modules.get("torch.fx.graph_module")
    copying: CodeType | None = getattr(getattr(fx, "_copy_attr", None), "__code__", None)
    frame = sys._getframe(1)
    for _ in range(_NEAR):
        if frame.f_back is None:
            return False
        if frame.f_code is copying:
            return torch._guards.TracingContext.try_get() is None  # torch.compile does it as well
        frame = frame.f_back
    return False


def _owner(new: object) -> str | None:
    """The component that holds any of these bytes."""
    tensors = [new] if isinstance(new, torch.Tensor) else []
    if isinstance(new, Module):
        tensors += new.parameters()
    for tensor in tensors:
        for start, end in find.bytes_in(tensor):
            if (found := ranges.find(start, end - start)) is not None:
                return found.name
    return None
