"""Accepted sources of components, and their addresses. Imports torch only for torch's types."""

import sys
import weakref
from collections.abc import Mapping
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

#: Accepted by `register`: a module's parameters, named tensors, named buffers, or a prepared
#: layout.
Source: TypeAlias = "torch.nn.Module | Mapping[str, torch.Tensor] | Mapping[str, Buffer] | Ready"


def layout_of(
    source: object, segments: Segments, gpu: int | None, fetch: Fetch | None = None
) -> Layout:
    """The layout of a source, by its kind.

    `gpu`: the index of its GPU; None: the host. `fetch` reads bytes on that GPU. Raises:
    InvalidArgument, InvalidSource.
    """
    if isinstance(source, Ready):
        layout: Any = source  # each `Ready` is a layout
        return layout  # type: ignore[no-any-return]
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
    """The source if it is a module, without keeping it."""
    torch = _torch()
    if torch is None or not isinstance(source, torch.nn.Module):
        return None
    return weakref.ref(source)


def watch(part: Part) -> None:
    """Warn if the module of `part` leaves it while it is registered."""
    if part.module is not None and (module := part.module()) is not None:
        from swapd_client.memory import abandoned

        abandoned.watch(part, module)


def _torch() -> Any:
    """torch, if this process has imported it; None while another thread is importing it."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "nn") and hasattr(torch, "Tensor") else None


def extent_of(value: object) -> tuple[int, int]:
    """Address and bytes of a tensor or buffer; no bytes if it is neither, or has none."""
    torch = _torch()
    if torch is not None and isinstance(value, torch.Tensor):
        from swapd_client.memory.movable import extent

        return extent(value)
    return extent_of_buffer(value)
