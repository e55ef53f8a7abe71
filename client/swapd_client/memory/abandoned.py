"""Modules that leave their component while it is registered. Needs torch.

`half()` and its like give each parameter new memory in silence. The storage over the component's
range dies of it, which tells: watching costs nothing before.
"""

import sys
import warnings
import weakref
from collections.abc import Callable

import torch

from swapd_client.memory.movable import leaves
from swapd_client.memory.part import Part


def watch(part: Part, module: torch.nn.Module) -> None:
    """Warn, once, if a parameter of `module` gets other memory while `part` is registered.

    A module, or a parameter, that is deleted is no reason to.
    """
    for path, owner in module.named_modules():
        for name, tensor in owner.named_parameters(recurse=False, remove_duplicate=False):
            gone = _gone(part, f"{path}.{name}".lstrip("."), name, weakref.ref(owner))
            part.watched += [
                weakref.ref(leaf.untyped_storage(), gone)
                for _, leaf in leaves(name, tensor)
                if leaf.numel()
            ]


def _gone(
    part: Part, path: str, name: str, owner: "weakref.ref[torch.nn.Module]"
) -> Callable[[object], None]:
    def gone(_: object) -> None:
        module = owner()
        if not part.watched or module is None or module._parameters.get(name) is None:
            return
        part.watched.clear()
        warnings.warn(
            f"{path!r} has left component {part.name!r}: half(), to() or an assignment gave it "
            "memory of its own, and the component keeps bytes that it does not use. "
            f"client.unregister({part.name!r}), and register it again: change a module first",
            UserWarning,
            stacklevel=_outside_torch(),
        )

    return gone


def _outside_torch() -> int:
    """The stack level, for the caller, of the line that called torch."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        level, frame = level + 1, frame.f_back
    return level
