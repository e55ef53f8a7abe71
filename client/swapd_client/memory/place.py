"""The address range of a component, on any device, also of one whose daemon is gone."""

import atexit
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Runs
from swapd_client.memory.layout import Spans


class Place:
    """An address range: `mapping.Range` on the host, `gpu.GpuRange` on a GPU.

    Thread-safe. Methods that a device has no work for do nothing.
    """

    #: Whether the CPU can touch the bytes.
    addressable = False
    #: Stable until the end of the process.
    address: int
    #: The residency shown last; 0 before the first.
    generation = 0
    #: Whether the range is freed, or another range has its addresses.
    over = False
    #: Whether the bytes can be touched.
    shown = False
    #: Called when memory that was the daemon's is gone.
    when_left: Callable[[], None] | None = None
    #: The chunks with the latest bytes; None if the host copy has those.
    _latest: tuple[Any, ...] | None = None

    def __init__(self, nbytes: int, *, taken_over: bool) -> None:
        self.nbytes = nbytes
        #: Whether the range took over a former component's tensors, in private memory until it is
        #: shown.
        self.taken_over = taken_over
        #: Held while the memory changes. Re-entrant: a signal handler may acquire.
        self.lock: Any = threading.RLock()

    def __repr__(self) -> str:
        where = "in" if self.shown else "out"
        name = type(self).__name__
        return f"<{name} {self.address:#x} {self.nbytes} B {where} gen={self.generation}>"

    @property
    def on_chunks(self) -> bool:
        """Whether the daemon's chunks are accessible at the range."""
        return False

    def is_shown(self, generation: int) -> bool:
        return self.shown and generation == self.generation

    def show(self, generation: int, runs: Runs) -> None:
        """Map the chunks of this generation at the range."""

    def lend(self, generation: int, runs: Runs) -> None:
        """As `show`, for a lease that calls `reach` before it touches bytes that may be loading."""

    def reach(self, generation: int, nbytes: int) -> None:
        """Make the first `nbytes` of a lent range accessible. Raises: DeviceFailed."""

    def hide(self, generation: int | None = None) -> None:
        """Make all accesses fault, unless a newer `generation` is shown. Raises: DeviceFailed.

        Showing the chunks again is cheap.
        """

    def revoke(self, generation: int | None = None) -> None:
        """As `hide`, so that the daemon may lend the chunks to others."""

    def let_go(self) -> None:
        """As `revoke`: nobody needs the bytes any more."""
        self.revoke()

    def drop(self, numbers: tuple[int, ...]) -> None:
        """Unmap these files, whose memory goes away."""

    def saved(self, generation: int) -> None:
        """Note that the host copy has the latest bytes."""
        with self.lock:
            if generation == self.generation:
                self._latest = None

    def set_memory_aside(self) -> None:
        """Reserve memory for `make_private`. Raises: OutOfMemory."""

    def give_memory_back(self) -> None: ...

    def make_private(self, master: OwnedFd | None, *, keep_shown: bool) -> None:
        """Make the range private memory with the component's bytes; zeros without a host copy."""

    def give_up_private(self) -> None:
        """Free the memory that was taken over: the component is registered."""

    def stay_private(self) -> bool:
        """After a failed registration, keep the memory taken over. False if it is gone."""
        return False

    def used_by(self, things: Iterable[object]) -> None:
        """Free private memory when the last of these objects, which have bytes there, is gone."""

    def discard(self) -> None:
        """Free the range. Only before any tensor was made over it."""


# --- former components ---------------------------------------------------------------------------
# CUDA graphs and other code hold a tensor's address. So a tensor that is registered with the next
# daemon keeps its range, which is private memory meanwhile.


class FormerPlace(NamedTuple):
    where: Place
    #: All storages in the range.
    spans: Spans
    #: The sealed host copy of which the range is a private mapping; owned here.
    master: OwnedFd | None = None

    def close(self) -> None:
        if self.master is not None:
            self.master.close()


#: By device and address of the first storage. Each function makes one call of the dict, so a fork
#: needs no lock.
_all: dict[tuple[str, int], FormerPlace] = {}


def keep(device: str, former: FormerPlace) -> None:
    """Remember a component of `device` ("" is the host) that has become private memory."""
    if not former.spans:
        return former.close()
    key = device, min(former.spans)[0]
    if (older := _all.pop(key, None)) is not None:
        older.close()
    _all[key] = former
    if former.where.over:  # freed already: no tensor is left there
        forget(former.where)


def find(device: str, spans: Spans) -> FormerPlace | None:
    former = _all.get((device, min(spans)[0])) if spans else None
    return former if former is not None and former.spans == spans else None


def forget(where: Place) -> None:
    """Forget a range that is free, or that a component has."""
    for key, former in list(_all.items()):
        if former.where.address == where.address:
            _all.pop(key, former).close()


@atexit.register
def _close_all() -> None:
    for former in _all.values():
        former.close()
