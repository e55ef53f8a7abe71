"""Tensors over a component's address range. This module, `movable.py` and `dlpack.py` need torch.

The unit is the storage: tensors that share one (tied weights, views, fused projections) still share
it afterwards. A tensor object stays the same; only its storage moves, once, and no swap touches a
Python object again. Of a wrapper tensor (a quantised weight and its scale) the inner tensors move.
"""

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch

from swapd_client.errors import InvalidSource
from swapd_client.memory import dlpack
from swapd_client.memory.dlpack import Target
from swapd_client.memory.layout import (
    ALIGN_BYTES,
    Fetch,
    InMemory,
    Layout,
    Packer,
    RemoteBytes,
    Segments,
    Spans,
    by_segment,
    no_such,
    through_mapping,
)
from swapd_client.memory.movable import Source, check_device, end_of, extent, tensors_of


class TensorPlacement(NamedTuple):
    """One tensor of a layout. `place`: offset of its first element in bytes; 0 if empty."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    place: int


class PlacedTensors(Layout):
    #: Wrappers appear as their inner tensors ("weight.scale").
    placed: tuple[TensorPlacement, ...]
    #: The first name of tied parameters, by each further name.
    aliases: Mapping[str, str]

    def digest(self) -> str:
        described = [(p.name, str(p.dtype), *p[2:]) for p in self.placed]
        return blake2b(repr((described, self.segments)).encode(), digest_size=16).hexdigest()

    def names(self) -> Iterable[str]:
        return [*(one.name for one in self.placed), *self.aliases]

    def writer(self, values: Mapping[str, torch.Tensor]) -> Callable[[int], None]:
        placed = {one.name: one for one in self.placed}
        aliases = {name: placed[first] for name, first in self.aliases.items() if first in placed}
        placed = {**aliases, **placed}
        for name, value in values.items():
            if name not in placed:
                raise no_such(name, placed)
            _check_fits(placed[name], value)

        def write(target: int) -> None:
            memory = (ctypes.c_ubyte * self.nbytes).from_address(target)
            base = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            with torch.no_grad():
                for name, value in values.items():
                    if value.numel():
                        one = placed[name]
                        item = torch.empty(0, dtype=one.dtype, device="cpu")
                        item.set_(base, one.place // item.element_size(), one.shape, one.stride)
                        item.copy_(value)

        return write


class TensorLayout(PlacedTensors, InMemory):
    """The parameters of a module, or named tensors, grouped by storage.

    A module's buffers stay private, because forward may write to them. For a component on a GPU
    they move there, as with `module.to()`. Raises: InvalidSource, naming the first tensor that
    cannot be moved.
    """

    def __init__(
        self,
        source: Source,
        segments: Segments = (),
        *,
        gpu: int | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        """`gpu`: its GPU's index in this process, or None. `fetch` reads bytes on that GPU."""
        self._target = dlpack.HOST if gpu is None else dlpack.gpu(gpu)
        self._buffers = Buffers(source, self._target)
        packer = Packer()
        #: By storage: the start of its used bytes, their offset in the component, their number.
        self._spans: dict[int, tuple[int, int, int]] = {}
        named = list(tensors_of(source, self._target))
        #: For storages that the CPU cannot read.
        self._fetch = fetch
        self._remote: dict[int, torch.UntypedStorage] = {
            t.untyped_storage().data_ptr(): t.untyped_storage() for _, t in named if t.is_cuda
        }
        used = _used(tensor for _, tensor in named)
        tensors = dict(named)
        #: By segment: the storages that it needs first.
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
        #: New tensors, once the first has replaced an old one.
        self._views: list[torch.Tensor | None] = []
        self._stays = False
        self._place_all(packer.nbytes, packer.ends)
        self.aliases = _aliases(source)

    def _place_all(self, nbytes: int, ends: Sequence[int]) -> None:
        self.placed = tuple(
            TensorPlacement(
                name, t.dtype, tuple(t.shape), t.stride(), self._place(t) if t.numel() else 0
            )
            for name, t in self._named
        )
        self.nbytes = nbytes
        self.segments = tuple(ends)

    @property
    def memory(self) -> Collection[int]:
        return self._spans.keys()

    def origins(self) -> Iterable[tuple[str, int, int]]:
        return [(name, *extent(tensor)) for name, tensor in self._named]

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

    def sources(self) -> Iterable[tuple[int, int, int]]:
        return [
            (place, start, nbytes)
            for key, (start, place, nbytes) in self._spans.items()
            if key not in self._remote
        ]

    def fill_file(self, fd: int) -> None:
        super().fill_file(fd)
        if self._remote:
            self._fill_remote(fd)
        self._buffers.copy()

    def matches(self, fd: int) -> bool:
        same = super().matches(fd)
        self._buffers.copy()
        return same

    def guess(self) -> None:
        if not self._remote:
            super().guess()

    def _fill_remote(self, fd: int) -> None:
        fetch = self._fetch
        assert fetch is not None, "only a GPU's session takes bytes on a GPU"
        spans = [self._spans[key] for key in self._remote if key in self._spans]

        def fill(target: int) -> None:
            fetch([RemoteBytes(target + place, start, n) for start, place, n in spans])

        through_mapping(fd, self.nbytes, fill, writable=True)

    def bind(self, address: int) -> Iterable[object]:
        if not self._stays:
            self._move(address)
        self._buffers.replace()
        return [t.untyped_storage() for _, t in self._named if t.numel()]

    def let_go(self) -> None:
        self._named, self._views = [], []
        self._buffers.let_go()
        if self._remote:
            self._remote.clear()
            torch.cuda.empty_cache()  # return their old memory to the driver

    def _move(self, address: int) -> None:
        if not self._views:
            # One storage for each old one: code that asks which tensors share a storage (to save or
            # register them) gets the same answer as before.
            bases = {
                key: dlpack.bytes_at(address + place, nbytes, self._target).untyped_storage()
                for key, (_, place, nbytes) in self._spans.items()
            }
            self._views = [self._view(bases, tensor) for _, tensor in self._named]
        for (_, tensor), view in zip(self._named, self._views, strict=True):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                if view is not None:
                    tensor.data = view
                elif tensor.device != self._target.device:
                    tensor.data = tensor.data.to(self._target.device)

    def _view(
        self, bases: Mapping[int, torch.UntypedStorage], tensor: torch.Tensor
    ) -> torch.Tensor | None:
        if not tensor.numel():
            return None
        key = tensor.untyped_storage().data_ptr()
        offset = tensor.data_ptr() - self._spans[key][0]
        # In the tensor's own mode: a tensor that is partly an inference tensor works in no mode.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            return view(bases[key], offset, tensor)

    def _place(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        start, offset, _ = self._spans[storage.data_ptr()]
        return offset + tensor.data_ptr() - start


def _check_fits(placed: TensorPlacement, value: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise InvalidSource(
            f"{placed.name!r} is a {type(value).__name__}, not a tensor; nothing was changed"
        )
    if value.is_meta:
        raise InvalidSource(f"{placed.name!r} is on the meta device and has no bytes")
    if value.is_nested or value.layout is not torch.strided:
        raise InvalidSource(
            f"{placed.name!r} is {'nested' if value.is_nested else value.layout}, and dense in the "
            "component: give a dense tensor, as of to_dense(); nothing was changed"
        )
    if tuple(value.shape) != placed.shape or value.dtype != placed.dtype:
        raise InvalidSource(
            f"{placed.name!r} is {tuple(value.shape)} of {value.dtype}, and {placed.shape} of "
            f"{placed.dtype} in the component; nothing was changed"
        )


def _aliases(source: Source) -> dict[str, str]:
    """Return the first name of each parameter with several, by the other names."""
    if not isinstance(source, torch.nn.Module):
        return {}
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in source.named_parameters(remove_duplicate=False):
        if first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
    return aliases


class Buffers:
    """Buffers of a module that are not yet on the GPU of its parameters."""

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
                check_device(f"{prefix}.{name}".lstrip("."), buffer, target)
                self._places.append((module._buffers, name))

    def copy(self) -> None:
        """Copy the buffers to the GPU. All that can fail fails here."""
        for buffers, name in self._places:
            buffer = buffers[name]
            assert buffer is not None
            if id(buffer) not in self._copies:
                self._copies[id(buffer)] = buffer.to(self._target.device)

    def replace(self) -> None:
        """Put the copies in place; a buffer in two places stays one. May be repeated."""
        for buffers, name in self._places:
            buffers[name] = self._copies.get(id(buffers[name]), buffers[name])

    def let_go(self) -> None:
        self._places.clear()
        self._copies.clear()


def _used(tensors: Iterator[torch.Tensor]) -> dict[int, tuple[int, int]]:
    """Return the used address range of each storage, in order of first appearance."""
    used: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue  # all empty storages have address 0
        key = tensor.untyped_storage().data_ptr()
        start = tensor.data_ptr()
        end = key + end_of(tensor)
        known = used.get(key, (start, end))
        used[key] = (min(known[0], start), max(known[1], end))
    # aligned from the start of the storage, so that each view keeps its alignment
    return {
        key: (key + (start - key) // ALIGN_BYTES * ALIGN_BYTES, end)
        for key, (start, end) in used.items()
    }


def view(storage: torch.UntypedStorage, place: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `like` whose first element is `place` bytes into `storage`."""
    typed = torch.empty(0, dtype=like.dtype, device=storage.device)
    offset, rest = divmod(place, like.element_size())
    assert not rest, "storages are aligned to more than any item"
    return typed.set_(storage, offset, like.shape, like.stride())
