"""A `forward` of its own for each module that has hooks, so that compiled code is not mistaken.

torch finds compiled code again by guards, and these look at no hooks: what was compiled for one
module of a class, or for this one before it was attached, would run here without a lease. They do
look at whether a module has a `forward` of its own. One that is attached has: it calls that of the
class, whatever that is by then.
"""

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from swapd_client.offload.ours import Ours


def distinguish(module: torch.nn.Module) -> Callable[[], None]:
    """Have no code run for `module` that was compiled for others; returns what undoes it.

    One that has a `forward` of its own already keeps it: code compiled for it is its own.
    """
    attributes = vars(module)
    kind = type(module)
    if "forward" in attributes or not isinstance(_static(kind), FunctionType):
        return _nothing
    made = attributes["forward"] = MethodType(_of_class(kind), module)

    def undo() -> None:
        if attributes.get("forward") is made:  # else it was replaced by somebody
            del attributes["forward"]

    return undo


def _nothing() -> None:
    pass


def _static(kind: type[torch.nn.Module]) -> Any:
    return inspect.getattr_static(kind, "forward", None)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


#: torch counts, for each code object, what it was compiled for: so each class has its own.
_by_class: "WeakKeyDictionary[type, FunctionType]" = WeakKeyDictionary()


def _of_class(kind: type[torch.nn.Module]) -> FunctionType:
    made = _by_class.get(kind)
    if made is None:
        name = f"{kind.__module__}.{kind.__qualname__}.forward"
        made = FunctionType(_forward.__code__.replace(co_name=name), globals(), "forward")
        made.ours = Ours()  # type: ignore[attr-defined]
        _by_class[kind] = made
    made.__wrapped__ = _static(kind)  # type: ignore[attr-defined] # whose signature it has
    made.__doc__ = made.__wrapped__.__doc__  # type: ignore[attr-defined]
    return made
