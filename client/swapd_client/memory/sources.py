"""What can be registered, and where it is now. Imports torch only for what is torch's."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from swapd_client.errors import BadRequest
from swapd_client.memory.layout import (
    Buffer,
    BufferLayout,
    Fetch,
    Layout,
    Ready,
    Segments,
    extent_of_buffer,
)

if TYPE_CHECKING:
    import torch

#: What can be registered: a module's parameters, named tensors, named buffers, or what a load
#: has planned.
Source: TypeAlias = "torch.nn.Module | Mapping[str, torch.Tensor] | Mapping[str, Buffer] | Ready"


def layout_of(
    source: object, segments: Segments, gpu: int | None, fetch: Fetch | None = None
) -> Layout:
    """What lies where of a source, by its kind; `gpu` is the GPU it is for, and `fetch` brings what
    is there already. Raises: BadRequest, InvalidSource."""
    if isinstance(source, Ready):
        layout: Any = source  # one of those that are
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
    raise BadRequest(
        f"cannot register a {type(source).__name__}; give a torch module, or a dict of tensors "
        "or of buffers"
    )


def _torch() -> Any:
    """torch, if this process uses it; not if another thread is just importing it."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "nn") and hasattr(torch, "Tensor") else None


def extent_of(value: object) -> tuple[int, int]:
    """Address and bytes of a tensor or of a buffer; no bytes if it is neither, or has none."""
    torch = _torch()
    if torch is not None and isinstance(value, torch.Tensor):
        from swapd_client.memory.tensors import extent

        return extent(value)
    return extent_of_buffer(value)
