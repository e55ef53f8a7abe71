"""Host memory that the GPU may access directly.

Other memory is copied through a staging buffer, more slowly. So no failure here fails a copy; a
refusal is logged once, and shown in `status`.
"""

import fcntl
import logging
import os
import resource
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from swapd.device.base import DeviceError, DeviceLost, Pinned
from swapd.device.context import CudaError
from swapd.device.driver import Driver
from swapd.shared import vm
from swapd.shared.units import size

log = logging.getLogger("swapd.device.pins")

#: Bytes to page-lock in one call. Calls of hundreds of GiB fail on current drivers, calls over 2
#: GiB on some kernels. For 25 ms or so, a call takes locks of the driver that copies need too.
SLICE_BYTES = 256 << 20
#: Longest wait of a slice for copies to end: pinning makes them fast, so it must go on.
YIELD_S = 1.0


def takes_read_only(driver: Driver) -> bool:
    """Return whether the GPU pins memory that is mapped read-only: it claims so, and accepts a
    page. Logs a refusal."""
    if not driver.attribute("READ_ONLY_HOST_REGISTER_SUPPORTED"):
        return False
    fd = os.memfd_create("swapd-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, vm.PAGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        page = vm.map_shared(fd, 0, vm.PAGE_BYTES, writable=False)
    finally:
        os.close(fd)
    try:
        with driver.current():
            driver.pin(page, vm.PAGE_BYTES, writable=False)
            driver.unpin(page)
    except CudaError as exc:
        log.warning("the GPU claims to pin memory that is mapped read-only, but refuses: %s", exc)
        return False
    finally:
        vm.free(page, vm.PAGE_BYTES)
    return True


class HostRange(NamedTuple):
    """`offset`: bytes from the start of the requested range."""

    offset: int
    nbytes: int
    pinned: bool


class Pins:
    """Pinned memory, in slices. Methods may be called in any thread; `parts` never blocks."""

    def __init__(self, driver: Driver, limit: int | None, *, read_only: bool) -> None:
        """`limit`: bytes of all memory, or None. `read_only`: the GPU accepts memory that is mapped
        read-only."""
        self._driver = driver
        self._limit = limit
        self._read_only = read_only
        #: One thread at a time calls the driver, whose own lock allows no more.
        self._changing = threading.Lock()
        #: Copies in progress; `_no_copy` is notified when one ends.
        self._copies = 0
        self._no_copy = threading.Condition()
        #: (start, end) of the slices, in order. Replaced as a whole, so readers need no lock.
        self._slices: tuple[tuple[int, int], ...] = ()
        #: Requested bytes, by address.
        self._asked: dict[int, int] = {}
        #: Cause of the last refusal.
        self._refused = ""

    def __repr__(self) -> str:
        return f"<Pins {size(self.pinned_bytes)} of {size(sum(self._asked.values()))}>"

    @property
    def pinned_bytes(self) -> int:
        return sum(end - start for start, end in self._slices)

    def pinned(self) -> Pinned:
        return Pinned(self.pinned_bytes, self._refused if self.refused_bytes else "")

    @property
    def refused_bytes(self) -> int:
        """Requested bytes that are not pinned, after a refusal."""
        return max(sum(self._asked.values()) - self.pinned_bytes, 0) if self._refused else 0

    def pin(self, address: int, nbytes: int, *, writable: bool) -> None:
        """See `Device.pin`. Raises: DeviceError."""
        if address % vm.PAGE_BYTES:
            raise DeviceError(f"memory at {address:#x} begins within a page; it cannot be pinned")
        if not writable and not self._read_only:
            raise DeviceError("this GPU cannot pin memory that is mapped read-only")
        if not nbytes:
            return
        with self._changing:
            self._asked[address] = vm.round_up(nbytes)
            try:
                self._pin_rest(address, writable)
            except DeviceLost:
                raise
            except DeviceError as exc:
                self._refused = str(exc)
                raise

    def unpin(self, address: int) -> None:
        """See `Device.unpin`. Raises: DeviceError."""
        with self._changing, suppress(DeviceLost):
            self._unpin(address)

    @contextmanager
    def while_copying(self) -> Iterator[None]:
        """While a copy runs, begin a new slice at most every YIELD_S."""
        with self._no_copy:
            self._copies += 1
        try:
            yield
        finally:
            with self._no_copy:
                self._copies -= 1
                self._no_copy.notify_all()

    def parts(self, address: int, nbytes: int) -> Iterator[HostRange]:
        """Cut the range into parts, in order, each within one slice or outside of all."""
        slices = self._slices
        at, end = address, address + nbytes
        index = max(bisect_right(slices, (at, end)) - 1, 0)
        while at < end:
            while index < len(slices) and slices[index][1] <= at:
                index += 1
            start, stop = slices[index] if index < len(slices) else (end, end)
            pinned = start <= at
            upto = min(stop if pinned else start, end)
            yield HostRange(at - address, upto - at, pinned)
            at = upto

    def notes(self) -> tuple[str, ...]:
        asked, pinned = sum(self._asked.values()), self.pinned_bytes
        if pinned >= asked:
            return ()
        if not self._refused and asked - pinned < SLICE_BYTES:
            return ()  # nearly done
        if not self._refused:
            return (f"{size(pinned)} of {size(asked)} of host copies are pinned so far",)
        return (
            f"{size(pinned)} of {size(asked)} of host copies are pinned; the rest is copied "
            f"through a buffer, which is slower. Refused: {self._refused}",
        )

    def close(self) -> None:
        """Unpin everything; no-op if the device is lost. Raises: DeviceError."""
        for address in list(self._asked):
            self.unpin(address)

    def _pin_rest(self, address: int, writable: bool) -> None:
        """A failure leaves the slices that are done."""
        whole = self._asked[address]
        done = sum(end - start for start, end in self._within(address, whole))
        while done < whole:
            nbytes = self._allowed(min(SLICE_BYTES, whole - done))
            if not nbytes:
                assert self._limit is not None
                raise DeviceError(
                    f"only {size(done)} of {size(whole)} pinned: the limit of "
                    f"{size(self._limit)} is reached; raise --pin-limit"
                )
            start = address + done
            with self._no_copy:
                self._no_copy.wait_for(lambda: not self._copies, YIELD_S)
            try:
                with self._driver.current():
                    self._driver.pin(start, nbytes, writable=writable)
            except CudaError as exc:
                raise DeviceError(
                    f"only {size(done)} of {size(whole)} pinned: {exc}{_locked_memory()}"
                ) from exc
            self._slices = tuple(sorted((*self._slices, (start, start + nbytes))))
            done += nbytes

    def _allowed(self, nbytes: int) -> int:
        if self._limit is None:
            return nbytes
        room = max(self._limit - self.pinned_bytes, 0)
        return min(nbytes, room // vm.PAGE_BYTES * vm.PAGE_BYTES)

    def _unpin(self, address: int) -> None:
        nbytes = self._asked.pop(address, 0)
        for start, end in self._within(address, nbytes):
            # first, so that no new copy uses it
            self._slices = tuple(one for one in self._slices if one != (start, end))
            with self._driver.current():
                self._driver.unpin(start)

    def _within(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        return [one for one in self._slices if address <= one[0] < address + nbytes]


def _locked_memory() -> str:
    """Return the limit on locked memory, which some drivers must obey."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "" if limit == resource.RLIM_INFINITY else f" (`ulimit -l` is {size(limit)})"
