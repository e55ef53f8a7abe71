"""The contract of every device, and their arithmetic on chunks: copies in pieces, files, and the
zeros behind each component. One test suite, `tests/device/test_contract.py`, checks all devices."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from swapd.shared.errors import UserError
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Ranges, Runs
from swapd.shared.units import size

#: landed(n): the first n bytes of the copy have arrived.
Landed = Callable[[int], None]


class DeviceError(UserError):
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


#: More bytes than any component has.
_BEYOND = 1 << 62


class Piece(NamedTuple):
    """The unit of one copy. Bytes; `offset` is in the arena, `done` in the component."""

    offset: int
    done: int
    nbytes: int


def chunks_in(budget: int, chunk: int, unit: int = 1) -> int:
    """The whole chunks in a budget of bytes. Raises: DeviceError, also if `chunk` is not a multiple
    of `unit`."""
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
    """`nbytes` bytes, one piece for each run of `runs`.

    Raises: DeviceError if they do not fit.
    """
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
    """The same bytes, cut where `only` begins and ends; each piece with whether `only` has it."""
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
    """The same bytes in pieces of at most `most`; each run starts a new piece."""
    for offset, done, nbytes in pieces:
        for at in range(0, nbytes, most):
            yield Piece(offset + at, done + at, min(most, nbytes - at))


def numbers(runs: Runs) -> list[int]:
    """The chunks of `runs`, one by one."""
    return [chunk for first, n in runs for chunk in range(first, first + n)]


def files_of(runs: Runs, chunks_per_file: int) -> list[int]:
    """The files of `runs`, in order."""
    return list(dict.fromkeys(chunk // chunks_per_file for chunk in numbers(runs)))


def whole_files(runs: Runs, chunks_per_file: int) -> list[int]:
    """The files all of whose chunks are in `runs`."""
    chunks = set(numbers(runs))
    return [
        file
        for file in files_of(runs, chunks_per_file)
        if chunks.issuperset(range(file * chunks_per_file, (file + 1) * chunks_per_file))
    ]


def runs_of(chunks: Iterable[int]) -> Runs:
    """These chunks, neighbours as one run."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and sum(runs[-1]) == chunk:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((chunk, 1))
    return tuple(runs)


class Tails:
    """The offset in each chunk of a new arena where its zeros begin.

    A worker maps its last chunk as a whole, so bytes of an earlier component there must be zeroed;
    but only as far as there are any. So small components in large chunks come and go at no extra
    cost.
    """

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._ends = [0] * chunks
        #: Whether workers may write to chunks, and so beyond their components.
        self.writable = False

    def begin(self, whole: list[Piece]) -> Piece | None:
        """Before copying these pieces in, one for each run: return the range to zero after them."""
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
        """The pieces have arrived, and the range is zeroed."""
        if whole:
            chunk, end = self._last(whole)
            self._ends[chunk] = end

    def _last(self, whole: list[Piece]) -> tuple[int, int]:
        """The last chunk, and the offset in it where the bytes end."""
        end = whole[-1].offset + whole[-1].nbytes
        chunk = (end - 1) // self._chunk_bytes
        return chunk, end - chunk * self._chunk_bytes
