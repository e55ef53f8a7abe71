"""Tensors over a component's address range. Only this module and `dlpack.py` need torch here.

The unit is the storage: tensors that share one (tied weights, views, fused projections) still share
it afterwards. Each tensor object stays the same; only its storage moves, once, and no swap touches
a Python object again. Of a wrapper tensor (a quantised weight and its scale) the inner tensors
move, and the wrapper stays around them.
"""

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from swapd.shared import vm
from swapd_client.errors import InvalidSource
from swapd_client.memory import dlpack
from swapd_client.memory.dlpack import Target
from swapd_client.memory.layout import (
    ALIGN_BYTES,
    Fetch,
    InMemory,
    Packer,
    Remote,
    Segments,
    Spans,
    by_segment,
    no_such,
)

Source = torch.nn.Module | Mapping[str, torch.Tensor]


class Placed(NamedTuple):
    """One tensor of a layout. `place`: the offset of its first element, bytes; 0 if empty."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    place: int


class PlacedTensors:
    """The places of the tensors in a layout, for writing to them."""

    nbytes: int
    #: The place of each tensor; wrappers appear as their inner tensors ("weight.scale").
    placed: tuple[Placed, ...]
    #: The further names of tied parameters, and their first.
    aliases: Mapping[str, str]
    has_views = False

    def names(self) -> Iterable[str]:
        return [*(one.name for one in self.placed), *self.aliases]

    def writer(self, values: Mapping[str, torch.Tensor]) -> Callable[[int], None]:
        placed = {one.name: one for one in self.placed}
        aliases = {name: placed[first] for name, first in self.aliases.items() if first in placed}
        return write_over({**aliases, **placed}, values, self.nbytes)


class TensorLayout(PlacedTensors, InMemory):
    """The parameters of a module, or named tensors, grouped by storage.

    A module's buffers stay private: forward may write to them. For a component on a GPU they move
    there, too, as with `module.to()`. Raises: InvalidSource, naming the first tensor that cannot be
    moved.
    """

    def __init__(
        self,
        source: Source,
        segments: Segments = (),
        *,
        gpu: int | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        """`gpu`: the index of its GPU in this process; None: the host. `fetch` reads bytes on that
        GPU.
        """
        self._target = dlpack.HOST if gpu is None else dlpack.gpu(gpu)
        self._buffers = Buffers(source, self._target)
        packer = Packer()
        #: By storage: the start of its used bytes, their offset in the component, their number.
        self._spans: dict[int, tuple[int, int, int]] = {}
        named = list(_named(source, self._target))
        #: Reads bytes that the CPU cannot; and the storages that have them.
        self._fetch = fetch
        self._remote: dict[int, torch.UntypedStorage] = {
            t.untyped_storage().data_ptr(): t.untyped_storage() for _, t in named if t.is_cuda
        }
        used = _used(tensor for _, tensor in named)
        tensors = dict(named)
        #: By segment, the storages that it is the first to need.
        self._grouped: list[list[int]] = []
        for group in by_segment(tensors, segments):
            self._grouped.append([])
            for name in group:
                key = tensors[name].untyped_storage().data_ptr()
                if key not in self._spans and tensors[name].numel():
                    start, end = used[key]
                    self._spans[key] = (start, packer.place(end - start), end - start)
                    self._grouped[-1].append(key)
            packer.end_segment()
        self._named = named
        #: Whether the tensors are at their places already, and stay there.
        self._stays = False
        self._place_all(packer.nbytes, packer.ends)
        self.aliases = _aliases(source)

    def _place_all(self, nbytes: int, ends: Sequence[int]) -> None:
        self.placed = tuple(
            Placed(name, t.dtype, tuple(t.shape), t.stride(), self._place(t) if t.numel() else 0)
            for name, t in self._named
        )
        self.nbytes = nbytes
        self.segments = tuple(ends)

    @property
    def memory(self) -> Collection[int]:
        return self._spans.keys()

    def origins(self) -> Iterable[tuple[str, int, int]]:
        return [(name, *extent(tensor)) for name, tensor in self._named]

    def digest(self) -> str:
        described = [(p.name, str(p.dtype), *p[2:]) for p in self.placed]
        return blake2b(repr((described, self.segments)).encode(), digest_size=16).hexdigest()

    def lies(self) -> Spans:
        if any(t.device != self._target.device for _, t in self._named if t.numel()):
            return frozenset()
        return frozenset((start, nbytes) for start, _, nbytes in self._spans.values())

    def stay(self, address: int) -> bool:
        spans = {key: (start, start - address, n) for key, (start, _, n) in self._spans.items()}
        ends, end = [], 0
        for keys in self._grouped:
            places = [spans[key][1:] for key in keys]
            if any(place < end for place, _ in places):
                return False  # the segments would change
            end = max([end, *(place + nbytes for place, nbytes in places)])
            ends.append(end)
        self._spans = spans
        self._stays = True
        self._place_all(end, ends)
        return True

    def spans(self, address: int) -> Spans:
        return frozenset((address + place, nbytes) for _, place, nbytes in self._spans.values())

    def fill(self, target: int) -> None:
        remote: list[Remote] = []
        for key, (start, offset, nbytes) in self._spans.items():
            if key in self._remote:
                remote.append(Remote(target + offset, start, nbytes))
            else:
                vm.copy(target + offset, start, nbytes)
        if remote:
            assert self._fetch is not None, "only a GPU's session takes bytes on a GPU"
            self._fetch(remote)
        self._buffers.copy()

    def bind(self, address: int) -> Iterable[object]:
        if not self._stays:
            self._move(address)
        storages = [t.untyped_storage() for _, t in self._named if t.numel()]
        self._buffers.replace()
        self._named.clear()
        if self._remote:
            self._remote.clear()
            torch.cuda.empty_cache()  # return their old memory to the driver
        return storages

    def _move(self, address: int) -> None:
        # one storage for each old one: code that asks which tensors share a storage (to save them,
        # to register them again) gets the same answer as before
        bases = {
            key: dlpack.bytes_at(address + place, nbytes, self._target).untyped_storage()
            for key, (_, place, nbytes) in self._spans.items()
        }
        views = [self._view(bases, tensor) for _, tensor in self._named]
        for (_, tensor), view in zip(self._named, views, strict=True):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                if view is not None:
                    tensor.data = view
                elif tensor.device != self._target.device:
                    tensor.data = tensor.data.to(self._target.device)

    def _view(
        self, bases: Mapping[int, torch.UntypedStorage], tensor: torch.Tensor
    ) -> torch.Tensor | None:
        """A tensor like `tensor` over the new storage; None if it has no bytes."""
        if not tensor.numel():
            return None
        key = tensor.untyped_storage().data_ptr()
        offset = tensor.data_ptr() - self._spans[key][0]
        # in the tensor's own mode, not the caller's: a tensor that is partly an inference tensor
        # works in neither mode
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            return view(bases[key], offset, tensor)

    def _place(self, tensor: torch.Tensor) -> int:
        """Offset of the tensor's first element in the component, bytes."""
        storage = tensor.untyped_storage()
        start, offset, _ = self._spans[storage.data_ptr()]
        return offset + tensor.data_ptr() - start


def write_over(
    placed: Mapping[str, Placed], values: Mapping[str, torch.Tensor], nbytes: int
) -> Callable[[int], None]:
    """A function that writes `values` over a component of `nbytes` bytes, at a given address.

    Raises: InvalidSource, naming the first value that does not fit.
    """
    for name, value in values.items():
        if name not in placed:
            raise no_such(name, placed)
        _check_fits(placed[name], value)

    def write(target: int) -> None:
        memory = (ctypes.c_ubyte * nbytes).from_address(target)
        base = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        with torch.no_grad():
            for name, value in values.items():
                if value.numel():
                    one = placed[name]
                    item = torch.empty(0, dtype=one.dtype)
                    item.set_(base, one.place // item.element_size(), one.shape, one.stride)
                    item.copy_(value)

    return write


def _check_fits(placed: Placed, value: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise InvalidSource(
            f"{placed.name!r} is a {type(value).__name__}, not a tensor; nothing was changed"
        )
    if value.is_meta:
        raise InvalidSource(f"{placed.name!r} is on the meta device and has no bytes")
    if tuple(value.shape) != placed.shape or value.dtype != placed.dtype:
        raise InvalidSource(
            f"{placed.name!r} is {tuple(value.shape)} of {value.dtype}, and {placed.shape} of "
            f"{placed.dtype} in the component; nothing was changed"
        )


def _aliases(source: Source) -> dict[str, str]:
    """The further names of parameters that have several, and their first."""
    if not isinstance(source, torch.nn.Module):
        return {}
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in source.named_parameters(remove_duplicate=False):
        if first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
    return aliases


class Buffers:
    """A module's buffers that are not yet on the GPU of its parameters."""

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
        """Copy each to the GPU. All that can fail fails here."""
        for buffers, name in self._places:
            buffer = buffers[name]
            assert buffer is not None
            if id(buffer) not in self._copies:
                self._copies[id(buffer)] = buffer.to(self._target.device)

    def replace(self) -> None:
        """Put the copies in their places; one buffer in two places stays one."""
        for buffers, name in self._places:
            buffers[name] = self._copies[id(buffers[name])]
        self._places.clear()
        self._copies.clear()


def _named(source: Source, target: Target) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors to move, each checked; for a wrapper, its inner tensors."""
    if not isinstance(source, torch.nn.Module):
        for name, tensor in source.items():
            yield from _inner(name, tensor, target)
        return
    seen: set[int] = set()
    for name, tensor in source.named_parameters(remove_duplicate=False):
        if id(tensor) not in seen:
            seen.add(id(tensor))
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
    """Whether it has no bytes itself, but names its inner tensors by `__tensor_flatten__`."""
    return isinstance(tensor, torch.Tensor) and is_traceable_wrapper_subclass(tensor)


def inner_names(tensor: torch.Tensor) -> list[str]:
    """The attributes of a wrapper that are its inner tensors; a DTensor's mesh is none."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [name for name in names if isinstance(getattr(tensor, name), torch.Tensor)]


def _check(name: str, tensor: torch.Tensor, target: Target) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidSource(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
        raise InvalidSource(f"{name!r} is not initialised; run the module once, then register")
    if tensor.is_meta:
        raise InvalidSource(f"{name!r} is on the meta device and has no bytes; load it first")
    _check_device(name, tensor, target)
    if not _has_own_bytes(tensor) and not is_wrapper(tensor):
        raise InvalidSource(
            f"{name!r} is a {type(tensor).__name__}, which does not say by __tensor_flatten__ "
            "which tensors it is made of; register those, or its as_subclass(torch.Tensor)"
        )
    check_dense(name, tensor)
    if not tensor.is_leaf:
        raise InvalidSource(f"{name!r} is the result of a computation; detach() it first")
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        raise InvalidSource(
            f"{name!r} is computed from its bytes at each read (a conjugate, a negative or a zero "
            "tensor); give resolve_conj().resolve_neg().clone() of it"
        )
    if is_wrapper(tensor):
        return
    if tensor.numel() and _end(tensor) > tensor.untyped_storage().nbytes():
        raise InvalidSource(f"{name!r} has lost its storage (resized or freed); load it first")


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidSource for a tensor whose bytes are not those of its elements, in strides."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else "not dense"
        raise InvalidSource(
            f"{name!r} is {kind} ({tensor.layout}, {tensor.dtype}); only plain dense tensors can "
            "be moved. As a buffer of its module it stays in private memory"
        )


def _has_own_bytes(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing but the bytes of its storage.

    A parameter's class may add attributes and methods, as vLLM's do for loading; a class with its
    own `__torch_dispatch__` may have other bytes.
    """
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return True
    plain = torch.Tensor.__torch_dispatch__
    return issubclass(kind, torch.nn.Parameter) and kind.__torch_dispatch__ is plain


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
    """The end of the last element, bytes from the start of the storage."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of the memory that a tensor covers; no bytes if it has none of its own."""
    if tensor.is_meta or is_wrapper(tensor) or not tensor.numel():
        return 0, 0
    if tensor.layout is not torch.strided:
        return 0, 0
    start = tensor.data_ptr()
    return start, tensor.untyped_storage().data_ptr() + _end(tensor) - start


def nbytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor; 0 if it is sparse, since torch counts none then."""
    return 0 if tensor.is_sparse else tensor.nbytes


def _used(tensors: Iterator[torch.Tensor]) -> dict[int, tuple[int, int]]:
    """The used address range of each storage, in order of first appearance."""
    used: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue  # all empty storages have address 0, but are not one
        key = tensor.untyped_storage().data_ptr()
        start = tensor.data_ptr()
        end = key + _end(tensor)
        known = used.get(key, (start, end))
        used[key] = (min(known[0], start), max(known[1], end))
    # aligned from the start of the storage, so that each view keeps its alignment
    return {
        key: (key + (start - key) // ALIGN_BYTES * ALIGN_BYTES, end)
        for key, (start, end) in used.items()
    }


def view(storage: torch.UntypedStorage, place: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor like `like` whose first element is `place` bytes into `storage`."""
    typed = torch.empty(0, dtype=like.dtype, device=storage.device)
    offset, rest = divmod(place, like.element_size())
    assert not rest, "storages are aligned to more than any item"
    return typed.set_(storage, offset, like.shape, like.stride())
