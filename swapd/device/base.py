"""The contract of every device, checked by `tests/device/test_contract.py`, and arithmetic on
chunks."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from swapd.shared.errors import UserError
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Ranges, Runs
from swapd.shared.units import size

#: landed(n): the first n bytes of the copy have arrived.
Landed = Callable[[int], None]


class DeviceError(UserError):
    """An operation failed; chunks and host copies are unchanged."""


class DeviceLost(DeviceError):
    """The device is gone for this process: every later call fails with the same message."""


class ChunksMissing(DeviceError):
    """Some lent chunks have no memory yet: `still`. Those in `back` have it."""

    def __init__(self, why: str, back: Runs, still: Runs) -> None:
        super().__init__(why)
        self.back = back
        self.still = still


class ProcessUse(NamedTuple):
    pid: int
    name: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid}) has {size(self.nbytes)}"


class MemoryUse(NamedTuple):
    """Bytes of the device's memory. `notes` are sentences for people."""

    total: int
    free: int
    processes: tuple[ProcessUse, ...]
    notes: tuple[str, ...]
    #: Bytes of host copies: pinned, and refused by the device.
    pinned: int = 0
    unpinned: int = 0


class Pinned(NamedTuple):
    """Bytes of pinned host memory; cause of the last refusal."""

    nbytes: int
    refused: str = ""


class Device(Protocol):
    """An arena of `chunks` chunks of `chunk_bytes` bytes, allocated once.

    Blocking methods release the GIL; never call them in the event loop's thread. One copy in and
    one copy out may run at the same time, on disjoint chunks.
    """

    #: "host", "cuda:0"
    name: str
    #: "GPU-...", the same in every process; "" on the host.
    uuid: str
    chunk_bytes: int
    chunks: int
    #: File i holds k chunks from i * k on, chunk c at offset (c % k) * chunk_bytes.
    chunks_per_file: int
    #: Chunks that have no memory yet, as after `reclaim` with ChunksMissing.
    missing: Runs
    #: Whether work of a process may go on for a while after its end.
    outlasts: bool
    #: Whether `pin` accepts memory that is mapped read-only in this process.
    read_only_pins: bool

    def export(self, file: int, *, writable: bool) -> OwnedFd:
        """Return a descriptor through which a worker can map the chunks of `file`. The caller owns
        it.

        Without `writable`, the host device allows no writable mapping; on a GPU the importer must
        see to that. Never blocks. Raises: OSError without a free descriptor; DeviceError if the
        chunk is lent.
        """

    def pin(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Make copies from and to this memory, which begins with a page, fast. `writable` says how
        it is mapped in this process.

        Blocks, 0.1 s or more per GiB; copies may run meanwhile. Raises: DeviceError on refusal,
        also part-way: the part pinned by then stays pinned, and the next call goes on there.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is unmapped and while no copy uses it. No-op if it is not
        pinned or the device is lost. Blocks."""

    def pinned(self) -> Pinned | None:
        """Return the progress of all `pin` calls; None if copies need no pinned memory. Does not
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
        """Copy `nbytes` bytes from address `source`, which must stay mapped until the copy returns,
        into the chunks of `runs`, in order. The rest of the last chunk is zeroed.

        With `only`, copy these ranges and zero the others, without reading the source there. The
        first `start` bytes arrived in an earlier copy of the same bytes to the same chunks, which
        `landed` ended by raising.

        `landed` is called in order, every few MiB and at the end, in this thread or one of the
        device's. If it raises, the copy raises that error after the pieces in flight. Raises:
        DeviceError; then the chunks' contents are undefined, and the caller still owns them.
        """

    def copy_out(
        self,
        runs: Runs,
        target: int,
        nbytes: int,
        *,
        only: Ranges | None = None,
    ) -> None:
        """Copy the first `nbytes` bytes of the chunks of `runs` to address `target`; with `only`,
        just these ranges. Raises: DeviceError; then the target's contents are undefined, and the
        chunks unchanged."""

    def lend(self, runs: Runs) -> None:
        """Give the memory of these chunks back to the system; their numbers stay. Blocks.

        It is free once no worker has it mapped or imported. Raises: DeviceError; then some chunks
        may be lent, and `reclaim` accepts all of them.
        """

    def reclaim(self, runs: Runs) -> None:
        """Allocate the lent chunks among these again, filled with zeros. Blocks.

        On a GPU, earlier exports of them refer to other memory. Raises: ChunksMissing if there is
        not enough memory yet, though some chunks may be back; DeviceError, then nothing has
        changed.
        """

    def use(self) -> MemoryUse:
        """Blocks. Raises: DeviceLost."""

    def close(self) -> None:
        """Free the arena. Mappings in workers keep their memory allocated."""


#: More bytes than any component has.
_BEYOND = 1 << 62


class Piece(NamedTuple):
    """A part of a copy, in bytes. `offset` is in the arena, `done` in the component."""

    offset: int
    done: int
    nbytes: int


def chunks_in(budget: int, chunk: int, unit: int = 1) -> int:
    """Return the whole chunks in a budget of bytes. Raises: DeviceError, also if `chunk` is not a
    multiple of `unit`."""
    if chunk <= 0 or chunk % unit:
        raise DeviceError(f"chunk of {chunk} bytes: use a multiple of 2 MiB")
    if budget < chunk:
        meant = f" (did you mean {budget}MiB?)" if budget < 1 << 20 else ""
        raise DeviceError(
            f"a budget of {budget} bytes is less than one chunk of {size(chunk)}{meant}: raise "
            "--budget, or lower --chunk"
        )
    return budget // chunk


def cut(runs: Runs, nbytes: int, chunk: int) -> list[Piece]:
    """Cut `nbytes` bytes into one piece for each run. Raises: DeviceError if they do not fit."""
    pieces = []
    done = 0
    for first, n in runs:
        length = min(n * chunk, nbytes - done)
        if length:
            pieces.append(Piece(first * chunk, done, length))
        done += length
    if done < nbytes:
        raise DeviceError(f"{nbytes} bytes do not fit into chunks {runs}")
    return pieces


def mark(pieces: Iterable[Piece], only: Ranges | None) -> Iterator[tuple[Piece, bool]]:
    """Cut the pieces where `only` begins and ends; yield each with whether it is in `only`."""
    if only is None:
        yield from ((piece, True) for piece in pieces)
        return
    ranges = iter((*only, (_BEYOND, 0)))
    start, length = next(ranges)
    for offset, done, nbytes in pieces:
        at = done
        while at < done + nbytes:
            while start + length <= at:
                start, length = next(ranges)
            inside = start <= at
            end = min(start + length if inside else start, done + nbytes)
            yield Piece(offset + at - done, at, end - at), inside
            at = end


def split(pieces: Iterator[Piece] | list[Piece], most: int) -> Iterator[Piece]:
    for offset, done, nbytes in pieces:
        for at in range(0, nbytes, most):
            yield Piece(offset + at, done + at, min(most, nbytes - at))


def numbers(runs: Runs) -> list[int]:
    return [chunk for first, n in runs for chunk in range(first, first + n)]


def files_of(runs: Runs, chunks_per_file: int) -> list[int]:
    return list(dict.fromkeys(chunk // chunks_per_file for chunk in numbers(runs)))


def whole_files(runs: Runs, chunks_per_file: int) -> list[int]:
    """Return the files whose chunks are all in `runs`."""
    chunks = set(numbers(runs))
    return [
        file
        for file in files_of(runs, chunks_per_file)
        if chunks.issuperset(range(file * chunks_per_file, (file + 1) * chunks_per_file))
    ]


def runs_of(chunks: Iterable[int]) -> Runs:
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and sum(runs[-1]) == chunk:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((chunk, 1))
    return tuple(runs)


class Tails:
    """The offset in each chunk from which on it is zero.

    A worker maps its last chunk as a whole, so a load zeroes what earlier bytes are there, and no
    more: small components in large chunks come and go at no extra cost.
    """

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._ends = [0] * chunks
        #: Whether workers may write to chunks, and so beyond their components.
        self.writable = False

    def begin(self, whole: list[Piece]) -> Piece | None:
        """Before these pieces, one for each run, are copied in: return the range to zero after
        them."""
        if not whole:
            return None
        chunk, end = self._last(whole)
        left = self._chunk_bytes if self.writable else self._ends[chunk]
        for piece in whole:
            first = piece.offset // self._chunk_bytes
            last = (piece.offset + piece.nbytes - 1) // self._chunk_bytes
            for number in range(first, last + 1):
                self._ends[number] = self._chunk_bytes
        return Piece(chunk * self._chunk_bytes + end, 0, left - end) if left > end else None

    def end(self, whole: list[Piece]) -> None:
        """Call this when the pieces have arrived and the range is zeroed."""
        if whole:
            chunk, end = self._last(whole)
            self._ends[chunk] = end

    def _last(self, whole: list[Piece]) -> tuple[int, int]:
        """Return the last chunk, and the offset in it where the bytes end."""
        end = whole[-1].offset + whole[-1].nbytes
        chunk = (end - 1) // self._chunk_bytes
        return chunk, end - chunk * self._chunk_bytes
