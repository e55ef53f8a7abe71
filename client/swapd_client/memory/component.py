"""A component as the process that registered it sees it."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from swapd.shared import vm
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Runs
from swapd_client.errors import InvalidSource
from swapd_client.memory.layout import BufferLayout, Layout

if TYPE_CHECKING:
    import torch

    from swapd_client.memory.ranges import Claim


class Place(Protocol):
    """An address range; see `mapping.Range` on the host, `gpu.GpuRange` on a GPU."""

    #: Whether the CPU can touch the bytes.
    addressable: bool
    nbytes: int
    #: Stable until the end of the process.
    address: int
    #: Of the residency that was last shown; 0 before the first.
    generation: int
    #: Whether a former component's tensors lie there, in private memory until it is shown.
    taken_over: bool
    #: To be called when private memory that was the daemon's is there no longer.
    when_left: Callable[[], None] | None

    @property
    def over(self) -> bool:
        """Whether its addresses are another's by now, or anybody's."""

    @property
    def shown(self) -> bool:
        """Whether the bytes can be touched."""

    @property
    def on_chunks(self) -> bool:
        """Whether this process can touch chunks of the daemon's there."""

    def is_shown(self, generation: int) -> bool:
        """Whether `show` would find nothing to do."""

    def show(self, generation: int, runs: Runs) -> None:
        """Put the chunks of this generation behind the range."""

    def hide(self, generation: int | None = None) -> None:
        """Any access faults from now on; the chunks may be shown again cheaply."""

    def revoke(self, generation: int | None = None) -> None:
        """As `hide`; and the chunks are others' to use, or to lend away."""

    def drop(self, numbers: tuple[int, ...]) -> None:
        """The memory of these files goes away: be on none of it."""

    def saved(self, generation: int) -> None:
        """The master has the latest bytes now."""

    def set_memory_aside(self) -> None:
        """Have memory for `make_private`, or raise DeviceMemoryExhausted."""

    def give_memory_back(self) -> None:
        """It was set aside, and is not needed."""

    def make_private(self, master: OwnedFd, *, keep_shown: bool, saved: int = 0) -> None:
        """Make the range memory of this process's own, with the component's bytes in it."""

    def give_up_private(self) -> None:
        """The component is registered: of the memory that was taken over nothing is left."""

    def stay_private(self) -> bool:
        """Registering failed: be what was taken over, for good. False if that is gone."""

    def used_by(self, things: Iterable[object]) -> None:
        """These have bytes there for as long as they live: no longer is private memory kept."""

    def discard(self) -> None:
        """Free the range: only before any tensor was made over it."""


class Component:
    """A registered component: where it is, and how much it is.

    `address` never changes. The bytes may be touched under a lease only.
    """

    def __init__(
        self, name: str, layout: Layout, where: Place, *, mutable: bool, part_of: str = ""
    ) -> None:
        self.name = name
        #: The family that it is a part of, or "".
        self.part_of = part_of
        self.nbytes = layout.nbytes
        self.address = where.address
        self.mutable = mutable
        self._layout = layout
        self._range = where
        #: How many segments it arrives in.
        self.segments = len(layout.segments)
        self._master: OwnedFd | None = None
        self._slot = 0
        #: What it is made of, until that is in its range.
        self._claim: Claim | None = None
        #: The request that its master comes for.
        self._asked = 0
        self._holders = 0
        #: Requests up to this one may have been granted the bytes before the last update.
        self._renewed = 0

    def __repr__(self) -> str:
        return f"<Component {self.name} {self.nbytes >> 20} MiB at {self.address:#x}>"

    def view(self, key: str) -> memoryview:
        """One of the buffers it was registered from, at its stable address.

        On the host device only: what is on a GPU is reached by `address`.
        """
        if not isinstance(self._layout, BufferLayout):
            raise InvalidSource("this component was made from tensors; use those")
        if not self._range.addressable:
            raise InvalidSource(
                f"{self.name!r} is in GPU memory, which the CPU cannot read: give "
                "component.address to what runs on the GPU"
            )
        view = self._layout.view(key, self.address)
        self._range.used_by([view.obj])  # what all views of the view have in common
        return view if self.mutable else view.toreadonly()

    def map_master(self) -> int:
        """Map its host copy, and return the address: private and writable, `span` bytes.

        The pages are the master's until they are written to. The caller frees it, and sees to it
        that nobody closes the master meanwhile (`Session.map_master`).
        """
        assert self._master is not None
        address = vm.reserve(self.span)
        try:
            vm.map_private(self._master.fileno(), self.span, at=address)
        except BaseException:
            vm.free(address, self.span)
            raise
        return address

    def bind(self) -> None:
        """It is registered: its bytes are at the range from now on."""
        self._range.used_by(self._layout.bind(self.address))
        if isinstance(self._layout, BufferLayout):
            self._range.used_by([self])  # views are made later, too

    @property
    def span(self) -> int:
        """Its bytes, rounded up to whole pages."""
        return vm.round_up(max(self.nbytes, 1))

    @property
    def tensors(self) -> "Mapping[str, torch.Tensor]":
        """What was loaded from files, by name. Its bytes may be touched under a lease only."""
        tensors: Mapping[str, torch.Tensor] | None = getattr(self._layout, "tensors", None)
        if tensors is None:
            raise InvalidSource("this component was not loaded from files; use what it was made of")
        return tensors

    def _close(self) -> None:
        if self._master is not None:
            self._master.close()
