"""A `forward` of its own for each module that has hooks, so that compiled code is not mistaken.

torch finds compiled code again by guards, and these look at no hooks: what was compiled for one
module of a class, or for this one before it was attached, would run here without a lease. They do
look at whether a module has a `forward` of its own. One that is attached has: it calls that of the
class, whatever that is by then. Where nothing can be compiled yet, for nobody has imported
`torch._dynamo`, none is needed: each call of it would cost a function more.
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
#: Modules that are to have one as soon as anything may be compiled. None: it may.
_waiting: WeakSet[torch.nn.Module] | None = WeakSet()


def distinguish(module: torch.nn.Module) -> Callable[[], None]:
    """Have no code run for `module` that was compiled for others; returns what undoes it.

    One that has a `forward` of its own already keeps it: code compiled for it is its own.
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
            if getattr(made, "__func__", None) in _made:  # else it was replaced by somebody
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


#: torch counts, for each code object, what it was compiled for: so each class has its own.
_by_class: "WeakKeyDictionary[type, FunctionType]" = WeakKeyDictionary()
#: All of these.
_made: WeakSet[FunctionType] = WeakSet()


def _of_class(kind: type[torch.nn.Module]) -> FunctionType:
    made = _by_class.get(kind)
    if made is None:
        name = f"{kind.__module__}.{kind.__qualname__}.forward"
        made = FunctionType(_forward.__code__.replace(co_name=name), globals(), "forward")
        made.ours = Ours()  # type: ignore[attr-defined]
        _by_class[kind] = made
        _made.add(made)
    made.__wrapped__ = _static(kind)  # type: ignore[attr-defined] # whose signature it has
    made.__doc__ = made.__wrapped__.__doc__  # type: ignore[attr-defined]
    return made


dynamo.when_imported(_give_all)
