"""The daemon's GPU in this process: opened when first needed, with its imported chunks."""

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from swapd.device.base import DeviceError, DeviceLost
from swapd.device.context import CudaError
from swapd.device.driver import Access, Driver
from swapd.shared import fds, vm
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Welcome
from swapd.shared.system import LimitError, start
from swapd.shared.units import size
from swapd_client.errors import DeviceFailed, OutOfMemory
from swapd_client.log import log
from swapd_client.memory.layout import RemoteBytes, through_mapping
from swapd_client.session.gpu import fetching
from swapd_client.session.life import Files

#: For all but chunks: the process's descriptors, and the driver's.
SPARE_DESCRIPTORS = 256

#: Seconds after which ranges are unmapped even if GPU work still uses them.
SETTLE_S = 60.0


class Card:
    """One GPU, for one session. Thread-safe. Raises errors of the client."""

    def __init__(self, welcome: Welcome, files: Files) -> None:
        """Does not use the GPU."""
        self.chunk_bytes = welcome.chunk_bytes
        self._chunks = welcome.chunks
        self._name = welcome.device
        self._uuid = welcome.uuid
        self._files = files
        self._opening = threading.Lock()
        #: Held while waiting for a file, which is sent once for all threads. The lifeline's thread,
        #: which receives files, never takes it.
        self._importing = threading.Lock()
        self._driver: Driver | None = None
        self._imports: dict[tuple[int, bool], int] = {}
        #: Operations that this driver has refused.
        self._unmaps_one_by_one = False
        self._keeps_no_access = False
        self._pins_nothing = False
        self._complained = False
        #: Whether a range is, or may become, private memory, which stays for good.
        self.has_private = False

    @property
    def opened(self) -> bool:
        return self._driver is not None

    @property
    def lost(self) -> bool:
        """Whether no work of this process runs on the GPU any more, after an error."""
        return self._driver is not None and self._driver.lost

    @property
    def index(self) -> int:
        """Index of the GPU in this process, for torch as for the driver."""
        return self._open().index

    @contextmanager
    def using(self) -> Iterator[Driver]:
        """Yield the driver, with the GPU's context current on this thread.

        All driver calls are made in here. They do not disturb a thread that captures a graph
        meanwhile. Raises: DeviceFailed, also in place of a DeviceError of the block.
        """
        driver = self._open()
        try:
            with driver.current(), driver.sparing_captures():
                yield driver
        except DeviceLost as exc:
            raise DeviceFailed(
                f"{exc}. No GPU work of this process runs any more: end it, and start it again"
            ) from exc
        except DeviceError as exc:
            raise DeviceFailed(
                f"{self._name}: {exc}. The host copy is intact; if it fails again, end "
                "this process, and start it again"
            ) from exc

    def complain(self, error: Exception) -> None:
        """Log an error; if the GPU is lost, only once."""
        if not (self._complained and self.lost):
            self._complained = True
            log.error("%s", error)

    @contextmanager
    def unless_lost(self) -> Iterator[None]:
        """If the GPU is lost, log a DeviceFailed of the block instead of raising it."""
        try:
            yield
        except DeviceFailed as exc:
            if not self.lost:
                raise
            self.complain(exc)

    def settle(self, timeout_s: float = SETTLE_S) -> bool:
        """Wait for all work of this process on the GPU; return whether it has ended.

        This spoils a graph that is being captured, so use it only when a session ends, a copy has
        failed, or private memory is copied or given up. Streams that would wait for ever must go on
        before.
        """
        if self._driver is None or self.lost:
            return True
        waiting = threading.Thread(target=self._settle, name="swapd-settle", daemon=True)
        try:
            start(waiting)
        except LimitError:  # wait here, without the timeout
            self._settle()
            return True
        waiting.join(timeout_s)
        return not waiting.is_alive()

    def close(self, *, keep_context: bool) -> None:
        """Release all imports, and the context unless it is still needed."""
        if self._driver is None:
            return
        with suppress(DeviceFailed):
            self.drop_all()
        if not (keep_context or self.has_private):
            self._driver.close()

    # --- chunks --------------------------------------------------------------------------

    def imports(self, chunks: Iterable[int], *, writable: bool) -> list[int]:
        """Return the handles of chunks, still owned here. Blocks until the daemon has sent them.

        Hold no lock that the lifeline's thread needs to receive them.
        """
        return [self._import(chunk, writable) for chunk in chunks]

    def _import(self, chunk: int, writable: bool) -> int:
        with self._importing:
            if known := self._imports.get((chunk, writable)):
                return known
            handle = self._imports[chunk, writable] = self._adopt(chunk, writable)
            return handle

    def _adopt(self, chunk: int, writable: bool) -> int:
        fd = self._files.take(chunk, writable=writable)
        try:
            with self.using() as driver:
                handle = driver.adopt(fd.fileno())
        except BaseException:
            self._files.give(chunk, fd, writable=writable)  # it is not sent twice
            raise
        fd.close()
        return handle

    def map(self, address: int, handles: Iterable[int]) -> None:
        """Map chunks side by side, without access. All or nothing."""
        with self.using() as driver:
            mapped = 0
            try:
                for handle in handles:
                    driver.map(address + mapped * self.chunk_bytes, self.chunk_bytes, handle)
                    mapped += 1
            except DeviceError:
                if mapped:
                    with suppress(DeviceFailed):
                        self.unmap(address, mapped)
                raise

    def unmap(self, address: int, chunks: int) -> None:
        with self.using() as driver:
            if chunks > 1 and not self._unmaps_one_by_one:
                try:
                    return driver.unmap(address, chunks * self.chunk_bytes)
                except CudaError as exc:
                    log.debug("several mappings are not unmapped at once: %s", exc)
                    self._unmaps_one_by_one = True
            for i in range(chunks):
                driver.unmap(address + i * self.chunk_bytes, self.chunk_bytes)

    def forbid(self, address: int, chunks: int) -> bool:
        """Remove all access; return False if this driver cannot."""
        if self._keeps_no_access:
            return False
        with self.using() as driver:
            try:
                driver.set_access(address, chunks * self.chunk_bytes, Access.NONE)
            except CudaError as exc:
                log.debug("nothing stays mapped without access: %s", exc)
                self._keeps_no_access = True
                return False
            return True

    def allow(self, address: int, chunks: int, *, writable: bool) -> None:
        with self.using() as driver:
            access = Access.READ_WRITE if writable else Access.READ
            driver.set_access(address, chunks * self.chunk_bytes, access)

    def drop(self, chunks: Iterable[int]) -> None:
        """Release imports whose memory goes to another process."""
        numbers = list(chunks)
        self._files.drop(numbers)
        self._forget([(n, writable) for n in numbers for writable in (False, True)])

    def drop_all(self, but: Collection[int] = ()) -> None:
        """Release all imports but these; mappings keep their memory."""
        self._files.drop_all(but)
        self._forget([key for key in list(self._imports) if key[0] not in but])

    def _forget(self, keys: Iterable[tuple[int, bool]]) -> None:
        for key in keys:
            handle = self._imports.pop(key, None)
            if handle is not None:
                with self.using() as driver:
                    driver.release(handle)

    # --- memory of this process's own ----------------------------------------------------

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Return a handle of private memory, and its size, perhaps larger. Raises: OutOfMemory."""
        with self.using() as driver:
            whole = vm.round_up(nbytes, driver.granularity())
            try:
                return driver.create(whole), whole
            except CudaError as exc:
                if not exc.out_of_memory:
                    raise
                free, _ = driver.memory()
                raise OutOfMemory(
                    f"{self._name} has no room for a private copy of {size(whole)}: {size(free)} "
                    f"are free, {size(max(whole - free, 0))} are missing. Free as much GPU "
                    "memory of this process (torch.cuda.empty_cache()), or lower swapd's --budget"
                ) from exc

    def fill(self, address: int, master: OwnedFd, nbytes: int) -> None:
        """Copy a host copy to `address`. Blocks."""

        def copy(source: int) -> None:
            with self._at_once() as (driver, stream):
                driver.copy_to_device(address, source, nbytes, stream)

        through_mapping(master.fileno(), nbytes, copy)

    def fetch(self, spans: Sequence[RemoteBytes]) -> None:
        """Copy GPU memory of this process, after all its work. Blocks. Raises: DeviceFailed."""
        if not self.settle():
            raise DeviceFailed(
                f"work on {self._name} still runs after {SETTLE_S:g} s: wait for that "
                "work, then register the tensors"
            )
        with self.using() as driver:
            refused = fetching.fetch(driver, spans)
        if refused and not self._pins_nothing:
            self._pins_nothing = True
            log.warning(
                "copies from %s to host copies are slower, because no memory can be pinned for "
                "them here: %s; raise `ulimit -l`, or the container's memory limit",
                self._name,
                refused,
            )

    def zero(self, address: int, nbytes: int) -> None:
        """Zero these bytes. Blocks."""
        with self._at_once() as (driver, stream):
            driver.zero_later(address, nbytes, stream)

    @contextmanager
    def _at_once(self) -> Iterator[tuple[Driver, Any]]:
        """Yield a new stream, then wait for its work. The default stream would wait for all."""
        with self.using() as driver:
            stream = driver.stream()
            try:
                yield driver, stream
                driver.finish(stream)
            finally:
                driver.destroy_stream(stream)

    # --- the driver ----------------------------------------------------------------------

    def _open(self) -> Driver:
        with self._opening:
            if self._driver is None:
                try:
                    self._driver = Driver.by_uuid(self._uuid)
                except DeviceError as exc:
                    raise DeviceFailed(
                        f"swapd serves {self._name} ({self._uuid}), which this process cannot "
                        f"use: {exc}"
                    ) from exc
                self._allow_descriptors()
            return self._driver

    def _allow_descriptors(self) -> None:
        """Raise the limit of open files: each chunk may come with a descriptor."""
        needed = fds.allow(self._chunks + SPARE_DESCRIPTORS)
        if (most := fds.limit()) < needed:
            log.warning(
                "this process may have %d open files, and may need %d for the %d chunks of %s: if "
                "they run out its session ends; set `ulimit -n %d` before the start",
                *(most, needed, self._chunks, self._name, needed),
            )

    def _settle(self) -> None:
        with suppress(DeviceFailed), self.using() as driver:
            driver.settle()
