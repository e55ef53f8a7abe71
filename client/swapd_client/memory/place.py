"""An address range of a component, whatever it is made of."""

from collections.abc import Callable, Iterable
from typing import Protocol

from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Runs


class Place(Protocol):
    """See `mapping.Range` on the host, and `gpu.GpuRange` on a GPU."""

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

    def make_private(self, master: OwnedFd | None, *, keep_shown: bool, saved: int = 0) -> None:
        """Make the range memory of this process's own, with the component's bytes in it;
        without a master zeros."""

    def give_up_private(self) -> None:
        """The component is registered: of the memory that was taken over nothing is left."""

    def stay_private(self) -> bool:
        """Registering failed: be what was taken over, for good. False if that is gone."""

    def used_by(self, things: Iterable[object]) -> None:
        """These have bytes there for as long as they live: no longer is private memory kept."""

    def discard(self) -> None:
        """Free the range: only before any tensor was made over it."""
