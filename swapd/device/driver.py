"""The CUDA driver with typed calls and named errors, for daemon and client.

Addresses and handles are ints; lengths are bytes. Calls release the GIL and need a current context:
use `with driver.current()`, in any thread. A process with a `Driver` must not fork; it may spawn.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from swapd.device.context import Context, CudaError
from swapd.shared.fds import OwnedFd

#: Interval for retrying a call that a capture blocks: no call waits for the end of a capture.
_CAPTURE_LOOK_S = 0.001


class Access(IntEnum):
    """Access of this process's GPU work to a mapping; the driver's values."""

    NONE = 0
    READ = 1
    READ_WRITE = 3


class Driver(Context):
    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes."""
        free, total = self.call(self.api.cuMemGetInfo)
        return int(free), int(total)

    def granularity(self) -> int:
        kind = self.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call(self.api.cuMemGetAllocationGranularity, self._properties(), kind))

    # --- physical memory -----------------------------------------------------------------

    def create(self, nbytes: int) -> int:
        """Allocate. The memory is freed when its handle is released and nothing else refers to
        it."""
        return int(self.call(self.api.cuMemCreate, nbytes, self._properties(), 0))

    def release(self, handle: int) -> None:
        self.call(self.api.cuMemRelease, handle)

    def export(self, handle: int) -> OwnedFd:
        """Return a descriptor, which keeps the memory allocated. The caller owns it."""
        return OwnedFd(
            int(self.call(self.api.cuMemExportToShareableHandle, handle, self._fd_type, 0))
        )

    def adopt(self, fd: int) -> int:
        """Return a handle of the allocation that exported `fd`, which the caller keeps."""
        return int(self.call(self.api.cuMemImportFromShareableHandle, fd, self._fd_type))

    # --- address space -------------------------------------------------------------------

    def reserve(self, nbytes: int, alignment: int = 0) -> int:
        """Reserve addresses. `free` gives them back once nothing is mapped there."""
        return int(self.call(self.api.cuMemAddressReserve, nbytes, alignment, 0, 0))

    def free(self, address: int, nbytes: int) -> None:
        self.call(self.api.cuMemAddressFree, address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map a whole allocation into a reserved range, without access."""
        self.call(self.api.cuMemMap, address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap the range of one `map`. May block for work on the GPU."""
        self.call(self.api.cuMemUnmap, address, nbytes)

    def set_access(self, address: int, nbytes: int, access: Access) -> None:
        rule = self.api.CUmemAccessDesc()
        rule.location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        rule.location.id = self.index
        rule.flags = self.api.CUmemAccess_flags(access)
        self.call(self.api.cuMemSetAccess, address, nbytes, [rule], 1)

    # --- host memory ---------------------------------------------------------------------

    def pin(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Page-lock memory of this process, for the GPU to read and, if `writable`, to write."""
        flags = self.api.CU_MEMHOSTREGISTER_PORTABLE
        if not writable:
            flags |= self.api.CU_MEMHOSTREGISTER_READ_ONLY
        self.call(self.api.cuMemHostRegister, address, nbytes, flags)

    def pin_for_flags(self, address: int, nbytes: int) -> int:
        """Page-lock memory on which streams wait; return its address for the GPU."""
        flags = self.api.CU_MEMHOSTREGISTER_PORTABLE | self.api.CU_MEMHOSTREGISTER_DEVICEMAP
        self.call(self.api.cuMemHostRegister, address, nbytes, flags)
        return int(self.call(self.api.cuMemHostGetDevicePointer, address, 0))

    def unpin(self, address: int) -> None:
        self.call(self.api.cuMemHostUnregister, address)

    def allocate_pinned(self, nbytes: int) -> int:
        flags = self.api.CU_MEMHOSTALLOC_PORTABLE
        return int(self.call(self.api.cuMemHostAlloc, nbytes, flags))

    def free_pinned(self, address: int) -> None:
        self.call(self.api.cuMemFreeHost, address)

    # --- streams, events, copies ---------------------------------------------------------

    def stream(self) -> Any:
        """Make a stream that waits for no other, not even the default stream."""
        kind = self.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        return self.call(self.api.cuStreamCreate, kind)

    def destroy_stream(self, stream: Any) -> None:
        self.call(self.api.cuStreamDestroy, stream)

    def finish(self, stream: Any) -> None:
        """Block until the stream is done."""
        self.call(self.api.cuStreamSynchronize, stream)

    def event(self) -> Any:
        """Make an event without timing. A thread that waits for it sleeps."""
        kinds = self.api.CUevent_flags
        flags = kinds.CU_EVENT_DISABLE_TIMING | kinds.CU_EVENT_BLOCKING_SYNC
        return self.call(self.api.cuEventCreate, flags)

    def destroy_event(self, event: Any) -> None:
        self.call(self.api.cuEventDestroy, event)

    def record(self, event: Any, stream: Any) -> None:
        self.call(self.api.cuEventRecord, event, stream)

    def synchronize(self, event: Any) -> None:
        """Block until the work before the event on its stream is done."""
        self.call(self.api.cuEventSynchronize, event)

    def query(self, event: Any) -> bool:
        """Return whether `synchronize` would return at once."""
        return self._is_done(self.api.cuEventQuery, event)

    def is_idle(self, stream: Any) -> bool:
        """Does not block."""
        return self._is_done(self.api.cuStreamQuery, stream)

    def _is_done(self, query: Callable[..., Any], what: Any) -> bool:
        try:
            self.call(query, what)
        except CudaError as exc:
            if exc.name != "CUDA_ERROR_NOT_READY":
                raise
            return False
        return True

    def settle(self) -> None:
        """Block until all work on every stream of the current context is done, and all captures
        have ended: before that, the state of the streams is unknown. Spoils a graph that is being
        captured."""
        self.after_captures(lambda: self.call(self.api.cuCtxSynchronize))

    def after_captures(self, call: Callable[[], bool | None]) -> None:
        """Retry `call` until no capture is in its way, as an error or a True result says.
        Blocks."""
        while True:
            try:
                if not call():
                    return
            except CudaError as exc:
                if not exc.of_a_capture:
                    raise
            time.sleep(_CAPTURE_LOOK_S)

    def is_capturing(self, stream: Any) -> bool:
        return int(self.call(self.api.cuStreamIsCapturing, stream)) != 0

    def stream_id(self, stream: Any) -> int:
        """Return a number that no other stream of this process ever has, even after this stream is
        destroyed."""
        return int(self.call(self.api.cuStreamGetId, stream))

    def wait_value(self, stream: Any, address: int, value: int) -> None:
        """Make the stream wait until the 64-bit word at `address` is at least `value`.

        `address` is the GPU's, aligned, and must stay valid until the stream has gone on.
        """
        kind = self.api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self.call(self.api.cuStreamWaitValue64, stream, address, value, kind)

    @contextmanager
    def sparing_captures(self) -> Iterator[None]:
        """Allow calls in this thread, in the context, that would spoil graphs during their capture.

        Most do, even an event's query: in a thread's default mode they end each capture that this
        thread has begun, and each that any thread has begun in global mode, as `torch.cuda.graph`
        does. Calls that touch the captured streams, such as `is_idle` of one, fail in every mode.
        """
        relaxed = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self.call(self.api.cuThreadExchangeStreamCaptureMode, relaxed)
        try:
            yield
        finally:
            if not self.lost:
                self.api.cuThreadExchangeStreamCaptureMode(before)

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Enqueue a copy from host memory, which must not change until the copy is done."""
        self.call(self.api.cuMemcpyHtoDAsync, target, source, nbytes, stream)

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self.call(self.api.cuMemcpyDtoHAsync, target, source, nbytes, stream)

    def zero_later(self, address: int, nbytes: int, stream: Any) -> None:
        """Enqueue zeroing GPU memory: 1 ms for several GiB."""
        self.call(self.api.cuMemsetD8Async, address, 0, nbytes, stream)

    @property
    def _fd_type(self) -> Any:
        return self.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self) -> Any:
        made = self.api.CUmemAllocationProp()
        made.type = self.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        made.location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        made.location.id = self.index
        made.requestedHandleTypes = self._fd_type
        return made
