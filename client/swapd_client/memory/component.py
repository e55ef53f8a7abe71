"""A component, for the process that registered it."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from swapd_client.checks import Uncopied, check
from swapd_client.errors import InvalidSource
from swapd_client.memory.layout import BufferLayout
from swapd_client.memory.part import Part
from swapd_client.memory.scratch import Scratch, told

if TYPE_CHECKING:
    import torch


class Component(Uncopied):
    """A registered component: its address and size. `Client.register` makes it.

    Touch its bytes under a lease only.
    """

    def __init__(self, part: Part) -> None:
        self._part = part

    def __repr__(self) -> str:
        return f"<Component {self.name} {self.nbytes >> 20} MiB at {self.address:#x}>"

    @property
    def name(self) -> str:
        """The name in the daemon."""
        return self._part.name

    @property
    def part_of(self) -> str:
        """Its family, or ""."""
        return self._part.part_of

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._part.nbytes

    @property
    def address(self) -> int:
        """The address of its bytes. Never changes."""
        return self._part.address

    @property
    def mutable(self) -> bool:
        """Whether it may be written to, under a lease."""
        return self._part.mutable

    @property
    def segments(self) -> int:
        """The number of segments that it arrives in."""
        return self._part.segments

    def view(self, key: str) -> memoryview:
        """One of the buffers it was registered from, at its stable address.

        On the host device only: use `address` for bytes on a GPU. Raises: InvalidSource if there is
        no such buffer.
        """
        check("key", key, str, "the name of a buffer")
        layout, where = self._part.layout, self._part.where
        if isinstance(layout, Scratch):
            raise InvalidSource(f"{self.name!r} is scratch, without buffers: use component.tensor")
        if not isinstance(layout, BufferLayout):
            raise InvalidSource(f"{self.name!r} was made from tensors: use those, not view()")
        if not where.addressable:
            raise InvalidSource(
                f"{self.name!r} is in GPU memory, which the CPU cannot read: give "
                "component.address to code on the GPU"
            )
        if key not in layout.names():
            raise InvalidSource(
                f"{self.name!r} has no buffer {key!r}; there are: {', '.join(layout.names())}"
            )
        view = layout.view(key, self.address)
        where.used_by([view.obj])  # all views of the view share it
        return view if self.mutable else view.toreadonly()

    @property
    def tensor(self) -> "torch.Tensor":
        """For scratch: all of it, as uint8, at its address. Touch it under a lease only."""
        layout, where = self._part.layout, self._part.where
        if not isinstance(layout, Scratch):
            raise InvalidSource(
                f"{self.name!r} is no scratch, so it has no single tensor: use its own tensors"
            )
        if layout.tensor is None:
            where.used_by([layout.make_tensor(self.address).untyped_storage()])
        assert layout.tensor is not None
        return layout.tensor

    @property
    def lost(self) -> bool:
        """For scratch: whether its last contents have left the device and were not kept.

        `lease.fresh` says so as well. Use this after the loss of the daemon, when the bytes are
        zeros.
        """
        return self._part.is_lost

    def used(self, ranges: Iterable[tuple[int, int]]) -> None:
        """For saved scratch: save only these ranges `(offset, bytes)` from now on.

        Call it under a lease: the release of that lease tells the daemon, and the ranges hold until
        the next call. Bytes outside of all ranges are zeros after the next load; without any range,
        nothing is saved. Before the first call, all of it is saved. Sends no message, and copies
        nothing. Raises: InvalidSource for an invalid range, and for a component that is not saved
        scratch.
        """
        if self._part.scratch != "saved":
            raise InvalidSource(
                f"{self.name!r} is not saved in part; register_scratch(..., mutable=True) is"
            )
        check("ranges", ranges, Iterable, "a list of (offset, bytes)")
        self._part.note_used(told(ranges, self.nbytes))

    @property
    def tensors(self) -> "Mapping[str, torch.Tensor]":
        """The tensors loaded from files, by name. Touch their bytes under a lease only."""
        tensors: Mapping[str, torch.Tensor] | None = getattr(self._part.layout, "tensors", None)
        if tensors is None:
            raise InvalidSource(
                f"{self.name!r} was not loaded from files: use the tensors it was made of"
            )
        return tensors
