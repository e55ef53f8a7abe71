"""The contract of every device. One test suite, `tests/device/test_contract.py`, checks them
all."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Ranges, Runs
from swapd.shared.units import size

#: landed(n): the first n bytes of the copy have arrived.
Landed = Callable[[int], None]


class DeviceError(Exception):
    """One operation failed; chunks and host copies are unchanged. The message names the operation
    and the cause."""


class DeviceLost(DeviceError):
    """The device is gone for this process: every later call fails with the same message."""


class NotAllBack(DeviceError):
    """Some lent chunks are not there yet: `back` are those that are, `still` the others."""

    def __init__(self, why: str, back: Runs, still: Runs) -> None:
        super().__init__(why)
        self.back = back
        self.still = still


class ProcessUse(NamedTuple):
    """Another process's share of the device's memory."""

    pid: int
    name: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid}) has {size(self.nbytes)}"


class MemoryUse(NamedTuple):
    """The users of the device's memory. Bytes; `notes` are sentences for people."""

    total: int
    free: int
    processes: tuple[ProcessUse, ...]
    notes: tuple[str, ...]
    #: Bytes of host copies that are pinned, and those that the device refused to pin.
    pinned: int = 0
    unpinned: int = 0


class Pinned(NamedTuple):
    """Host memory that is pinned, in bytes; and the cause of the last refusal, or ""."""

    nbytes: int
    refused: str = ""


class Device(Protocol):
    """An arena of `chunks` chunks of `chunk_bytes` bytes, allocated once.

    Blocking methods block the calling thread, which is never that of the event loop, and release
    the GIL. One copy in and one copy out may run at the same time, on disjoint chunks.
    """

    #: "host", "cuda:0"
    name: str
    #: "GPU-...", by which another process finds the same card; "" on the host.
    uuid: str
    chunk_bytes: int
    chunks: int
    #: File i holds k chunks from i * k on, chunk c at offset (c % k) * chunk_bytes.
    chunks_per_file: int
    #: Whether a process's work on the device may go on for a while after the process has ended.
    outlasts: bool
    #: Whether `pin` accepts memory that is mapped read-only here.
    read_only_pins: bool

    def export(self, file: int, *, writable: bool) -> OwnedFd:
        """A descriptor through which a worker can map the chunks of `file`. The caller owns it.

        Without `writable`, the host device allows no mapping that can ever be written to; on a GPU
        the importer must see to that. Never blocks. Raises: OSError if this process is out of
        descriptors; DeviceError if the chunk is lent.
        """

    def pin(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Make copies from and to this memory fast; `writable` says how it is mapped here.

        `address` is the start of a page. Blocks, 0.1 s and more for each GiB. Copies work without,
        and meanwhile. Raises: DeviceError on refusal, also part-way: the part pinned by then
        stays pinned and in use, and the next call goes on from there.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is unmapped. No-op if it is not pinned, or if the device is
        lost, which no longer uses it. Blocks. No copy may be using it."""

    def pinned(self) -> Pinned | None:
        """The progress of all calls of `pin`; None where copies are fast without. Does not
        block."""

    def copy_in(
        self,
        runs: Runs,
        source: int,
        nbytes: int,
        *,
        only: Ranges | None = None,
        start: int = 0,
        landed: Landed | None = None,
    ) -> None:
        """Copy `nbytes` bytes at address `source` into the chunks of `runs`, in order.

        With `only`, copy just these ranges: the others become zeros, and the source is not read
        there. The first `start` bytes landed in an earlier copy of the same bytes to the same
        chunks, which `landed` ended by raising.

        `landed` is called in order, every few MiB and at the end, from this thread or one of the
        device's. If it raises, the copy raises that error after the pieces in flight. The caller
        keeps `source` mapped until the copy returns. Beyond these bytes the last chunk is zero
        then: no earlier bytes are left. Raises: DeviceError; then the chunks' contents are
        undefined, and they still belong to the caller.
        """

    def copy_out(
        self,
        runs: Runs,
        target: int,
        nbytes: int,
        *,
        only: Ranges | None = None,
    ) -> None:
        """Copy the first `nbytes` bytes of the chunks of `runs` to address `target`.

        With `only`, copy just these ranges; the rest of the target stays as it is.

        Raises: DeviceError; then the contents of the target are undefined, and those of the chunks
        unchanged.
        """

    def lend(self, runs: Runs) -> None:
        """Give the memory of these chunks back to the system; their numbers stay.

        It is free when no worker has them mapped or imported any more. Blocks. Raises: DeviceError;
        then some of them may be lent, and `reclaim` takes them anyway.
        """

    def reclaim(self, runs: Runs) -> None:
        """Allocate the lent chunks among these again, filled with zeros. Blocks.

        Their files are new: on a GPU, earlier exports are other memory. Raises: NotAllBack if there
        is no memory for all of them, or not yet: some of them may be back; DeviceError, then
        nothing has changed.
        """

    def use(self) -> MemoryUse:
        """The current users of the device's memory. Blocks. Raises: DeviceLost."""

    def close(self) -> None:
        """Free the arena. Mappings in workers keep their memory allocated."""
