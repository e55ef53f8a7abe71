"""Accepted sources of components, and their addresses. Imports torch only for torch's types."""

import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from swapd_client.errors import InvalidArgument
from swapd_client.memory.layout import (
    Buffer,
    BufferLayout,
    Fetch,
    Layout,
    Ready,
    Segments,
    extent_of_buffer,
)
from swapd_client.memory.part import Part

if TYPE_CHECKING:
    import torch

#: Sources that `register` accepts.
Source: TypeAlias = "torch.nn.Module | Mapping[str, torch.Tensor] | Mapping[str, Buffer] | Ready"


def layout_of(
    source: object, segments: Segments, gpu: int | None, fetch: Fetch | None = None
) -> Layout:
    """Return the layout of a source. Raises: InvalidArgument, InvalidSource.

    `gpu`: its GPU's index in this process; None: the host. `fetch` reads bytes on that GPU.
    """
    if isinstance(source, Ready):
        return source
    torch = _torch()
    if torch is not None:
        tensors = isinstance(source, torch.nn.Module) or (
            isinstance(source, Mapping)
            and any(isinstance(value, torch.Tensor) for value in source.values())
        )
        if tensors:
            from swapd_client.memory.tensors import TensorLayout

            return TensorLayout(source, segments, gpu=gpu, fetch=fetch)  # type: ignore[arg-type]
    if isinstance(source, Mapping):
        return BufferLayout(source, segments)
    raise InvalidArgument(
        f"cannot register a {type(source).__name__}; give a torch module, or a dict of tensors "
        "or of buffers"
    )


def module_of(source: object) -> "weakref.ref[torch.nn.Module] | None":
    torch = _torch()
    if torch is None or not isinstance(source, torch.nn.Module):
        return None
    return weakref.ref(source)


def watch(part: Part) -> None:
    """Warn, once, if the module of `part` leaves it while it is registered.

    `half()` and its like silently give each parameter new memory. The storage over the component's
    range is collected then, which triggers the warning, so watching costs nothing. Deleting a
    module or a parameter does not warn.
    """
    if part.module is None or (module := part.module()) is None:
        return
    from swapd_client.memory.movable import leaves

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
    """Return the stack level of the line that called torch, for the caller."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        level, frame = level + 1, frame.f_back
    return level


def _torch() -> Any:
    """Return torch if it is imported; None while another thread is importing it."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "nn") and hasattr(torch, "Tensor") else None


def extent_of(value: object) -> tuple[int, int]:
    """Return address and bytes of a tensor or buffer; no bytes if it is neither, or empty."""
    torch = _torch()
    if torch is not None and isinstance(value, torch.Tensor):
        from swapd_client.memory.movable import extent

        return extent(value)
    return extent_of_buffer(value)
