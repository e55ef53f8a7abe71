"""The GPU memory that swapd owns: one allocation for each chunk, all mapped in one range.

No policy: the core decides which chunks to lend. Callers make the context current.
"""

import os
from contextlib import ExitStack, suppress
from typing import NamedTuple

from swapd.device.base import DeviceError, DeviceLost
from swapd.device.context import CudaError
from swapd.device.driver import Access, Driver
from swapd.device.pieces import runs_of
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Runs


class _Chunk(NamedTuple):
    """An allocation, mapped at its place. Exports are copies of `fd`."""

    handle: int
    fd: OwnedFd


class Arena:
    """`chunks` allocations of `chunk_bytes`; a lent chunk has none at present."""

    def __init__(self, driver: Driver, chunks: int, chunk_bytes: int) -> None:
        """Allocate, map and export all. Blocks. Raises: DeviceError; then nothing is left
        allocated."""
        self._driver = driver
        self._chunk_bytes = chunk_bytes
        self._nbytes = chunks * chunk_bytes
        self._chunks: list[_Chunk | None] = [None] * chunks
        #: The address of chunk 0 in this process; the others follow.
        self.base = driver.reserve(self._nbytes)
        try:
            for number in range(chunks):
                self._chunks[number] = self._make(number)
            self._clear(((0, chunks),))
        except DeviceError:
            self.close()
            raise

    def __repr__(self) -> str:
        lent = self._chunks.count(None)
        return f"<Arena {self._nbytes >> 20} MiB in {len(self._chunks)} chunks, {lent} lent>"

    def export(self, number: int) -> OwnedFd:
        """A descriptor of the chunk, for the caller. Calls no driver; see `Device.export`."""
        chunk = self._chunks[number]
        if chunk is None:
            raise DeviceError(f"chunk {number} is lent")
        return OwnedFd(os.dup(chunk.fd.fileno()))

    def lend(self, numbers: list[int]) -> None:
        """Free this process's memory for these chunks; see `Device.lend`."""
        for number in numbers:
            self._free(number)

    def reclaim(self, numbers: list[int]) -> CudaError | None:
        """Allocate lent chunks again, as many as there is memory for; return the driver's error
        when there was no more. Raises: DeviceError; then all are lent as before."""
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
        """Allocate, export and map a chunk. It is not accessible yet."""
        with ExitStack() as undo:
            handle = self._driver.create(self._chunk_bytes)
            undo.callback(self._driver.release, handle)
            fd = undo.enter_context(self._driver.export(handle))
            self._driver.map(self._at(number), self._chunk_bytes, handle)
            undo.pop_all()
        return _Chunk(handle, fd)

    def _clear(self, runs: Runs) -> None:
        """Make new chunks accessible, and zero them. Waits for no other work on the GPU: copies of
        others go on meanwhile."""
        with ExitStack() as undo:
            stream = self._driver.stream()
            undo.callback(self._driver.destroy_stream, stream)
            undo.callback(self._driver.finish, stream)
            for first, count in runs:
                at, nbytes = self._at(first), count * self._chunk_bytes
                self._driver.set_access(at, nbytes, Access.READ_WRITE)
                self._driver.zero_later(at, nbytes, stream)

    def _free(self, number: int) -> None:
        """Unmap the chunk and free it. If the driver does not unmap it, nothing changes."""
        chunk = self._chunks[number]
        if chunk is None:
            return
        self._driver.unmap(self._at(number), self._chunk_bytes)
        self._chunks[number] = None
        chunk.fd.close()
        self._driver.release(chunk.handle)
