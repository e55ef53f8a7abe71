"""Gives each hooked module a `forward` of its own, so that torch runs no code compiled for another.

torch finds compiled code by guards, and these ignore hooks: code compiled for another module of the
class, or for this one before it was attached, would run here without a lease. Guards do see whether
a module has a `forward` of its own. So an attached module gets one, which calls the current
`forward` of its class. Before the first import of `torch._dynamo` no code can be compiled, so
modules get none: it would add a function to each call.
"""

import inspect
import threading
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from swapd_client.offload import dynamo
from swapd_client.offload.ours import Ours

_lock = threading.Lock()
#: Modules that get a forward once code may be compiled. None: code may be compiled already.
_waiting: WeakSet[torch.nn.Module] | None = WeakSet()


def distinguish(module: torch.nn.Module) -> Callable[[], None]:
    """Keep code compiled for other modules away from `module`; returns the undo.

    A module with a `forward` of its own keeps it: code compiled for it is its own.
    """
    with _lock:
        if _waiting is None:
            _give(module)
        else:
            _waiting.add(module)

    def undo() -> None:
        with _lock:
            if _waiting is not None:
                _waiting.discard(module)
            made = vars(module).get("forward")
            if getattr(made, "__func__", None) in _made:  # else other code replaced it
                del vars(module)["forward"]

    return undo


def _give(module: torch.nn.Module) -> None:
    kind = type(module)
    if "forward" not in vars(module) and isinstance(_static(kind), FunctionType):
        vars(module)["forward"] = MethodType(_of_class(kind), module)


def _give_all() -> None:
    global _waiting
    with _lock:
        waiting, _waiting = _waiting or (), None
        for module in waiting:
            _give(module)


def _static(kind: type[torch.nn.Module]) -> Any:
    return inspect.getattr_static(kind, "forward", None)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


#: torch counts recompilations by code object, so each class has its own.
_by_class: "WeakKeyDictionary[type, FunctionType]" = WeakKeyDictionary()
#: All functions in `_by_class`.
_made: WeakSet[FunctionType] = WeakSet()


def _of_class(kind: type[torch.nn.Module]) -> FunctionType:
    made = _by_class.get(kind)
    if made is None:
        name = f"{kind.__module__}.{kind.__qualname__}.forward"
        made = FunctionType(_forward.__code__.replace(co_name=name), globals(), "forward")
        made.ours = Ours()  # type: ignore[attr-defined]
        _by_class[kind] = made
        _made.add(made)
    made.__wrapped__ = _static(kind)  # type: ignore[attr-defined] # gives it the signature
    made.__doc__ = made.__wrapped__.__doc__  # type: ignore[attr-defined]
    return made


dynamo.when_imported(_give_all)
