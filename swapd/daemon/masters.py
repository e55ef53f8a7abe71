"""Masters: each component's complete host copy, in a memfd the daemon makes and maps.

Lives here: making, sealing, mapping and dropping them. May not live here: decisions, the
event loop. `make` and `seal` block (they allocate and touch every page): never call them
on the loop.
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

#: What the kernel calls them, in the maps of those that have them mapped.
NAME = "swapd-master"

#: Left for everybody else when masters are made.
RESERVE_BYTES = 64 << 20

#: Descriptors that no master takes, so that other sessions may still come.
SPARE_DESCRIPTORS = 16
#: So much is allocated or mapped in one slice: a few milliseconds.
SLICE_BYTES = 16 << 20
#: How long it is tried to seal a master that seems to be mapped by its worker.
SEAL_PATIENCE_S = 1.0
#: How long a slice is that only waits for masters that are being dropped.
_WAIT_S = 0.002

#: Linux 5.1: no new mapping may write, and those there are still may.
_F_SEAL_FUTURE_WRITE = 0x10


#: It keeps its size, whatever a worker does.
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MasterError(Exception):
    """A master could not be made or sealed; `code` says whose fault it is."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Master:
    """A component's bytes, or those of several of the same content.

    `address` is 0 until it is sealed.
    """

    fd: OwnedFd
    nbytes: int
    mutable: bool
    sealed: bool = False
    #: How many components' it is.
    users: int = 1
    address: int = 0
    #: It takes no memory, and nothing is ever copied from it or to it.
    empty: bool = False
    #: While it is under way: 10,000 of them would be most of what a collection of garbage sees.
    pinning: Future[None] | None = None


class Pinner(Protocol):
    """What masters need of a device; see `swapd.device.Device`."""

    read_only_pins: bool

    def pin(self, address: int, nbytes: int, *, writable: bool) -> None: ...
    def unpin(self, address: int) -> None: ...
    def pinned(self) -> Pinned | None: ...


class Masters:
    """All masters by component uid. Methods may run in any thread, one uid at a time."""

    def __init__(self, limit_bytes: int | None, device: Pinner) -> None:
        """`limit_bytes`: most host memory for all of them; None: what is available."""
        self._limit_bytes = limit_bytes
        self._device = device
        #: Pins in the background: nobody waits for it, copies only get faster.
        self._pinner = Pool(1, "swapd-pin")
        self._masters: dict[int, Master] = {}
        #: Bytes of those that are to be pinned, and are there; how many of them wait for it.
        self.to_pin_bytes = 0
        self.pinning = 0
        #: Of all masters, and of those that are being made.
        self.total_bytes = 0
        #: Of those that are being made: what is still to be allocated.
        self._unallocated_bytes = 0
        #: How many are being dropped; and a wait for the next one that is.
        self._leaving = 0
        self._left = threading.Condition()

    def limit(self, limit_bytes: int | None) -> None:
        """So much at most from now on; what there is stays."""
        self._limit_bytes = limit_bytes

    def __len__(self) -> int:
        return len(self._masters)

    def make(self, uid: int, nbytes: int, *, mutable: bool) -> int:
        """Allocate a master of exactly `nbytes`; return its descriptor, still owned here.

        Every page is allocated, so that filling it cannot fail later. Raises: MasterError
        (`host_memory`); then nothing is left of it.
        """
        return whole(self.making(uid, nbytes, mutable=mutable))

    def making(self, uid: int, nbytes: int, *, mutable: bool) -> Work[int]:
        """The same in slices. If there is no room, it waits for masters that are being dropped."""
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
        """One that takes no memory, of what has nothing to save; return its descriptor.

        Nobody may write to it. Does not block. Raises: MasterError.
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
        """Have the sealed master of `original` be that of `uid` too; return its descriptor.

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
        """Make a filled master ready to copy from: mapped, present, and if clean read-only.

        Raises: MasterError: `bad_request` if a worker still has it mapped for writing, or
        has sealed or shut it; `host_memory` if it cannot be mapped here.
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
        """How it is mapped here. A clean one only where it could not be pinned otherwise: then
        nobody can map it for writing any more, but whoever did before is not found out."""
        return master.mutable or not self._device.read_only_pins

    def _pin(self, master: Master) -> None:
        try:
            self._device.pin(master.address, master.nbytes, writable=self._writable(master))
        except DeviceLost as exc:
            log.error("host copies are not pinned: %s", exc)
        except DeviceError as exc:
            log.warning(
                "%s; what is not pinned is copied in two steps, more slowly: raise --pin-limit, "
                "and `ulimit -l` (LimitMEMLOCK in a unit)",
                exc,
            )

    def _ended_pinning(self, master: Master, _: Future[None]) -> None:
        master.pinning = None
        with self._left:
            self.pinning -= 1

    def pinned(self) -> Pinned | None:
        """How much the device has pinned of `to_pin_bytes`. Does not block."""
        return self._device.pinned()

    def address(self, uid: int) -> int:
        """Where the bytes of a sealed master are in this process."""
        return self._masters[uid].address

    def drop(self, uid: int) -> None:
        """Unpin, unmap and close, if nobody else uses it.

        A worker's own mapping or descriptor keeps the memory.
        """
        self.dropping()
        self.dropped(uid)

    def dropping(self) -> None:
        """A master is about to be dropped: who needs the room waits for it. Does not block."""
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
        """Whether it is somebody else's after this."""
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
                log.error("a host copy stays mapped, for it cannot be unpinned: %s", exc)
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
        """Seal it. A kernel that reclaims or moves its pages just now may refuse that for a moment,
        with the same word as for a worker that has it mapped: so it is tried for a while."""
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
        """Count a master that is about to be made; False if there may soon be room for it.

        Raises: MasterError if there is none, and none is about to be.
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
