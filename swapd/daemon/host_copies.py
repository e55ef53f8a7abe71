"""The host copies of all components: memfds that the daemon makes, maps and pins.

`make` and `seal` touch every page, as generators whose steps block for a few milliseconds each: run
them in a thread, as `host_copy_orders.py` does.
"""

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from swapd.device import Device, DeviceError, DeviceLost
from swapd.device.host import available_bytes
from swapd.shared import vm
from swapd.shared.fds import OwnedFd, exhausted, keep, reopen_read_only, why_none
from swapd.shared.protocol import Code
from swapd.shared.system import Threads
from swapd.shared.units import size

log = logging.getLogger("swapd.daemon.host_copies")

#: Name of the memfds in the kernel's list of mappings.
NAME = "swapd-host-copy"

#: Host memory left to other uses.
RESERVE_BYTES = 64 << 20

#: Descriptors left free, so that sessions can still connect.
SPARE_DESCRIPTORS = 16
#: Bytes to allocate or map in one step, which takes a few milliseconds.
SLICE_BYTES = 16 << 20
#: How long to retry sealing a host copy that a worker seems to map.
SEAL_PATIENCE_S = 1.0
_PAUSE_S = 0.002

#: Since Linux 5.1: new mappings cannot write, existing ones still can.
_F_SEAL_FUTURE_WRITE = 0x10
#: A worker cannot change the size.
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: An adoptable host copy has the first of these seals and not the second.
_ADOPTABLE = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

T = TypeVar("T")

#: Work in steps. The generator returns its result.
Work = Generator[None, None, T]


class HostCopyError(Exception):
    """`code` tells which side is at fault."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class HostCopy:
    """The bytes of one component, or of several with the same content. `address` is 0 until it is
    mapped."""

    fd: OwnedFd
    nbytes: int
    mutable: bool
    sealed: bool = False
    #: Number of components that share it.
    users: int = 1
    address: int = 0
    #: Takes no memory: nothing is copied from it or to it.
    empty: bool = False
    #: None once done: a garbage collection would spend most of its time on 10,000 futures.
    pinning: Future[None] | None = None

    @property
    def span(self) -> int:
        return vm.round_up(self.nbytes)


class HostCopies:
    """All host copies by component uid. Methods may run in any thread, one at a time for each
    uid."""

    def __init__(self, limit_bytes: int | None, device: Device) -> None:
        """`limit_bytes`: most bytes of all host copies; None: available memory. A later limit does
        not affect existing host copies."""
        self.limit_bytes = limit_bytes
        self._device = device
        #: Pins in the background: pinning only makes copies faster, so no request waits for it.
        self._pinner = Threads(1, "swapd-pin")
        self._copies: dict[int, HostCopy] = {}
        #: Bytes of host copies to pin, and number of host copies that are not pinned yet.
        self.to_pin_bytes = 0
        self.pinning = 0
        #: Includes host copies being made.
        self.total_bytes = 0
        #: Bytes still to be allocated for host copies being made.
        self._unallocated_bytes = 0
        #: Number of host copies being dropped.
        self._dropping = 0
        #: Guards the figures above, and the users of a host copy.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._copies)

    def make(self, uid: int, nbytes: int, *, mutable: bool) -> Work[int]:
        """Allocate every page of a host copy, so that filling it cannot fail. Return its
        descriptor, which stays owned here.

        Waits for host copies being dropped if there is no room. Raises: HostCopyError
        (`host_memory`, or `limit` without a descriptor); then nothing is left of it.
        """
        while not self._take_room(nbytes):
            yield from _pause()
        unallocated = nbytes
        try:
            with (yield from self._new_file(nbytes)) as fd:
                for at in range(0, nbytes, SLICE_BYTES):
                    n = min(SLICE_BYTES, nbytes - at)
                    os.posix_fallocate(fd.fileno(), at, n)
                    unallocated -= n
                    self._change_room(0, -n)
                    yield
                return self._add(uid, fd, HostCopy(fd, nbytes, mutable))
        except BaseException as exc:
            self._change_room(-nbytes, -unallocated)
            if not isinstance(exc, OSError):
                raise
            if exc.errno == errno.EMFILE:
                raise HostCopyError("limit", exhausted()) from exc
            raise HostCopyError("host_memory", self._no_room(nbytes, str(exc))) from exc

    def _new_file(self, nbytes: int) -> Work[OwnedFd]:
        while True:
            dropping = self._dropping
            try:
                return _file(nbytes)
            except OSError as exc:
                if exc.errno != errno.EMFILE or not dropping:
                    raise
            yield from _pause()

    def adopt(self, uid: int, nbytes: int, fd: OwnedFd) -> Work[int]:
        """Take over a host copy of an earlier daemon, see `is_adoptable`. Return its descriptor,
        which stays owned here. Waits and raises as `make` does; then `fd` is closed."""
        with fd:
            while not self._take_room(nbytes, allocated=True):
                yield from _pause()
            try:
                return self._add(uid, fd, HostCopy(fd, nbytes, mutable=False))
            except BaseException:
                self._change_room(-nbytes, 0)
                raise

    def is_adoptable(self, fd: int, nbytes: int) -> bool:
        """Return whether `fd` is a memfd of that size, with memory for all of it, to which no
        process can write. Does not block."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # first: fstat of a file on a disk may wait
            found = os.fstat(fd)
        except OSError:
            return False
        # reading a hole in `_map` would take memory that nobody has asked for
        is_whole = found.st_size == nbytes <= found.st_blocks * 512
        return is_whole and seals & _ADOPTABLE == fcntl.F_SEAL_WRITE and self._device.read_only_pins

    def make_empty(self, uid: int, nbytes: int) -> int:
        """Make a host copy without memory, to which no process can write. Return its descriptor.

        Does not block. Raises: HostCopyError (`limit`).
        """
        try:
            with _file(nbytes) as fd:
                fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
                return self._add(uid, fd, HostCopy(fd, nbytes, mutable=True, empty=True))
        except OSError as exc:
            raise HostCopyError("limit", why_none(exc)) from exc

    def _add(self, uid: int, fd: OwnedFd, copy: HostCopy) -> int:
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, _SIZE_SEALS)
        copy.fd = OwnedFd(fd.take())
        self._copies[uid] = copy
        return copy.fd.fileno()

    def share(self, uid: int, original: int) -> int:
        """Let `uid` share the sealed host copy of `original`, which is not being dropped. Return
        its descriptor. Does not block."""
        copy = self._copies[original]
        assert copy.sealed
        assert not copy.mutable
        with self._lock:
            copy.users += 1
        self._copies[uid] = copy
        return copy.fd.fileno()

    def seal(self, uid: int) -> Work[None]:
        """Make a filled host copy ready to copy from: mapped, present, and read-only if clean.

        Raises: HostCopyError: `bad_request` if a worker still maps it for writing, or has sealed it
        or changed its mode; `host_memory` if it cannot be mapped here.
        """
        copy = self._copies[uid]
        if copy.sealed:
            return  # a shared one
        try:
            if copy.nbytes and not copy.empty:
                yield from self._map(copy)
            copy.sealed = True
        except PermissionError as exc:
            why = "the worker has sealed it, or changed its mode; leave its descriptor alone"
            raise HostCopyError("bad_request", f"the host copy cannot be mapped: {why}") from exc
        except OSError as exc:
            raise HostCopyError("host_memory", f"the host copy cannot be mapped: {exc}") from exc

    def _map(self, copy: HostCopy) -> Work[None]:
        fd, span = copy.fd.fileno(), copy.span
        if writable := self._writable(copy):
            copy.address = vm.map_shared(fd, 0, span, writable=True)
        else:
            yield from self._forbid_writing(copy)
            with reopen_read_only(fd) as reader:
                copy.address = vm.map_shared(reader.fileno(), 0, span, writable=False)
        with self._lock:
            self.to_pin_bytes += span
        if writable and not copy.mutable:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        vm.prefer_huge_pages(copy.address, span)
        for at in range(0, span, SLICE_BYTES):
            n = min(SLICE_BYTES, span - at)
            vm.populate(copy.address + at, n, writable=writable)
            yield
        with self._lock:
            self.pinning += 1
        copy.pinning = self._pinner.submit(self._pin, copy)
        copy.pinning.add_done_callback(partial(self._pinned, copy))

    def _writable(self, copy: HostCopy) -> bool:
        """A clean host copy is mapped writable only if the driver pins no read-only memory. No
        process can map it for writing then, but a worker's existing mapping goes unnoticed."""
        return copy.mutable or not self._device.read_only_pins

    def _forbid_writing(self, copy: HostCopy) -> Work[None]:
        """Seal it. Retry: while the kernel reclaims or moves its pages, it refuses with the same
        error as for a worker's mapping."""
        until = time.monotonic() + SEAL_PATIENCE_S
        while True:
            try:
                fcntl.fcntl(copy.fd.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
                return
            except OSError as exc:
                if exc.errno != errno.EBUSY:
                    raise
                if time.monotonic() > until:
                    raise HostCopyError(
                        "bad_request",
                        "the host copy is still mapped for writing; unmap it, then commit",
                    ) from exc
            yield from _pause()

    def _pin(self, copy: HostCopy) -> None:
        try:
            self._device.pin(copy.address, copy.nbytes, writable=self._writable(copy))
        except DeviceLost as exc:
            log.error("host copies are not pinned: %s", exc)
        except DeviceError as exc:
            log.warning(
                "%s; the rest is copied in two steps, more slowly: raise --pin-limit, "
                "and `ulimit -l` (LimitMEMLOCK in a unit)",
                exc,
            )

    def _pinned(self, copy: HostCopy, _: Future[None]) -> None:
        copy.pinning = None
        with self._lock:
            self.pinning -= 1

    def fileno(self, uid: int) -> int:
        return self._copies[uid].fd.fileno()

    def address(self, uid: int) -> int:
        return self._copies[uid].address

    def announce_drop(self) -> None:
        """Tell `make` to wait for a coming `drop`. Does not block."""
        with self._lock:
            self._dropping += 1

    def drop(self, uid: int) -> None:
        """Unpin, unmap and close a host copy, after `announce_drop`, unless another component
        shares it. A worker's own mapping or descriptor keeps the memory. Blocks."""
        try:
            copy = self._copies.pop(uid, None)
            if copy is not None and not self._is_shared_on(copy):  # None if `make` failed
                self._discard(copy)
        finally:
            with self._lock:
                self._dropping -= 1

    def _is_shared_on(self, copy: HostCopy) -> bool:
        with self._lock:
            copy.users -= 1
            return copy.users > 0

    def _discard(self, copy: HostCopy) -> None:
        if (pinning := copy.pinning) is not None and not pinning.cancel():
            wait([pinning])
        if copy.address:
            with self._lock:
                self.to_pin_bytes -= copy.span
            self._unmap(copy)
        copy.fd.close()
        if not copy.empty:
            self._change_room(-copy.nbytes, 0)

    def _unmap(self, copy: HostCopy) -> None:
        try:
            self._device.unpin(copy.address)
        except DeviceError as exc:
            log.error("a host copy stays mapped, because it cannot be unpinned: %s", exc)
            return
        for at in range(0, copy.span, SLICE_BYTES):  # page faults wait for each call
            vm.free(copy.address + at, min(SLICE_BYTES, copy.span - at))

    # --- room ----------------------------------------------------------------------------

    def _take_room(self, nbytes: int, *, allocated: bool = False) -> bool:
        """Count a new host copy; return False if there may soon be room. `allocated`: it has its
        memory already. Raises: HostCopyError without room, if no host copy is being dropped."""
        with self._lock:
            over = self.limit_bytes is not None and self.total_bytes + nbytes > self.limit_bytes
            needed = nbytes + self._unallocated_bytes + RESERVE_BYTES
            if not over and (allocated or needed <= _available_bytes(nbytes)):
                self.total_bytes += nbytes
                self._unallocated_bytes += 0 if allocated else nbytes
                return True
            if self._dropping:
                return False
        why = "host_memory limit" if over else "out of memory"
        raise HostCopyError("host_memory", self._no_room(nbytes, why))

    def _change_room(self, total_bytes: int, unallocated_bytes: int) -> None:
        with self._lock:
            self.total_bytes += total_bytes
            self._unallocated_bytes += unallocated_bytes

    def _no_room(self, nbytes: int, why: str) -> str:
        try:
            available = f"{size(available_bytes())} are"
        except DeviceError:
            available = "an unknown amount is"
        limit = "none" if self.limit_bytes is None else size(self.limit_bytes)
        return (
            f"no host memory for a host copy of {size(nbytes)} ({why}): host copies hold "
            f"{size(self.total_bytes)} (limit {limit}), {available} available. "
            "Unregister components, or raise the daemon's --host-memory"
        )


def _pause() -> Work[None]:
    time.sleep(_PAUSE_S)
    yield


def _file(nbytes: int) -> OwnedFd:
    """Return a memfd of that size without pages. Raises: OSError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    fd = keep(OwnedFd(os.memfd_create(NAME, flags)), SPARE_DESCRIPTORS)
    try:
        os.ftruncate(fd.fileno(), nbytes)
    except OSError:
        fd.close()
        raise
    return fd


def _available_bytes(nbytes: int) -> int:
    try:
        return available_bytes()
    except DeviceError as exc:
        raise HostCopyError("limit", f"no host copy of {nbytes} bytes: {exc}") from exc
