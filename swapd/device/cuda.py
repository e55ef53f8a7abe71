"""The device on an NVIDIA GPU: chunks of its memory, and copies on streams of their own. Only
driver.py calls the driver."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import NamedTuple

from swapd.device.base import (
    ChunksMissing,
    DeviceError,
    DeviceLost,
    Landed,
    MemoryUse,
    Piece,
    Pinned,
    ProcessUse,
    Tails,
    chunks_in,
    cut,
    mark,
    numbers,
    runs_of,
    split,
)
from swapd.device.context import CudaError
from swapd.device.driver import Access, Driver
from swapd.device.nvml import Nvml
from swapd.device.pins import Pins, takes_read_only
from swapd.device.streams import PIECE_BYTES, STAGED_BYTES, Copy, Inward, Outward
from swapd.shared import fds
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Ranges, Runs
from swapd.shared.units import size

#: Descriptors for everything but chunks.
SPARE_DESCRIPTORS = 256

#: Attributes of a GPU whose chunks can be shared.
_ABILITIES = (
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
)


class _Chunk(NamedTuple):
    handle: int
    fd: OwnedFd


class Arena:
    """`chunks` allocations of `chunk_bytes`, mapped in one range. A lent chunk has no allocation.

    Callers must make the context current.
    """

    def __init__(self, driver: Driver, chunks: int, chunk_bytes: int, *, in_part: bool) -> None:
        """`in_part`: chunks for which memory runs out begin lent. Blocks. Raises: DeviceError; then
        nothing is left allocated."""
        self._driver = driver
        self._chunk_bytes = chunk_bytes
        self._nbytes = chunks * chunk_bytes
        self._chunks: list[_Chunk | None] = [None] * chunks
        #: Address of chunk 0 in this process; the others follow.
        self.base = driver.reserve(self._nbytes)
        try:
            short = self.reclaim(list(range(chunks)))
            if short is not None and not in_part:
                raise short
        except DeviceError:
            self.close()
            raise

    def __repr__(self) -> str:
        lent = self._chunks.count(None)
        return f"<Arena {self._nbytes >> 20} MiB in {len(self._chunks)} chunks, {lent} lent>"

    def export(self, number: int) -> OwnedFd:
        """The caller owns the descriptor. Calls no driver."""
        chunk = self._chunks[number]
        if chunk is None:
            raise DeviceError(f"chunk {number} is lent")
        return OwnedFd(os.dup(chunk.fd.fileno()))

    def lend(self, numbers: list[int]) -> None:
        for number in numbers:
            self._free(number)

    def reclaim(self, numbers: list[int]) -> CudaError | None:
        """Allocate lent chunks again; return the driver's error if memory runs out. Raises:
        DeviceError; then all are lent as before."""
        short, made = None, []
        with ExitStack() as undo:
            for number in numbers:
                if self._chunks[number] is not None:
                    continue
                try:
                    self._chunks[number] = self._make(number)
                except CudaError as exc:
                    if not exc.out_of_memory:
                        raise
                    short = exc
                    break
                undo.callback(self._free, number)
                made.append(number)
            self._clear(runs_of(made))
            undo.pop_all()
        return short

    def lent(self) -> Runs:
        return runs_of(n for n, chunk in enumerate(self._chunks) if chunk is None)

    def is_lent(self, number: int) -> bool:
        return self._chunks[number] is None

    def close(self) -> None:
        """Free everything; for a lost device only the descriptors. Raises: DeviceError."""
        try:
            with suppress(DeviceLost), self._driver.current(), ExitStack() as undo:
                undo.callback(self._driver.free, self.base, self._nbytes)
                for number in range(len(self._chunks)):
                    undo.callback(self._free, number)
        finally:
            for chunk in self._chunks:
                if chunk is not None:
                    chunk.fd.close()

    def _at(self, number: int) -> int:
        return self.base + number * self._chunk_bytes

    def _make(self, number: int) -> _Chunk:
        """The GPU has no access to the chunk yet."""
        with ExitStack() as undo:
            handle = self._driver.create(self._chunk_bytes)
            undo.callback(self._driver.release, handle)
            fd = undo.enter_context(self._driver.export(handle))
            self._driver.map(self._at(number), self._chunk_bytes, handle)
            undo.pop_all()
        return _Chunk(handle, fd)

    def _clear(self, runs: Runs) -> None:
        """Make new chunks accessible, and zero them. Other work on the GPU goes on meanwhile."""
        with ExitStack() as undo:
            stream = self._driver.stream()
            undo.callback(self._driver.destroy_stream, stream)
            undo.callback(self._driver.finish, stream)
            for first, count in runs:
                at, nbytes = self._at(first), count * self._chunk_bytes
                self._driver.set_access(at, nbytes, Access.READ_WRITE)
                self._driver.zero_later(at, nbytes, stream)

    def _free(self, number: int) -> None:
        """If the driver does not unmap the chunk, nothing changes."""
        chunk = self._chunks[number]
        if chunk is None:
            return
        self._driver.unmap(self._at(number), self._chunk_bytes)
        self._chunks[number] = None
        chunk.fd.close()
        self._driver.release(chunk.handle)


class CudaDevice:
    """An arena on one GPU. See `swapd.device.base.Device` for the contract."""

    chunks_per_file = 1
    outlasts = True

    def __init__(
        self,
        index: int,
        budget: int,
        chunk: int,
        pin_limit: int | None = None,
        *,
        in_part: bool = False,
    ) -> None:
        """Allocate `budget // chunk` chunks on GPU `index`; sizes are in bytes.

        `pin_limit` bounds the pinned host copies; None: only the driver does. `in_part`: allocate
        what is free if that is less. Blocks. Raises: DeviceError; then nothing is left allocated.
        """
        self.name = f"cuda:{index}"
        self.chunk_bytes = chunk
        self.chunks = chunks_in(budget, chunk)
        with ExitStack() as undo:
            self._driver = undo.enter_context(closing(Driver(index)))
            self._nvml = undo.enter_context(closing(Nvml(self._driver.uuid)))
            self._check(in_part=in_part)
            self.uuid = self._driver.uuid
            self.read_only_pins = takes_read_only(self._driver)
            self._arena = undo.enter_context(closing(self._allocate(in_part=in_part)))
            self.missing = self._arena.lent()
            pins = Pins(self._driver, pin_limit, read_only=self.read_only_pins)
            self._pins = undo.enter_context(closing(pins))
            self._inward = undo.enter_context(closing(Inward(self._driver)))
            self._outward = undo.enter_context(closing(Outward(self._driver)))
            self._tails = Tails(self.chunks, chunk)
            self._all = undo.pop_all()

    def __repr__(self) -> str:
        return f"<CudaDevice {self.name} {self._arena!r}>"

    def export(self, file: int, *, writable: bool) -> OwnedFd:
        self._tails.writable |= writable
        return self._arena.export(file)

    def pin(self, address: int, nbytes: int, *, writable: bool) -> None:
        self._pins.pin(address, nbytes, writable=writable)

    def unpin(self, address: int) -> None:
        self._pins.unpin(address)

    def pinned(self) -> Pinned:
        return self._pins.pinned()

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
        whole = cut(runs, nbytes, self.chunk_bytes)
        if whole:
            tail = self._tails.begin(whole)
            with self._pins.while_copying():
                copies = self._copies(whole, source, only)
                left = (copy for copy in copies if copy.done + copy.nbytes > start)
                self._inward.run(left, landed)
            if tail is not None:
                self._inward.zero(self._arena.base + tail.offset, tail.nbytes)
            self._tails.end(whole)
        elif landed is not None:
            landed(0)

    def copy_out(
        self,
        runs: Runs,
        target: int,
        nbytes: int,
        *,
        only: Ranges | None = None,
    ) -> None:
        whole = cut(runs, nbytes, self.chunk_bytes)
        if whole:
            with self._pins.while_copying():
                self._outward.run(self._copies(whole, target, only), None)

    def lend(self, runs: Runs) -> None:
        with self._driver.current():
            self._arena.lend(numbers(runs))

    def reclaim(self, runs: Runs) -> None:
        chunks = numbers(runs)
        with self._driver.current():
            short = self._arena.reclaim(chunks)
        back = runs_of(n for n in chunks if not self._arena.is_lent(n))
        if short is not None:
            free, _ = self._memory()
            raise ChunksMissing(
                f"{self._title} is out of memory for chunks to take back ({short}); {size(free)} "
                f"are free, and {_shares(self._nvml.processes())}",
                back,
                runs_of(n for n in chunks if self._arena.is_lent(n)),
            )

    def use(self) -> MemoryUse:
        free, total = self._memory()
        mps = bool(self._driver.attribute("MPS_ENABLED"))
        notes = self._nvml.notes(mps=mps) + self._pins.notes()
        pins = self._pins
        return MemoryUse(
            total, free, self._nvml.processes(), notes, pins.pinned_bytes, pins.refused_bytes
        )

    def close(self) -> None:
        """Free everything; for a lost device, only what is not the driver's. Raises:
        DeviceError."""
        self._all.close()

    def _copies(self, whole: list[Piece], host: int, only: Ranges | None) -> Iterator[Copy]:
        """Cut at the ends of chunks, of `only` and of pinned memory, and then to size."""
        of_chunks = split(whole, self.chunk_bytes)
        for piece, copied in mark(of_chunks, only):
            if not copied:
                device = self._arena.base + piece.offset
                yield Copy(device, None, piece.nbytes, piece.done, pinned=True)
                continue
            for part in self._pins.parts(host + piece.done, piece.nbytes):
                most = PIECE_BYTES if part.pinned else STAGED_BYTES
                begin = piece._replace(
                    offset=piece.offset + part.offset,
                    done=piece.done + part.offset,
                    nbytes=part.nbytes,
                )
                for at, before, length in split([begin], most):
                    device = self._arena.base + at
                    yield Copy(device, host + before, length, before, part.pinned)

    # --- what can be wrong at the start --------------------------------------------------

    def _check(self, *, in_part: bool) -> None:
        """Raises: DeviceError with a remedy."""
        for ability in _ABILITIES:
            if not self._driver.attribute(ability):
                raise DeviceError(
                    f"{self._title} cannot share memory between processes here "
                    f"(CU_DEVICE_ATTRIBUTE_{ability} is 0): WSL, some vGPUs and some sandboxes "
                    "cannot; use --device host, or a driver and a host that can"
                )
        unit = self._driver.granularity()
        if self.chunk_bytes % unit:
            raise DeviceError(
                f"chunk of {self.chunk_bytes} bytes: {self._title} allocates multiples of "
                f"{unit} bytes; use --chunk {unit >> 20}MiB, or better 64MiB"
            )
        free, total = self._memory()
        if self._nbytes > total:
            raise DeviceError(
                f"budget of {size(self._nbytes)} is more than {self._title} has, which is "
                f"{size(total)}; lower --budget"
            )
        if self._nbytes > free and not in_part:
            raise DeviceError(self._too_little(free, total))
        _allow_descriptors(self.chunks)

    def _allocate(self, *, in_part: bool) -> Arena:
        try:
            with self._driver.current():
                return Arena(self._driver, self.chunks, self.chunk_bytes, in_part=in_part)
        except CudaError as exc:
            if not exc.out_of_memory:
                raise
            # another process was quicker, or the driver keeps memory that it reports as free
            raise DeviceError(f"{self._too_little(*self._memory())} ({exc})") from exc

    def _memory(self) -> tuple[int, int]:
        with self._driver.current():
            return self._driver.memory()

    @property
    def _nbytes(self) -> int:
        return self.chunks * self.chunk_bytes

    @property
    def _title(self) -> str:
        return f"{self.name} ({self._driver.product})"

    def _too_little(self, free: int, total: int) -> str:
        most = min(free, self._nbytes - self.chunk_bytes) // self.chunk_bytes * self.chunk_bytes
        lower = f"lower --budget to {most >> 20}MiB, or end " if most else "end "
        return (
            f"budget of {size(self._nbytes)}, but only {size(free)} of the {size(total)} of "
            f"{self._title} are free: {_shares(self._nvml.processes())}; {lower}processes on it"
        )


def _shares(processes: tuple[ProcessUse, ...]) -> str:
    if not processes:
        return "NVML names no other process that uses it"
    return ", ".join(map(str, processes))


def _allow_descriptors(chunks: int) -> None:
    needed = fds.allow(chunks + SPARE_DESCRIPTORS)
    if (most := fds.limit()) < needed:
        raise DeviceError(
            f"{chunks} chunks need {needed} open files, and this process may have {most}: set "
            f"`ulimit -n {needed}` (LimitNOFILE={needed} in a unit) before the start, or use a "
            "larger --chunk"
        )
