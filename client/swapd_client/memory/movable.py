"""Which tensors can be moved, and where their bytes are. Only checks and questions.

A wrapper tensor (a quantised weight and its scale) has no bytes of its own: its inner tensors do.
"""

from collections.abc import Iterator, Mapping

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from swapd_client.errors import InvalidSource
from swapd_client.memory.dlpack import Target

Source = torch.nn.Module | Mapping[str, torch.Tensor]

UNINITIALISED = (UninitializedParameter, UninitializedBuffer)


def tensors_of(source: Source, target: Target) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors to move, each checked; for a wrapper, its inner tensors."""
    if isinstance(source, torch.nn.Module):
        source = dict(source.named_parameters())
    for name, tensor in source.items():
        yield from _inner(name, tensor, target)


def _inner(name: str, tensor: torch.Tensor, target: Target) -> Iterator[tuple[str, torch.Tensor]]:
    _check(name, tensor, target)
    if not is_wrapper(tensor):
        yield name, tensor
        return
    if tensor.device != target.device:
        raise InvalidSource(
            f"{name!r} is a {type(tensor).__name__} on {tensor.device}, and its inner tensors "
            f"cannot move without it: call .to({str(target.device)!r}) first"
        )
    for part in inner_names(tensor):
        yield from _inner(f"{name}.{part}", getattr(tensor, part), target)


def is_wrapper(tensor: object) -> bool:
    """Whether a tensor has no bytes, but names its inner tensors by `__tensor_flatten__`."""
    return isinstance(tensor, torch.Tensor) and is_traceable_wrapper_subclass(tensor)


def inner_names(tensor: torch.Tensor) -> list[str]:
    """Return the attributes of a wrapper that are inner tensors (not a DTensor's mesh)."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [name for name in names if isinstance(getattr(tensor, name), torch.Tensor)]


def leaves(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with the bytes, by name: the tensor, or a wrapper's inner tensors."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    for inner in inner_names(tensor):
        yield from leaves(f"{name}.{inner}", getattr(tensor, inner))


def _check(name: str, tensor: torch.Tensor, target: Target) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidSource(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if isinstance(tensor, UNINITIALISED):
        raise InvalidSource(f"{name!r} is not initialised; run the module once, then register")
    if tensor.is_meta:
        raise InvalidSource(f"{name!r} is on the meta device and has no bytes; load it first")
    check_device(name, tensor, target)
    if not _has_own_bytes(tensor) and not is_wrapper(tensor):
        raise InvalidSource(
            f"{name!r} is a {type(tensor).__name__}, which does not say by __tensor_flatten__ "
            "which tensors it is made of; register those, or its as_subclass(torch.Tensor)"
        )
    check_dense(name, tensor)
    _check_stored(name, tensor)


def _check_stored(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidSource for a tensor that is more, or less, than the bytes in its storage."""
    if not tensor.is_leaf:
        raise InvalidSource(f"{name!r} is the result of a computation; detach() it first")
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        raise InvalidSource(
            f"{name!r} is computed from its bytes at each read (a conjugate, a negative or a zero "
            "tensor); give resolve_conj().resolve_neg().clone() of it"
        )
    if is_wrapper(tensor):
        return
    if tensor.numel() and end_of(tensor) > tensor.untyped_storage().nbytes():
        raise InvalidSource(f"{name!r} has lost its storage (resized or freed); load it first")


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidSource unless the tensor's bytes are those of its elements, in strides."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else "not dense"
        raise InvalidSource(
            f"{name!r} is {kind} ({tensor.layout}, {tensor.dtype}); only plain dense tensors can "
            "be moved. As a buffer of its module it stays in private memory"
        )


def _has_own_bytes(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing but the bytes of its storage.

    A parameter's class may add attributes and methods, as vLLM's do for loading; one with its own
    `__torch_dispatch__` may have other bytes.
    """
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return True
    plain = torch.Tensor.__torch_dispatch__
    return issubclass(kind, torch.nn.Parameter) and kind.__torch_dispatch__ is plain


def check_device(name: str, tensor: torch.Tensor, target: Target) -> None:
    here = target.device
    if tensor.device.type == "cpu" or tensor.device == here:
        return
    if here.type == "cpu":
        raise InvalidSource(
            f"{name!r} is on {tensor.device}; the host device takes CPU tensors: call .cpu(), "
            f"or name the device: connect({str(tensor.device)!r})"
        )
    raise InvalidSource(
        f"{name!r} is on {tensor.device}, and this daemon's GPU is {here} in this process: call "
        f".to({str(here)!r}) or .cpu() first"
    )


def end_of(tensor: torch.Tensor) -> int:
    """Return the end of the last element: bytes from the start of the storage."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return address and bytes of a tensor's memory; no bytes if it has no memory of its own."""
    if isinstance(tensor, UNINITIALISED) or tensor.is_nested or tensor.layout is not torch.strided:
        return 0, 0
    if tensor.is_meta or is_wrapper(tensor) or not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    return start, tensor.untyped_storage().data_ptr() + end_of(tensor) - start


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes; 0 if it is sparse, for which torch has no number."""
    return 0 if tensor.is_sparse else tensor.nbytes
