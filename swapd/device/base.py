"""The contract every device keeps. One suite, `tests/device/test_contract.py`, holds it."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Ranges, Runs
from swapd.shared.units import size

#: may_write(chunk) blocks until the chunk may be written to; DeviceError: it never will be.
MayWrite = Callable[[int], None]
#: landed(n): the first n bytes of the copy are where they were to go.
Landed = Callable[[int], None]


class DeviceError(Exception):
    """One operation failed; chunks and masters are as they were. The message says what was
    asked and why it failed."""


class DeviceLost(DeviceError):
    """The device is gone for this process: every later call fails with the same message."""


class NotAllBack(DeviceError):
    """Not all of what was lent is there yet: `back` are the chunks that are, `still` the rest."""

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
    """Who has the device's memory. Bytes; `notes` are sentences for people."""

    total: int
    free: int
    processes: tuple[ProcessUse, ...]
    notes: tuple[str, ...]
    #: Of host copies: what is pinned, and what was to be and was refused.
    pinned: int = 0
    unpinned: int = 0


class Pinned(NamedTuple):
    """Host memory that is pinned, in bytes; and why the last was not that was refused, or ""."""

    nbytes: int
    refused: str = ""


class Device(Protocol):
    """An arena of `chunks` chunks of `chunk_bytes` bytes, allocated once.

    Whatever blocks, blocks the calling thread, which is never the event loop's; the GIL is
    released meanwhile. One copy in and one copy out may run at the same time, on disjoint
    chunks but for those that `may_write` keeps apart.
    """

    #: "host", "cuda:0"
    name: str
    #: "GPU-..." by which another process finds the same card; "" on the host.
    uuid: str
    chunk_bytes: int
    chunks: int
    #: File i holds the chunks from i * k on, chunk c at offset (c % k) * chunk_bytes.
    chunks_per_file: int
    #: Whether work that a process has put there may go on for a while when the process has ended.
    outlasts: bool
    #: Whether `pin` takes memory that is mapped read-only here.
    read_only_pins: bool

    def export(self, file: int, *, writable: bool) -> OwnedFd:
        """A descriptor through which a worker can map the chunks of `file`. The caller owns it.

        On the host no mapping made through it can ever be written to without `writable`; on
        a GPU that is the importer's to keep. Never blocks. Raises: OSError if this process
        is out of descriptors; DeviceError if the chunk is lent.
        """

    def pin(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Make copies from and to this memory fast; `writable` says how it is mapped here.

        `address` is a page's. Blocks, 0.1 s and more for each GiB. Copies work either way,
        also meanwhile. Raises: DeviceError when refused, also half way: what was pinned by
        then stays so and is used, and pinning it again goes on from there.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is unmapped; nothing if it is not pinned, or if the
        device is lost, which uses it no more. Blocks. No copy may be using it.
        """

    def pinned(self) -> Pinned | None:
        """How far all calls of `pin` have come; None where copies are fast without. Does not
        block.
        """

    def copy_in(
        self,
        runs: Runs,
        source: int,
        nbytes: int,
        *,
        only: Ranges | None = None,
        may_write: MayWrite | None = None,
        landed: Landed | None = None,
    ) -> None:
        """Copy `nbytes` bytes at address `source` into the chunks of `runs`, in order.

        Of them `only` these, if it is given: zeros are there instead of the others, and of the
        source no other byte is read.

        `may_write` is called before the first byte goes into each chunk, in order. If it
        raises, nothing more is written, and the error is raised when what is in flight has
        ended. `landed` is called in order, every few MiB and at the end, from this thread
        or one of the device's. The caller keeps `source` mapped until the copy returns. The last
        chunk is zero beyond these bytes then: nothing is left of what was there before.
        Raises: DeviceError; then the chunks' contents are undefined, and they are still the
        caller's.
        """

    def copy_out(
        self,
        runs: Runs,
        target: int,
        nbytes: int,
        *,
        only: Ranges | None = None,
        landed: Landed | None = None,
    ) -> None:
        """Copy the first `nbytes` bytes of the chunks of `runs` to address `target`.

        Of them `only` these, if it is given; the rest of the target stays as it is.

        `landed` as in `copy_in`: the chunks those bytes came from may be overwritten.
        Raises: DeviceError; then the target's contents are undefined, the chunks' are not.
        """

    def lend(self, runs: Runs) -> None:
        """Give the chunks' memory back to the system; their numbers stay.

        It is back when no worker has them mapped or imported any more. Blocks. Raises:
        DeviceError; then some of them may be lent, and `reclaim` takes them all the same.
        """

    def reclaim(self, runs: Runs) -> None:
        """Allocate the lent ones among the chunks again, with zeros in them. Blocks.

        Their files are new ones: what was exported before is other memory on a GPU. Raises:
        NotAllBack if there is not memory for all of them, or not yet: some of them may be back;
        DeviceError, then nothing has changed.
        """

    def use(self) -> MemoryUse:
        """Who has the device's memory just now. Blocks. Raises: DeviceLost."""

    def close(self) -> None:
        """Free the arena. Mappings in workers keep their memory alive."""
