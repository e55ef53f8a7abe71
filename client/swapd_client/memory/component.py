"""A component as the process that registered it sees it."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from swapd_client.errors import InvalidSource
from swapd_client.memory.layout import BufferLayout
from swapd_client.memory.part import Part
from swapd_client.memory.scratch import Scratch, told

if TYPE_CHECKING:
    import torch


class Component:
    """A registered component: where it is, and how much it is. Made by `Client.register`.

    The bytes may be touched under a lease only.
    """

    def __init__(self, part: Part) -> None:
        self._part = part

    def __repr__(self) -> str:
        return f"<Component {self.name} {self.nbytes >> 20} MiB at {self.address:#x}>"

    @property
    def name(self) -> str:
        """As the daemon calls it."""
        return self._part.name

    @property
    def part_of(self) -> str:
        """The family that it is a part of, or ""."""
        return self._part.part_of

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._part.nbytes

    @property
    def address(self) -> int:
        """Where its bytes are. Never changes."""
        return self._part.address

    @property
    def mutable(self) -> bool:
        """Whether it may be written to, under a lease."""
        return self._part.mutable

    @property
    def segments(self) -> int:
        """How many segments it arrives in."""
        return self._part.segments

    def view(self, key: str) -> memoryview:
        """One of the buffers it was registered from, at its stable address.

        On the host device only: what is on a GPU is reached by `address`.
        """
        layout, where = self._part.layout, self._part.where
        if isinstance(layout, Scratch):
            raise InvalidSource(f"{self.name!r} is scratch, without buffers: use component.tensor")
        if not isinstance(layout, BufferLayout):
            raise InvalidSource(f"{self.name!r} was made from tensors: use those, not view()")
        if not where.addressable:
            raise InvalidSource(
                f"{self.name!r} is in GPU memory, which the CPU cannot read: give "
                "component.address to what runs on the GPU"
            )
        view = layout.view(key, self.address)
        where.used_by([view.obj])  # what all views of the view have in common
        return view if self.mutable else view.toreadonly()

    @property
    def tensor(self) -> "torch.Tensor":
        """Of scratch: all of it, as uint8, at its address. To be touched under a lease only."""
        layout, where = self._part.layout, self._part.where
        if not isinstance(layout, Scratch):
            raise InvalidSource(
                f"{self.name!r} is no scratch, so it has no one tensor: use what it was made of"
            )
        if layout.tensor is None:
            where.used_by([layout.make_tensor(self.address).untyped_storage()])
        assert layout.tensor is not None
        return layout.tensor

    @property
    def lost(self) -> bool:
        """Of scratch: whether what it held last has left the device and was not kept.

        `lease.fresh` says so as well; this is for who has lost the daemon, and finds zeros there.
        """
        return self._part.is_lost

    def used(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Of scratch that is saved: only these `(offset, bytes)` are worth it from now on.

        Call it under a lease: the daemon hears of it by that lease's release, and it counts until
        it is called again. What is in no range is zeros when it comes in again; if there is none at
        all, nothing is saved. Before the first call all of it is. Sends no message, and copies
        nothing. Raises: InvalidSource for what is no range of it, and for what is not saved.
        """
        if self._part.scratch != "saved":
            raise InvalidSource(
                f"{self.name!r} is not saved in part; register_scratch(..., mutable=True) is"
            )
        self._part.note_used(told(ranges, self.nbytes))

    @property
    def tensors(self) -> "Mapping[str, torch.Tensor]":
        """What was loaded from files, by name. Its bytes may be touched under a lease only."""
        tensors: Mapping[str, torch.Tensor] | None = getattr(self._part.layout, "tensors", None)
        if tensors is None:
            raise InvalidSource(
                f"{self.name!r} was not loaded from files: use the tensors it was made of"
            )
        return tensors
