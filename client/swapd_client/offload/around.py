"""What people build around attached modules, and would then run, or write to, without its hooks.

It is seen when it is registered: what `torch.fx` traced takes over modules and parameters, and so
do wrappers that read and write all weights as they are made. Both are refused in words, before
anything is read.
"""

import sys
from types import CodeType

import torch
from torch.nn import Module

from swapd_client.errors import NotWhileAttached
from swapd_client.memory import ranges
from swapd_client.offload import find

#: They broadcast, or flatten, what they are given.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
#: Above who asks are what torch calls, what it registers a parameter by, and the module's
#: `__setattr__`; and what keeps all that from being compiled.
_NEAR = 8


def refuse(module: Module, new: object) -> None:
    """Raise NotWhileAttached if `new` may not be registered on `module`."""
    if type(module).__name__ in _WRAPPERS:
        if isinstance(new, Module) and (owner := _owner(new)) is not None:
            kind = type(module).__name__
            raise NotWhileAttached(
                f"{owner!r} is attached to swapd, and a {kind} reads and writes all weights as it "
                "is made, when nothing holds them: call detach() on its attachment first. A "
                "DistributedDataParallel that is there can be attached"
            )
    elif _is_copied_by_fx() and (owner := _owner(new)) is not None:
        raise NotWhileAttached(
            f"{owner!r} is attached to swapd, and what torch.fx traces of it would not "
            "bring its weights in: call detach() on its attachment first"
        )


def _is_copied_by_fx() -> bool:
    """Whether what is registered is being taken over from a module that was traced."""
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
    """The component that any of this is in."""
    tensors = [new] if isinstance(new, torch.Tensor) else []
    if isinstance(new, Module):
        tensors += new.parameters()
    for tensor in tensors:
        for start, end in find.bytes_in(tensor):
            if (found := ranges.find(start, end - start)) is not None:
                return found.name
    return None
