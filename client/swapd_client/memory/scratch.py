"""Scratch as a component: no bytes to fill, one tensor over all of it. Imports torch on demand."""

from collections.abc import Callable, Iterable, Mapping
from operator import index
from typing import TYPE_CHECKING, Any

from swapd.shared.protocol import RANGES_MAX, Ranges
from swapd.shared.protocol import Scratch as Kind
from swapd_client.errors import InvalidSource
from swapd_client.memory.layout import Fetch, Ready, Spans

if TYPE_CHECKING:
    import torch

#: Too many ranges are rounded to this unit, doubled until they are few enough.
_UNIT_BYTES = 4096


class Scratch(Ready):
    """A layout of `nbytes` bytes.

    `tensor` is that of a former component, and keeps its address; for "saved" scratch also its
    contents.
    """

    has_views = True

    def __init__(
        self,
        nbytes: int,
        kind: Kind,
        gpu: int | None,
        tensor: "torch.Tensor | None" = None,
        fetch: Fetch | None = None,
    ) -> None:
        """`gpu`: its GPU's index in this process, or None. `fetch` reads bytes on that GPU."""
        self.nbytes = nbytes
        self.segments = (nbytes,)
        self.scratch = kind
        self._gpu = gpu
        self._fetch = fetch
        #: Made on demand.
        self.tensor = tensor
        self.filled = tensor is not None and kind == "saved"

    def make_tensor(self, address: int) -> "torch.Tensor":
        from swapd_client.memory import dlpack

        target = dlpack.HOST if self._gpu is None else dlpack.gpu(self._gpu)
        self.tensor = dlpack.bytes_at(address, self.nbytes, target)
        return self.tensor

    def fill_file(self, fd: int) -> None:
        """Write contents that were kept. Other scratch loads as zeros."""
        if self.filled and self.tensor is not None:
            from swapd_client.memory.tensors import TensorLayout

            layout = TensorLayout({"": self.tensor}, gpu=self._gpu, fetch=self._fetch)
            layout.fill_file(fd)

    def bind(self, address: int) -> Iterable[object]:
        return () if self.tensor is None else [self.tensor.untyped_storage()]

    def lies(self) -> Spans:
        if self.tensor is None:
            return frozenset()
        return frozenset([(self.tensor.data_ptr(), self.nbytes)])

    def stay(self, address: int) -> bool:
        return self.tensor is not None and self.tensor.data_ptr() == address

    def spans(self, address: int) -> Spans:
        return frozenset([(address, self.nbytes)])

    def writer(self, values: Mapping[str, Any]) -> Callable[[int], None]:
        raise InvalidSource("scratch has no values to update; write to it under a lease")


def told(ranges: Iterable[tuple[int, int]], nbytes: int, most: int = RANGES_MAX) -> Ranges:
    """Prepare ranges (offset, bytes) for a message: sorted, joined, at most `most`.

    Too many ranges are rounded outwards until they are few enough: the daemon then saves more
    bytes, never fewer. Raises: InvalidSource if a range is invalid, or ends beyond `nbytes`.
    """
    spans = []
    for one in ranges:
        try:
            start, length = map(index, one)  # of numpy's integers, the release could not be sent
            fits = min(start, length) >= 0 and start + length <= nbytes
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise InvalidSource(
                f"{one!r} is no range (offset, bytes) of {nbytes} bytes: both are integers, 0 or "
                "more, and it ends within"
            )
        if length:
            spans.append((start, start + length))
    joined = _joined(sorted(spans))
    unit = _UNIT_BYTES
    while len(joined) > most:
        joined = _joined((a // unit * unit, min(-(-b // unit) * unit, nbytes)) for a, b in joined)
        unit *= 2
    return tuple((start, end - start) for start, end in joined)


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            start, last = joined.pop()
            end = max(end, last)
        joined.append((start, end))
    return joined
