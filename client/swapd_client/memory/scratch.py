"""Memory without contents of its own, as a component: nothing is filled, and one tensor is all of
it. Imports torch only when somebody asks for that.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from swapd.shared.protocol import RANGES_MAX, Ranges
from swapd.shared.protocol import Scratch as Kind
from swapd_client.errors import InvalidSource
from swapd_client.memory.layout import Fetch, Ready, Spans

if TYPE_CHECKING:
    import torch

#: What more ranges than can be told are rounded to, and then to twice as much, and so on.
_UNIT_BYTES = 4096


class Scratch(Ready):
    """A layout of `nbytes` bytes. `tensor`: where it was, if it lost its daemon and stays there; if
    it is saved, its contents go with it."""

    content = ""
    has_views = True

    def __init__(
        self,
        nbytes: int,
        kind: Kind,
        gpu: int | None,
        tensor: "torch.Tensor | None" = None,
        fetch: Fetch | None = None,
    ) -> None:
        """`gpu`: the index, in this process, of the GPU that it is for; None: the host. `fetch`
        brings what is there."""
        self.nbytes = nbytes
        self.segments = (nbytes,)
        self.scratch = kind
        self._gpu = gpu
        self._fetch = fetch
        #: All of it, where it is; None if nobody has asked for it.
        self.tensor = tensor
        #: Whether there are contents to begin with.
        self.filled = tensor is not None and kind == "saved"

    def make_tensor(self, address: int) -> "torch.Tensor":
        """`nbytes` of uint8 at `address`."""
        from swapd_client.memory import dlpack

        target = dlpack.HOST if self._gpu is None else dlpack.gpu(self._gpu)
        self.tensor = dlpack.bytes_at(address, self.nbytes, target)
        return self.tensor

    @property
    def memory(self) -> Collection[int]:
        return ()  # nothing is moved

    def origins(self) -> Iterable[tuple[str, int, int]]:
        return ()

    def digest(self) -> str:
        return ""

    def fill_file(self, fd: int) -> None:
        """Without contents, nothing: it comes in as zeros."""
        if self.filled and self.tensor is not None:
            from swapd_client.memory.tensors import TensorLayout

            layout = TensorLayout({"": self.tensor}, gpu=self._gpu, fetch=self._fetch)
            layout.fill_file(fd)

    def matches(self, fd: int) -> bool:
        return False

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

    def names(self) -> Iterable[str]:
        return ()

    def writer(self, values: Mapping[str, Any]) -> Callable[[int], None]:
        raise InvalidSource("scratch has no values to update; write to it under a lease")


def told(ranges: Iterable[tuple[int, int]], nbytes: int, most: int = RANGES_MAX) -> Ranges:
    """`ranges` (offset, bytes) of `nbytes` bytes as they are told: sorted, joined, at most so many.

    If they are more they are rounded outwards until they are few enough: more is saved then than
    was said, never less. Raises: InvalidSource if one is none, or beyond the end.
    """
    spans = []
    for start, length in ranges:
        if min(start, length) < 0 or start + length > nbytes:
            raise InvalidSource(
                f"({start}, {length}) is no range (offset, bytes) of {nbytes} bytes: both are 0 "
                "or more, and it ends within"
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
    """Sorted spans (begin, end), those that touch as one."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            start, last = joined.pop()
            end = max(end, last)
        joined.append((start, end))
    return joined
