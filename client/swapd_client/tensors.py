"""Tensors over a component's address range. The only file of the client that needs torch.

The unit is the storage: tensors that share one (tied weights, views, fused projections)
share it afterwards too. Each tensor object stays what it is; only its storage moves, once,
and no swap ever touches a Python object again.
"""

import ctypes
from collections.abc import Iterator, Mapping
from hashlib import blake2b

import torch

from swapd.device import vm
from swapd_client.errors import InvalidSource
from swapd_client.layout import ALIGN_BYTES, Packer, Segments, by_segment

Source = torch.nn.Module | Mapping[str, torch.Tensor]


class TensorLayout:
    """The parameters of a module, or named tensors, grouped by storage.

    Buffers of a module stay where they are: forward may write to them. Raises
    InvalidSource, naming the first tensor that cannot be moved.
    """

    def __init__(self, source: Source, segments: Segments = ()) -> None:
        packer = Packer()
        self._tensors: list[torch.Tensor] = []
        #: By storage: where its used bytes begin, where they go, and how many they are.
        self._spans: dict[int, tuple[int, int, int]] = {}
        described = []
        named = list(_named(source))
        for name, tensor in named:
            _check(name, tensor)
        used = _used(tensor for _, tensor in named)
        tensors = dict(named)
        for group in by_segment(tensors, segments):
            for name in group:
                key = tensors[name].untyped_storage().data_ptr()
                if key not in self._spans and tensors[name].numel():
                    start, end = used[key]
                    self._spans[key] = (start, packer.place(end - start), end - start)
            packer.end_segment()
        for name, tensor in named:
            self._tensors.append(tensor)
            place = self._place(tensor) if tensor.numel() else 0
            described.append((name, str(tensor.dtype), tuple(tensor.shape), tensor.stride(), place))
        self.nbytes = packer.nbytes
        self.segments = tuple(packer.ends)
        self._digest = blake2b(
            repr((described, self.segments)).encode(), digest_size=16
        ).hexdigest()

    def digest(self) -> str:
        return self._digest

    def fill(self, target: int) -> None:
        for start, offset, nbytes in self._spans.values():
            vm.copy(target + offset, start, nbytes)

    def bind(self, address: int) -> None:
        places = [self._place(t) if t.numel() else 0 for t in self._tensors]
        base = _bytes_at(address, self.nbytes)
        for tensor, place in zip(self._tensors, places, strict=True):
            if tensor.numel():
                # the view must be of the tensor's kind, whatever the mode of the caller:
                # one that is an inference tensor in part can be used in neither mode
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.data = _view(base, place, tensor)
        self._tensors.clear()

    def _place(self, tensor: torch.Tensor) -> int:
        """Offset of the tensor's first element in the component, bytes."""
        storage = tensor.untyped_storage()
        start, offset, _ = self._spans[storage.data_ptr()]
        return offset + tensor.data_ptr() - start


def _named(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(source, torch.nn.Module):
        seen: set[int] = set()
        for name, tensor in source.named_parameters(remove_duplicate=False):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor
    else:
        yield from source.items()


def _check(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidSource(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
        raise InvalidSource(f"{name!r} is not initialised; run the module once, then register")
    if tensor.is_meta:
        raise InvalidSource(f"{name!r} is on the meta device and has no bytes; load it first")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise InvalidSource(
            f"{name!r} is a {type(tensor).__name__}: tensor subclasses cannot be moved yet; "
            "register its inner tensors"
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else "not dense"
        raise InvalidSource(
            f"{name!r} is {kind} ({tensor.layout}, {tensor.dtype}); only plain dense tensors can "
            "be moved"
        )
    if tensor.device.type != "cpu":
        raise InvalidSource(
            f"{name!r} is on {tensor.device}; the host device takes CPU tensors: call .cpu() first"
        )
    if not tensor.is_leaf:
        raise InvalidSource(f"{name!r} is the result of a computation; detach() it first")
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        raise InvalidSource(
            f"{name!r} is computed from its bytes whenever it is read (a conjugate, a negative or "
            "a zero); give resolve_conj().resolve_neg().clone() of it"
        )
    if tensor.numel() and _end(tensor) > tensor.untyped_storage().nbytes():
        raise InvalidSource(f"{name!r} has lost its storage (resized or freed); load it first")


def _end(tensor: torch.Tensor) -> int:
    """Where the last element ends, bytes from the start of the storage."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())


def _used(tensors: Iterator[torch.Tensor]) -> dict[int, tuple[int, int]]:
    """The address range that is used of each storage, in order of first appearance."""
    used: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue  # every empty storage has address 0: they are strangers, not one
        key = tensor.untyped_storage().data_ptr()
        start = tensor.data_ptr()
        end = key + _end(tensor)
        known = used.get(key, (start, end))
        used[key] = (min(known[0], start), max(known[1], end))
    # aligned from the storage's own start, so that each view keeps the alignment it had
    return {
        key: (key + (start - key) // ALIGN_BYTES * ALIGN_BYTES, end)
        for key, (start, end) in used.items()
    }


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def _view(base: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor like `like` whose first element is `place` bytes into `base`."""
    typed = torch.empty(0, dtype=like.dtype)
    offset, rest = divmod(place, like.element_size())
    assert not rest, "storages are aligned to more than any item"
    return typed.set_(base.untyped_storage(), offset, like.shape, like.stride())
