"""The daemon's GPU in this process: opened when first needed, with what was imported of it.

Lives here: which of the process's devices it is, the imported chunks, memory of this process's
own, and what this driver was found not to do. May not live here: which component is where.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from swapd.device.base import DeviceError, DeviceLost
from swapd.device.driver import Access, CudaError, Driver
from swapd.shared import fds, vm
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Welcome
from swapd.shared.units import size
from swapd_client.errors import DeviceFailed, DeviceMemoryExhausted, DeviceUnavailable
from swapd_client.memory.layout import Remote
from swapd_client.session.files import Files
from swapd_client.session.gpu import fetching

log = logging.getLogger("swapd_client")

#: Descriptors for everything but chunks: the process's own, and what the driver opens.
SPARE_DESCRIPTORS = 256

#: How long work on the GPU may take before the ranges it uses are unmapped all the same.
SETTLE_S = 60.0


class Card:
    """One GPU, for one session. Thread-safe. Errors are those of the client."""

    def __init__(self, welcome: Welcome, files: Files) -> None:
        """Does not touch the GPU."""
        self.chunk_bytes = welcome.chunk_bytes
        self._chunks = welcome.chunks
        self._name = welcome.device
        self._uuid = welcome.uuid
        self._files = files
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        #: Held also while a file is waited for: it comes once, for all who need it. Never taken
        #: by the lifeline's thread, which brings it.
        self._importing = threading.Lock()
        self._driver: Driver | None = None
        #: Handles of chunks, by number and whether it was sent for writing.
        self._imports: dict[tuple[int, bool], int] = {}
        #: What this driver was found to refuse.
        self._unmaps_one_by_one = False
        self._keeps_no_access = False
        self._pins_nothing = False
        self._complained = False
        #: A range has become memory of this process's own, and stays for good.
        self.has_private = False

    def __repr__(self) -> str:
        return f"<Card {self._name} {self._uuid} {self._driver or 'not opened'}>"

    @property
    def opened(self) -> bool:
        """Whether this session has used the GPU."""
        return self._driver is not None

    @property
    def lost(self) -> bool:
        """Whether the GPU is of no more use to this process: then nothing of it runs there."""
        return self._driver is not None and self._driver.lost

    @property
    def index(self) -> int:
        """Which of this process's GPUs it is, for torch as for the driver. Opens it."""
        return self._open().index

    @contextmanager
    def using(self) -> Iterator[Driver]:
        """The driver, with the GPU's context current on this thread. Opens it.

        All that this client asks of the driver is asked in here. The process's threads may be
        capturing graphs meanwhile, this one too: that goes on unharmed.

        Raises: DeviceUnavailable; DeviceFailed in place of any DeviceError of the block.
        """
        driver = self._open()
        try:
            with driver.current(), driver.sparing_captures():
                yield driver
        except DeviceLost as exc:
            raise DeviceFailed(
                f"{exc}. No GPU work of this process runs any more: end it, and start it anew"
            ) from exc
        except DeviceError as exc:
            raise DeviceFailed(
                f"{self._name}: {exc}. The bytes are safe where they were; if it fails again, end "
                "this process, and start it anew"
            ) from exc

    def complain(self, error: Exception) -> None:
        """Say what broke the GPU for this process, once."""
        if not (self._complained and self.lost):
            self._complained = True
            log.error("%s", error)

    def settle(self, timeout_s: float = SETTLE_S) -> bool:
        """Wait for all work that this process has on the GPU; whether it came to its end.

        A graph that is just being captured is spoilt, see `Driver.settle`. So this is for what is
        done when a session ends, a copy has failed, or private memory is given up.
        Streams that wait for what never comes must have been woken before.
        """
        if self._driver is None or self.lost:
            return True
        waiting = threading.Thread(target=self._settle, name="swapd-settle", daemon=True)
        try:
            waiting.start()
        except (RuntimeError, MemoryError):  # no more threads: better late than not at all
            self._settle()
            return True
        waiting.join(timeout_s)
        return not waiting.is_alive()

    def close(self, *, keep_context: bool) -> None:
        """Let go of all imports, and of the context if nothing of this session needs it."""
        if self._driver is None:
            return
        with suppress(DeviceFailed):
            self.drop_all()
        if not (keep_context or self.has_private):
            self._driver.close()

    # --- chunks --------------------------------------------------------------------------

    def imports(self, chunks: Iterable[int], *, writable: bool) -> list[int]:
        """The handles of chunks, still owned here. Blocks until the daemon has sent them all.

        Hold no lock that the lifeline's thread may need: it is the one who brings them.
        """
        return [self._import(chunk, writable) for chunk in chunks]

    def _import(self, chunk: int, writable: bool) -> int:
        with self._importing:
            with self._lock:
                if known := self._imports.get((chunk, writable)):
                    return known
            handle = self._adopt(chunk, writable)
            with self._lock:
                self._imports[chunk, writable] = handle
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
        """Map chunks side by side, with no access yet. All or nothing."""
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
        """Unmap so many, side by side from `address` on."""
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
        """Take all access to what is mapped there, if this driver can; whether it did."""
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
        """Let this process's GPU work read what is mapped there, and write if `writable`."""
        with self.using() as driver:
            access = Access.READ_WRITE if writable else Access.READ
            driver.set_access(address, chunks * self.chunk_bytes, access)

    def drop(self, chunks: Iterable[int]) -> None:
        """Release what was imported of these: their memory goes to somebody else."""
        numbers = list(chunks)
        self._files.drop(numbers)
        self._forget([(n, writable) for n in numbers for writable in (False, True)])

    def drop_all(self) -> None:
        """Release all imports; what is mapped keeps its memory."""
        with self._lock:
            keys = list(self._imports)
        self._forget(keys)

    def _forget(self, keys: Iterable[tuple[int, bool]]) -> None:
        for key in keys:
            with self._lock:
                handle = self._imports.pop(key, None)
            if handle is not None:
                with self.using() as driver:
                    driver.release(handle)

    # --- memory of this process's own ----------------------------------------------------

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Memory that is nobody else's: its handle, and its size, which may be larger.

        Raises: DeviceMemoryExhausted, saying how much is missing.
        """
        with self.using() as driver:
            whole = vm.round_up(nbytes, driver.granularity())
            try:
                return driver.create(whole), whole
            except CudaError as exc:
                if not exc.out_of_memory:
                    raise
                free, _ = driver.memory()
                raise DeviceMemoryExhausted(
                    f"{self._name} has no room for a private copy of {size(whole)}: {size(free)} "
                    f"are free, {size(max(whole - free, 0))} are missing. Free as much of what "
                    "this process has there (torch.cuda.empty_cache()), or lower swapd's --budget"
                ) from exc

    def fill(self, address: int, master: OwnedFd, nbytes: int) -> None:
        """Copy the first `nbytes` of `master` to `address`. Blocks until they are there."""
        span = vm.round_up(nbytes)
        source = vm.map_shared(master.fileno(), 0, span, writable=False)
        try:
            with self._at_once() as (driver, stream):
                driver.copy_to_device(address, source, nbytes, stream)
        finally:
            vm.free(source, span)

    def fetch(self, spans: Sequence[Remote]) -> None:
        """Copy what this process has on the GPU of its own, once all work there is done: whoever
        made it, on any stream. Blocks. Raises: DeviceFailed."""
        if not self.settle():
            raise DeviceFailed(
                f"what is on {self._name} is still worked on after {SETTLE_S:g} s: wait for that "
                "work, and then register it"
            )
        with self.using() as driver:
            refused = fetching.fetch(driver, spans)
        if refused and not self._pins_nothing:
            self._pins_nothing = True
            log.warning(
                "what is on %s comes to host copies more slowly, for no memory can be pinned for "
                "it here: %s; raise `ulimit -l`, or the container's memory limit",
                self._name,
                refused,
            )

    def zero(self, address: int, nbytes: int) -> None:
        """Zero what is at `address`. Blocks until it is done."""
        with self._at_once() as (driver, stream):
            driver.zero_later(address, nbytes, stream)

    @contextmanager
    def _at_once(self) -> Iterator[tuple[Driver, Any]]:
        """A stream of its own, whose work is waited for: the default one would wait for the
        process's others."""
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
                    raise DeviceUnavailable(
                        f"swapd serves {self._name} ({self._uuid}), which this process cannot "
                        f"use: {exc}"
                    ) from exc
                self._allow_descriptors()
            return self._driver

    def _allow_descriptors(self) -> None:
        """A descriptor comes for each chunk, at worst for all before the first is imported."""
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
