"""Copies weights, and views of weights, in the outputs of calls.

The caller reads an output after the call's lease, when the bytes may be another component's. So it
gets copies in private memory, of the same values, shapes and strides. The search covers tensors in
nested collections, dataclasses and iterators, and the tensor attributes of other objects.
"""

import copy
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from itertools import chain, islice
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from swapd_client.errors import NotWhileAttached
from swapd_client.memory.movable import inner_names, is_wrapper
from swapd_client.memory.tensors import view

_DEPTH_MAX = 12

#: Work that runs later: its results are checked when it yields or returns them.
LATER = frozenset(
    (GeneratorType, CoroutineType, AsyncGeneratorType, map, filter, zip, enumerate, chain, islice)
)

#: Collections, and iterators over collections, which can be copied.
_COLLECTIONS: tuple[type[Any], ...] = (list, tuple, set, frozenset, deque)
_EMPTY: tuple[Iterable[Any], ...] = ((), [], set(), {}, {}.values(), {}.items())
_ITERATORS: tuple[type[Any], ...] = tuple(type(iter(one)) for one in _EMPTY)

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype})


class ComponentSpans:
    """Addresses of components; their bytes are valid during a lease only."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        """`spans`: (first byte, first byte after it)."""
        sorted_spans = sorted(spans)
        self._starts = [start for start, _ in sorted_spans]
        self._ends = [end for _, end in sorted_spans]
        #: All spans lie between these, and maybe other memory.
        self.low = self._starts[0] if sorted_spans else 0
        self.high = self._ends[-1] if sorted_spans else 0

    def copied(self, output: Any, component: str) -> Any:
        """Return `output`, with copies of its tensors at these addresses.

        Returns `output` itself if it has no such tensor, at about 0.2 us for each tensor. On a GPU
        the copy is queued on the current stream. The copy of a Parameter is a Parameter. Raises:
        NotWhileAttached, naming `component`, if a structure around such tensors cannot be copied.
        """
        if not self._are_in((output,), _DEPTH_MAX):
            return output
        return _Copying(self, component).of(output, _DEPTH_MAX)

    def has(self, tensor: torch.Tensor) -> bool:
        try:
            start = tensor.data_ptr()
        except RuntimeError:
            if not is_functorch_wrapped_tensor(tensor):
                return False  # sparse tensors are not moved
            return self.has(get_unwrapped(tensor))
        if self.low <= start < self.high:
            return start < self._ends[bisect_right(self._starts, start) - 1]
        return (
            type(tensor) is not torch.Tensor
            and is_wrapper(tensor)
            and any(self.has(getattr(tensor, name)) for name in inner_names(tensor))
        )

    def _are_in(self, values: Iterable[Any], depth: int) -> bool:
        """Whether a value is, or contains, a tensor at these addresses. Runs at every call."""
        low, high = self.low, self.high
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                continue
            if kind is torch.Tensor:
                try:
                    if not low <= value.data_ptr() < high:
                        continue
                except RuntimeError:  # functorch, sparse
                    pass
            if isinstance(value, torch.Tensor):
                if self.has(value):
                    return True
            elif depth and self._are_in(_inside(value), depth - 1):
                return True
        return False


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, _COLLECTIONS):
        collection: Iterable[Any] = value
        return collection
    if type(value) in _ITERATORS:
        iterator: Iterable[Any] = copy.copy(value)
        return iterator
    return [one for _, one in _items(value)]


def tensors_in(output: Any, depth: int = _DEPTH_MAX) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif depth and type(output) not in _PLAIN:
        for value in _inside(output):
            yield from tensors_in(value, depth - 1)


def _items(output: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(output, Mapping):
        yield from output.items()
    elif is_dataclass(output) and not isinstance(output, type):
        for one in fields(output):
            if hasattr(output, one.name):
                yield one.name, getattr(output, one.name)
    elif not callable(output):  # modules own weights, they are no views of them
        for name, value in getattr(output, "__dict__", {}).items():
            if isinstance(value, torch.Tensor):
                yield name, value


class _Copying:
    """Copies one output; an item that occurs twice is copied once."""

    def __init__(self, lent: ComponentSpans, component: str) -> None:
        self._lent = lent
        self._component = component
        self._made: dict[int, Any] = {}

    def of(self, output: Any, depth: int) -> Any:
        if not self._lent._are_in((output,), depth):
            return output
        if id(output) not in self._made:
            self._made[id(output)] = self._copy(output, depth)
        return self._made[id(output)]

    def _copy(self, output: Any, depth: int) -> Any:
        if isinstance(output, torch.Tensor):
            return _copied(output)
        try:
            return self._rebuilt(output, depth)
        except (TypeError, ValueError, AttributeError) as exc:
            raise NotWhileAttached(
                f"{self._component!r} returned a {type(output).__name__} with tensors that are its "
                f"weights, or views of them, and it cannot be copied ({exc}). To read them, hold "
                f"it: call it in `with attachment.use({self._component!r})`"
            ) from exc

    def _rebuilt(self, output: Any, depth: int) -> Any:
        if isinstance(output, _COLLECTIONS + _ITERATORS):
            values = [self.of(value, depth - 1) for value in output]
            if isinstance(output, deque):
                return type(output)(values, output.maxlen)
            make: Callable[..., Any] = getattr(output, "_make", type(output))
            return iter(values) if isinstance(output, _ITERATORS) else make(values)
        changed = {
            name: made
            for name, value in list(_items(output))
            if (made := self.of(value, depth - 1)) is not value
        }
        made = copy.copy(output)
        for name, value in changed.items():
            if isinstance(made, MutableMapping):
                made[name] = value
            else:
                object.__setattr__(made, name, value)  # works for a frozen dataclass, too
        return made


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or is_functorch_wrapped_tensor(tensor)
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return tensor.clone()
    with torch.no_grad():
        # only its own bytes: an expanded tensor seems to have more
        end = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        used = torch.as_strided(tensor, (end,), (1,), tensor.storage_offset()).clone()
        made = view(used.untyped_storage(), 0, tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made
