"""The address range of a component, on any device; and those of components whose daemon is gone."""

import atexit
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Runs
from swapd_client.memory.layout import Spans


class Place(Protocol):
    """See `mapping.Range` on the host, and `gpu.GpuRange` on a GPU."""

    #: Held while its memory changes: an RLock.
    lock: Any
    #: Whether the CPU can touch the bytes.
    addressable: bool
    nbytes: int
    #: Stable until the end of the process.
    address: int
    #: The residency that was shown last; 0 before the first.
    generation: int
    #: Whether it took over a former component's tensors, in private memory until it is shown.
    taken_over: bool
    #: Called when private memory that came from the daemon is gone.
    when_left: Callable[[], None] | None

    @property
    def over(self) -> bool:
        """Whether another range has taken over its addresses, or they are free."""

    @property
    def shown(self) -> bool:
        """Whether the bytes can be touched."""

    @property
    def on_chunks(self) -> bool:
        """Whether this process can touch chunks of the daemon at the range."""

    def is_shown(self, generation: int) -> bool:
        """Whether `show` would have nothing to do."""

    def show(self, generation: int, runs: Runs) -> None:
        """Put the chunks of this generation behind the range."""

    def lend(self, generation: int, runs: Runs) -> None:
        """As `show`, for a lease that calls `reach` before it touches bytes: some have not come."""

    def reach(self, generation: int, nbytes: int) -> None:
        """Make the first `nbytes` accessible, if it is lent or shown. Raises: DeviceFailed."""

    def hide(self, generation: int | None = None) -> None:
        """Any access faults from now on; showing the chunks again is cheap."""

    def revoke(self, generation: int | None = None) -> None:
        """As `hide`; the daemon may then lend the chunks to others."""

    def drop(self, numbers: tuple[int, ...]) -> None:
        """The memory of these files goes away: unmap it."""

    def saved(self, generation: int) -> None:
        """The host copy has the latest bytes now."""

    def set_memory_aside(self) -> None:
        """Reserve memory for `make_private`. Raises: OutOfMemory."""

    def give_memory_back(self) -> None:
        """Return the reserved memory; it is not needed."""

    def make_private(self, master: OwnedFd | None, *, keep_shown: bool) -> None:
        """Make the range private memory with the component's bytes; zeros without a host copy."""

    def give_up_private(self) -> None:
        """The component is registered: drop all memory that was taken over."""

    def stay_private(self) -> bool:
        """Registering failed: keep the memory that was taken over. False if it is gone."""

    def used_by(self, things: Iterable[object]) -> None:
        """These objects have bytes there. When the last is gone, private memory is freed."""

    def discard(self) -> None:
        """Free the range; only before any tensor was made over it."""


# --- former components ---------------------------------------------------------------------------
# CUDA graphs and other code hold a tensor's address. So when the tensor is registered with the next
# daemon, its component takes back the tensor's range, private memory meanwhile.


class Former(NamedTuple):
    where: Place
    #: Its storages; nothing else is in its range.
    spans: Spans
    #: Its sealed host copy, of which the range is a private mapping; owned by this.
    master: OwnedFd | None = None

    def close(self) -> None:
        if self.master is not None:
            self.master.close()


#: By device, and by the address of the first storage. Each function below makes one call of the
#: dict, so no lock can be held at a fork.
_all: dict[tuple[str, int], Former] = {}


def keep(device: str, former: Former) -> None:
    """A component of `device` ("" is the host) has become private memory."""
    if not former.spans:
        return former.close()
    key = device, min(former.spans)[0]
    if (older := _all.pop(key, None)) is not None:
        older.close()
    _all[key] = former
    if former.where.over:  # freed already, since no tensor is left there
        forget(former.where)


def find(device: str, spans: Spans) -> Former | None:
    """The former component with exactly these storages."""
    former = _all.get((device, min(spans)[0])) if spans else None
    return former if former is not None and former.spans == spans else None


def forget(where: Place) -> None:
    """The memory of this range is free, since no tensor is left there; or a component has it."""
    for key, former in list(_all.items()):
        if former.where.address == where.address:
            _all.pop(key, former).close()


@atexit.register
def _close_all() -> None:
    for former in _all.values():
        former.close()
