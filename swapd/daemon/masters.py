"""Each component's complete host copy, in a memfd that the daemon makes and maps.

Lives here: making, sealing, mapping and dropping them. May not live here: decisions, the event
loop. `make` and `seal` block (they allocate and touch every page): never call them on the loop.
"""

import errno
import fcntl
import logging
import os
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from swapd.daemon.slices import Work, whole
from swapd.device import DeviceError, DeviceLost
from swapd.device.base import Pinned
from swapd.device.host import available_bytes
from swapd.shared import vm
from swapd.shared.fds import OwnedFd, exhausted, keep, reopen_read_only
from swapd.shared.limits import Pool
from swapd.shared.protocol import Code
from swapd.shared.units import size

log = logging.getLogger("swapd.daemon.masters")

#: Name of the memfds in the kernel's list of mappings.
NAME = "swapd-master"

#: Host memory that host copies leave to all other uses.
RESERVE_BYTES = 64 << 20

#: Descriptors that host copies leave free, so that other sessions may still connect.
SPARE_DESCRIPTORS = 16
#: Bytes that one slice allocates or maps: a few milliseconds.
SLICE_BYTES = 16 << 20
#: How long to retry sealing a host copy that its worker seems to map.
SEAL_PATIENCE_S = 1.0
#: Length of a slice that only waits for host copies to be dropped.
_WAIT_S = 0.002

#: Linux 5.1: no new mapping may write; existing ones still may.
_F_SEAL_FUTURE_WRITE = 0x10


#: A worker cannot change its size.
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MasterError(Exception):
    """A host copy could not be made or sealed; `code` says which side is at fault."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Master:
    """The bytes of a component, or of several with the same content.

    `address` is 0 until it is sealed.
    """

    fd: OwnedFd
    nbytes: int
    mutable: bool
    sealed: bool = False
    #: Number of components that share it.
    users: int = 1
    address: int = 0
    #: It takes no memory: no bytes are ever copied from it or to it.
    empty: bool = False
    #: Only while it runs: 10,000 futures would be most of the work of a garbage collection.
    pinning: Future[None] | None = None


class Pinner(Protocol):
    """The methods of a device that this module calls; see `swapd.device.Device`."""

    read_only_pins: bool

    def pin(self, address: int, nbytes: int, *, writable: bool) -> None: ...
    def unpin(self, address: int) -> None: ...
    def pinned(self) -> Pinned | None: ...


class Masters:
    """All host copies by component uid. Methods may run in any thread, one uid at a time."""

    def __init__(self, limit_bytes: int | None, device: Pinner) -> None:
        """`limit_bytes`: most host memory for all of them; None: all that is available."""
        self._limit_bytes = limit_bytes
        self._device = device
        #: Pins in the background: no request waits for it; it only makes copies faster.
        self._pinner = Pool(1, "swapd-pin")
        self._masters: dict[int, Master] = {}
        #: Bytes of the host copies to pin; and the number of those that wait for it.
        self.to_pin_bytes = 0
        self.pinning = 0
        #: Bytes of all host copies, including those being made.
        self.total_bytes = 0
        #: Bytes still to be allocated for new ones.
        self._unallocated_bytes = 0
        #: Number of host copies being dropped; and a condition for waiting until one is.
        self._leaving = 0
        self._left = threading.Condition()

    def limit(self, limit_bytes: int | None) -> None:
        """At most so much from now on; existing ones stay."""
        self._limit_bytes = limit_bytes

    def __len__(self) -> int:
        return len(self._masters)

    def make(self, uid: int, nbytes: int, *, mutable: bool) -> int:
        """Allocate a host copy of exactly `nbytes`; return its descriptor, which stays owned here.

        Every page is allocated, so that filling it cannot fail later. Raises: MasterError
        (`host_memory`); then nothing is left of it.
        """
        return whole(self.making(uid, nbytes, mutable=mutable))

    def making(self, uid: int, nbytes: int, *, mutable: bool) -> Work[int]:
        """The same in slices. If there is no room, it waits for host copies being dropped."""
        while not self._take_room(nbytes):
            with self._left:
                self._left.wait(_WAIT_S)
            yield
        unallocated = nbytes
        try:
            with self._empty(nbytes) as fd:
                for at in range(0, nbytes, SLICE_BYTES):
                    n = min(SLICE_BYTES, nbytes - at)
                    os.posix_fallocate(fd.fileno(), at, n)
                    unallocated -= n
                    self._change_room(0, -n)
                    yield
                fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, _SIZE_SEALS)
                made = OwnedFd(fd.take())
        except GeneratorExit:
            self._change_room(-nbytes, -unallocated)
            raise
        except OSError as exc:
            self._change_room(-nbytes, -unallocated)
            if exc.errno == errno.EMFILE:
                raise MasterError("limit", exhausted()) from exc
            raise MasterError("host_memory", self._no_room(nbytes, str(exc))) from exc
        self._masters[uid] = Master(made, nbytes, mutable)
        return made.fileno()

    def _empty(self, nbytes: int) -> OwnedFd:
        """A file of that size without a page. Raises: OSError."""
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        fd = keep(OwnedFd(os.memfd_create(NAME, flags)), SPARE_DESCRIPTORS)
        try:
            os.ftruncate(fd.fileno(), nbytes)
        except OSError:
            fd.close()
            raise
        return fd

    def make_empty(self, uid: int, nbytes: int) -> int:
        """Make a host copy without memory, for a component that saves no bytes; return its
        descriptor.

        No process may write to it. Does not block. Raises: MasterError.
        """
        try:
            with self._empty(nbytes) as fd:
                fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_WRITE)
                made = OwnedFd(fd.take())
        except OSError as exc:
            why = exhausted() if exc.errno == errno.EMFILE else str(exc)
            raise MasterError("limit", why) from exc
        self._masters[uid] = Master(made, nbytes, mutable=True, empty=True)
        return made.fileno()

    def share(self, uid: int, original: int) -> int:
        """Let `uid` share the sealed host copy of `original`; return its descriptor.

        Does not block. `original` is not being dropped yet.
        """
        master = self._masters[original]
        assert master.sealed
        assert not master.mutable
        with self._left:
            master.users += 1
        self._masters[uid] = master
        return master.fd.fileno()

    def seal(self, uid: int) -> None:
        """Make a filled host copy ready to copy from: mapped, present, and if clean read-only.

        Raises: MasterError: `bad_request` if a worker still has it mapped for writing, or has
        sealed or shut it; `host_memory` if it cannot be mapped here.
        """
        whole(self.sealing(uid))

    def sealing(self, uid: int) -> Work[None]:
        """The same in slices."""
        master = self._masters[uid]
        if master.sealed:
            return  # it is shared
        try:
            if master.nbytes and not master.empty:
                yield from self._map(master)
            master.sealed = True
        except PermissionError as exc:
            why = "the worker has sealed it, or changed its mode; leave its descriptor alone"
            raise MasterError("bad_request", f"the host copy cannot be mapped: {why}") from exc
        except OSError as exc:
            raise MasterError("host_memory", f"the host copy cannot be mapped: {exc}") from exc

    def _map(self, master: Master) -> Work[None]:
        fd, span = master.fd.fileno(), _pages(master)
        if writable := self._writable(master):
            master.address = vm.map_shared(fd, 0, span, writable=True)
            if not master.mutable:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        else:
            yield from self._forbid_writing(master)
            with reopen_read_only(fd) as reader:
                master.address = vm.map_shared(reader.fileno(), 0, span, writable=False)
        with self._left:
            self.to_pin_bytes += span
        vm.prefer_huge_pages(master.address, span)
        for at in range(0, span, SLICE_BYTES):
            n = min(SLICE_BYTES, span - at)
            vm.populate(master.address + at, n, writable=writable)
            yield
        with self._left:
            self.pinning += 1
        master.pinning = self._pinner.submit(self._pin, master)
        master.pinning.add_done_callback(partial(self._ended_pinning, master))

    def _writable(self, master: Master) -> bool:
        """Whether it is mapped writable here. A clean one only where it could not be pinned
        otherwise: then no process can map it for writing any more, but one that did so before goes
        unnoticed."""
        return master.mutable or not self._device.read_only_pins

    def _pin(self, master: Master) -> None:
        try:
            self._device.pin(master.address, master.nbytes, writable=self._writable(master))
        except DeviceLost as exc:
            log.error("host copies are not pinned: %s", exc)
        except DeviceError as exc:
            log.warning(
                "%s; the rest is copied in two steps, more slowly: raise --pin-limit, "
                "and `ulimit -l` (LimitMEMLOCK in a unit)",
                exc,
            )

    def _ended_pinning(self, master: Master, _: Future[None]) -> None:
        master.pinning = None
        with self._left:
            self.pinning -= 1

    def pinned(self) -> Pinned | None:
        """How much of `to_pin_bytes` the device has pinned. Does not block."""
        return self._device.pinned()

    def address(self, uid: int) -> int:
        """The address of a sealed host copy in this process."""
        return self._masters[uid].address

    def drop(self, uid: int) -> None:
        """Unpin, unmap and close it, if no other component shares it.

        A worker's own mapping or descriptor keeps the memory.
        """
        self.dropping()
        self.dropped(uid)

    def dropping(self) -> None:
        """Announce that a host copy is about to be dropped, so that new ones wait for its room.
        Does not block."""
        with self._left:
            self._leaving += 1

    def dropped(self, uid: int) -> None:
        """The rest of `drop`."""
        try:
            master = self._masters.pop(uid, None)
            if master is not None and not self._used(master):  # else it could not be made
                self._discard(master)
        finally:
            with self._left:
                self._leaving -= 1
                self._left.notify_all()

    def _used(self, master: Master) -> bool:
        """Release one use; return whether others remain."""
        with self._left:
            master.users -= 1
            return master.users > 0

    def _discard(self, master: Master) -> None:
        if (pinning := master.pinning) is not None and not pinning.cancel():
            wait([pinning])
        if master.address:
            with self._left:
                self.to_pin_bytes -= _pages(master)
            try:
                self._device.unpin(master.address)
            except DeviceError as exc:
                log.error("a host copy stays mapped, because it cannot be unpinned: %s", exc)
                master.address = 0
        if master.address:
            for at in range(0, _pages(master), SLICE_BYTES):  # each page fault waits for it
                vm.free(master.address + at, min(SLICE_BYTES, _pages(master) - at))
        master.fd.close()
        if not master.empty:
            self._change_room(-master.nbytes, 0)

    def close(self) -> None:
        for uid in list(self._masters):
            self.drop(uid)
        self._pinner.shutdown()

    def _forbid_writing(self, master: Master) -> Work[None]:
        """Seal it. While the kernel reclaims or moves its pages, it may refuse that for a moment,
        with the same error as for a worker that has it mapped; so retry for a while."""
        until = time.monotonic() + SEAL_PATIENCE_S
        while True:
            try:
                fcntl.fcntl(master.fd.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
                return
            except OSError as exc:
                if exc.errno != errno.EBUSY:
                    raise
                if time.monotonic() > until:
                    raise MasterError(
                        "bad_request",
                        "the host copy is still mapped for writing; unmap it, then commit",
                    ) from exc
            with self._left:
                self._left.wait(_WAIT_S)
            yield

    def _take_room(self, nbytes: int) -> bool:
        """Count a new host copy; False if there may soon be room for it.

        Raises: MasterError if there is no room, and none is about to come free.
        """
        with self._left:
            over = self._limit_bytes is not None and self.total_bytes + nbytes > self._limit_bytes
            needed = nbytes + self._unallocated_bytes + RESERVE_BYTES
            if not over and needed <= self._available_bytes(nbytes):
                self.total_bytes += nbytes
                self._unallocated_bytes += nbytes
                return True
            if self._leaving:
                return False
        why = "host_memory limit" if over else "out of memory"
        raise MasterError("host_memory", self._no_room(nbytes, why))

    def _available_bytes(self, nbytes: int) -> int:
        try:
            return available_bytes()
        except DeviceError as exc:
            raise MasterError("limit", f"no host copy of {nbytes} bytes: {exc}") from exc

    def _change_room(self, total_bytes: int, unallocated_bytes: int) -> None:
        with self._left:
            self.total_bytes += total_bytes
            self._unallocated_bytes += unallocated_bytes

    def _no_room(self, nbytes: int, why: str) -> str:
        try:
            available = f"{size(available_bytes())} are"
        except DeviceError:
            available = "an unknown amount is"
        limit = "none" if self._limit_bytes is None else size(self._limit_bytes)
        return (
            f"no host memory for a host copy of {size(nbytes)} ({why}): host copies hold "
            f"{size(self.total_bytes)} (limit {limit}), {available} available. "
            "Unregister components, or raise the daemon's --host-memory"
        )


def _pages(master: Master) -> int:
    return vm.round_up(master.nbytes)
