"""Tensors over a component's address range. With dlpack.py, all of the client that needs torch.

The unit is the storage: tensors that share one (tied weights, views, fused projections)
share it afterwards too. Each tensor object stays what it is; only its storage moves, once,
and no swap ever touches a Python object again.
"""

import ctypes
from collections.abc import Iterator, Mapping
from hashlib import blake2b

import torch

from swapd.device import vm
from swapd_client import dlpack
from swapd_client.dlpack import Target
from swapd_client.errors import InvalidSource
from swapd_client.layout import ALIGN_BYTES, Packer, Segments, by_segment

Source = torch.nn.Module | Mapping[str, torch.Tensor]


class TensorLayout:
    """The parameters of a module, or named tensors, grouped by storage.

    Buffers of a module stay private: forward may write to them. If the component is to be on
    a GPU they go there too, as with `module.to()`. Raises InvalidSource, naming the first
    tensor that cannot be moved.
    """

    def __init__(self, source: Source, segments: Segments = (), *, gpu: int | None = None) -> None:
        """`gpu`: the index, in this process, of the GPU that it is for; None: the host."""
        self._target = dlpack.HOST if gpu is None else dlpack.gpu(gpu)
        self._buffers = _Buffers(source, self._target)
        packer = Packer()
        self._tensors: list[torch.Tensor] = []
        #: By storage: where its used bytes begin, where they go, and how many they are.
        self._spans: dict[int, tuple[int, int, int]] = {}
        described = []
        named = list(_named(source))
        for name, tensor in named:
            _check(name, tensor, self._target)
        #: Those whose bytes the CPU cannot read, by storage.
        self._remote: dict[int, torch.UntypedStorage] = {
            t.untyped_storage().data_ptr(): t.untyped_storage() for _, t in named if t.is_cuda
        }
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
        if self._remote:
            torch.cuda.synchronize(self._target.device)  # whoever made them, on any stream
        for key, (start, offset, nbytes) in self._spans.items():
            if (storage := self._remote.get(key)) is not None:
                _fetch(target + offset, storage, start - key, nbytes)
            else:
                vm.copy(target + offset, start, nbytes)
        self._buffers.copy()

    def bind(self, address: int) -> None:
        places = [self._place(t) if t.numel() else 0 for t in self._tensors]
        base = dlpack.bytes_at(address, self.nbytes, self._target)
        for tensor, place in zip(self._tensors, places, strict=True):
            # the view must be of the tensor's kind, whatever the mode of the caller:
            # one that is an inference tensor in part can be used in neither mode
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                if tensor.numel():
                    tensor.data = _view(base, place, tensor)
                elif tensor.device != base.device:
                    tensor.data = tensor.data.to(base.device)
        self._buffers.replace()
        self._tensors.clear()
        if self._remote:
            self._remote.clear()
            torch.cuda.empty_cache()  # the memory they had is the driver's again

    def _place(self, tensor: torch.Tensor) -> int:
        """Offset of the tensor's first element in the component, bytes."""
        storage = tensor.untyped_storage()
        start, offset, _ = self._spans[storage.data_ptr()]
        return offset + tensor.data_ptr() - start


class _Buffers:
    """A module's buffers that are not on the GPU yet where its parameters are going."""

    def __init__(self, source: Source, target: Target) -> None:
        self._target = target
        self._places: list[tuple[dict[str, torch.Tensor | None], str]] = []
        self._copies: dict[int, torch.Tensor] = {}
        if not isinstance(source, torch.nn.Module) or target.device.type == "cpu":
            return
        for prefix, module in source.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or buffer.device == target.device:
                    continue
                _check_device(f"{prefix}.{name}".lstrip("."), buffer, target)
                self._places.append((module._buffers, name))

    def copy(self) -> None:
        """Have a copy of each on the GPU. What can fail, does so here."""
        for buffers, name in self._places:
            buffer = buffers[name]
            assert buffer is not None
            if id(buffer) not in self._copies:
                self._copies[id(buffer)] = buffer.to(self._target.device)

    def replace(self) -> None:
        """Put the copies in their places; one that was in two places still is."""
        for buffers, name in self._places:
            buffers[name] = self._copies[id(buffers[name])]
        self._places.clear()
        self._copies.clear()


def _named(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(source, torch.nn.Module):
        seen: set[int] = set()
        for name, tensor in source.named_parameters(remove_duplicate=False):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor
    else:
        yield from source.items()


def _check(name: str, tensor: torch.Tensor, target: Target) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidSource(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
        raise InvalidSource(f"{name!r} is not initialised; run the module once, then register")
    if tensor.is_meta:
        raise InvalidSource(f"{name!r} is on the meta device and has no bytes; load it first")
    _check_device(name, tensor, target)
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
    if not tensor.is_leaf:
        raise InvalidSource(f"{name!r} is the result of a computation; detach() it first")
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        raise InvalidSource(
            f"{name!r} is computed from its bytes whenever it is read (a conjugate, a negative or "
            "a zero); give resolve_conj().resolve_neg().clone() of it"
        )
    if tensor.numel() and _end(tensor) > tensor.untyped_storage().nbytes():
        raise InvalidSource(f"{name!r} has lost its storage (resized or freed); load it first")


def _check_device(name: str, tensor: torch.Tensor, target: Target) -> None:
    here = target.device
    if tensor.device.type == "cpu" or tensor.device == here:
        return
    if here.type == "cpu":
        raise InvalidSource(
            f"{name!r} is on {tensor.device}; the host device takes CPU tensors: call .cpu() first"
        )
    raise InvalidSource(
        f"{name!r} is on {tensor.device}, and this daemon's GPU is {here} in this process: call "
        f".to({str(here)!r}) or .cpu() first"
    )


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


def _fetch(target: int, storage: torch.UntypedStorage, offset: int, nbytes: int) -> None:
    """Copy from the GPU to this process's memory at `target`. Blocks."""
    source = torch.empty(0, dtype=torch.uint8, device=storage.device)
    source.set_(storage, offset, (nbytes,), (1,))
    memory = (ctypes.c_ubyte * nbytes).from_address(target)
    torch.frombuffer(memory, dtype=torch.uint8).copy_(source)


def _view(base: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor like `like` whose first element is `place` bytes into `base`."""
    typed = torch.empty(0, dtype=like.dtype, device=base.device)
    offset, rest = divmod(place, like.element_size())
    assert not rest, "storages are aligned to more than any item"
    return typed.set_(base.untyped_storage(), offset, like.shape, like.stride())
