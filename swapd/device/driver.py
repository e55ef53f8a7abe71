"""The CUDA driver: thin, typed, and with errors that have names. Daemon and client use it.

It calls only `cuda.bindings.driver`, never the runtime, and imports that with the first `Driver`.
No policy here. Addresses and handles are ints; lengths are bytes.

The calls release the GIL. They need a current context: put them into `with driver.current()`, in
any thread. A process that has a `Driver` must not fork; it may spawn.
"""

import importlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Self

from swapd.device.base import DeviceError, DeviceLost
from swapd.shared.fds import OwnedFd

#: The version that all calls here and in the client need: CUDA 12.0, as `cuDriverGetVersion`
#: reports it.
NEEDED_VERSION = 12000

#: The context does not survive these: cuda.h says that the process is left in an inconsistent
#: state and any further work returns the same error, or that the context is gone.
_FATAL = {
    "CUDA_ERROR_DEINITIALIZED",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    "CUDA_ERROR_EXTERNAL_DEVICE",
}
#: After these the context may be intact or not; `call` queries it.
_DOUBTFUL = {"CUDA_ERROR_UNKNOWN", "CUDA_ERROR_DEVICE_UNAVAILABLE"}

#: Interval for retrying a call that a capture blocks: no call waits for the end of a capture.
_CAPTURE_LOOK_S = 0.001

#: Remedies for errors whose own text has none.
_REMEDIES = {
    "CUDA_ERROR_NO_DEVICE": (
        "the driver sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES, and start a "
        "container with --gpus all"
    ),
    "CUDA_ERROR_DEVICE_UNAVAILABLE": (
        "another process has the GPU to itself, or its compute mode forbids it; see "
        "nvidia-smi --query-compute-apps=pid,name --format=csv, or nvidia-smi -c DEFAULT"
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "the kernel module and libcuda are of different drivers; reboot, or load the new module"
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "the compatibility libcuda found first does not support this GPU; update the driver, "
        "or take cuda-compat out of the library path"
    ),
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "a service that the GPU needs is not up; is nvidia-fabricmanager running?"
    ),
    "CUDA_ERROR_MPS_CONNECTION_FAILED": (
        "no MPS server answers; start nvidia-cuda-mps-control, or unset CUDA_MPS_PIPE_DIRECTORY"
    ),
}


class CudaError(DeviceError):
    """A call failed, and the context is intact: "CUDA_ERROR_OUT_OF_MEMORY (2) in cuMemCreate"."""

    def __init__(self, name: str, code: int, call: str) -> None:
        remedy = _REMEDIES.get(name)
        super().__init__(f"{name} ({code}) in {call}" + (f": {remedy}" if remedy else ""))
        self.name = name

    @property
    def of_a_capture(self) -> bool:
        """Whether the call conflicts with a graph that is being captured."""
        return "CAPTURE" in self.name

    @property
    def out_of_memory(self) -> bool:
        return self.name == "CUDA_ERROR_OUT_OF_MEMORY"


class Access(IntEnum):
    """The access of this process's GPU work to a mapping. The values are the driver's."""

    NONE = 0
    READ = 1
    READ_WRITE = 3


def load() -> Any:
    """`cuda.bindings.driver`, initialised.

    Raises: DeviceError that says what is missing and what to do: the bindings, the driver, a newer
    driver, a GPU.
    """
    try:
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as exc:
        raise DeviceError(
            f"the CUDA driver's Python bindings are missing ({exc}): pip install 'swapd[cuda]'"
        ) from exc
    try:
        version = checked(api, api.cuDriverGetVersion)
    except RuntimeError as exc:
        # the loader's own error, not a subclass of ImportError
        raise DeviceError(
            "there is no NVIDIA driver here (libcuda.so.1 was not found): install one, start "
            "a container with --gpus all, or use --device host"
        ) from exc
    if version < NEEDED_VERSION:
        raise DeviceError(
            f"the NVIDIA driver is too old: it is for CUDA {_version(version)}, and CUDA "
            f"{_version(NEEDED_VERSION)} (driver 525) or newer is needed; update the driver"
        )
    checked(api, api.cuInit, 0)
    return api


def checked(api: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of the driver's `function`: nothing, a value, or a tuple of values.

    Raises: CudaError. For calls without a `Driver`; with one see `Driver.call`.
    """
    result, *values = function(*arguments)
    if result:
        raise CudaError(_name(api, result), int(result), function.__name__)
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def device_names(api: Any) -> list[str]:
    """The GPUs this process may use, by index."""
    return [
        _text(checked(api, api.cuDeviceGetName, 256, checked(api, api.cuDeviceGet, index)))
        for index in range(checked(api, api.cuDeviceGetCount))
    ]


def uuid_of(api: Any, device: Any) -> str:
    """The name of a GPU in every process, as nvidia-smi shows it: "GPU-..."."""
    return f"GPU-{uuid.UUID(bytes=checked(api, api.cuDeviceGetUuid, device).bytes)}"


class Context:
    """One GPU, through its primary context, which it keeps until `close`.

    Methods may be called in any thread. After an error that the context does not survive, all of
    them raise DeviceLost with that error's name, and call the driver no more.
    """

    def __init__(self, index: int) -> None:
        """Open the GPU with this index. Blocks: makes a context, 0.1 s and more.

        Raises: DeviceError.
        """
        self._changing = threading.Lock()
        self._lost: str | None = None
        self._pid = os.getpid()
        self.api = api = load()
        names = device_names(api)
        if not 0 <= index < len(names):
            there = ", ".join(f"cuda:{i} ({name})" for i, name in enumerate(names))
            raise DeviceError(
                f"there is no cuda:{index}; this process sees {there or 'no GPU'}: use "
                "--device cuda:0, or look at CUDA_VISIBLE_DEVICES"
            )
        self.index = index
        self.product = names[index]
        self.device = self.call(api.cuDeviceGet, index)
        #: "GPU-..." as nvidia-smi shows it, the same in every process.
        self.uuid = uuid_of(api, self.device)
        self._context = self.call(api.cuDevicePrimaryCtxRetain, self.device)

    @classmethod
    def by_uuid(cls, wanted: str) -> Self:
        """Open the GPU with this uuid, at any index in this process.

        Raises: DeviceError.
        """
        api = load()
        for index in range(checked(api, api.cuDeviceGetCount)):
            device = checked(api, api.cuDeviceGet, index)
            if wanted == uuid_of(api, device):
                return cls(index)
        raise DeviceError(
            f"this process does not see the GPU {wanted}; is CUDA_VISIBLE_DEVICES set?"
        )

    def __repr__(self) -> str:
        return f"<Driver cuda:{self.index} {self.product}{', lost' if self._lost else ''}>"

    @property
    def lost(self) -> bool:
        """Whether an error occurred that the context does not survive."""
        return self._lost is not None

    def close(self) -> None:
        """Release the context. Nothing made through this driver may be used any more."""
        with self._changing:
            context, self._context = self._context, None
        if context is not None and not self.lost:
            self.call(self.api.cuDevicePrimaryCtxRelease, self.device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the GPU's context current in this thread, and afterwards restore the previous
        one."""
        if os.getpid() != self._pid:
            raise DeviceError("CUDA does not survive a fork: start processes with spawn")
        before = self.call(self.api.cuCtxGetCurrent)
        if int(before) == int(self._context):
            yield
            return
        self.call(self.api.cuCtxSetCurrent, self._context)
        try:
            yield
        finally:
            if not self.lost:
                self.api.cuCtxSetCurrent(before)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function` of `api`; return its values as `checked` does.

        Raises: DeviceLost at once if the device is lost, or if this call finds it so; CudaError;
        DeviceError if the installed driver has no such call.
        """
        if self._lost is not None:
            raise DeviceLost(self._lost)
        try:
            return checked(self.api, function, *arguments)
        except CudaError as exc:
            if exc.name in _FATAL or (exc.name in _DOUBTFUL and self._context_is_dead()):
                with self._changing:  # the first error is the cause
                    self._lost = self._lost or f"cuda:{self.index} is lost: {exc}"
                raise DeviceLost(self._lost) from exc
            raise
        except RuntimeError as exc:
            raise DeviceError(f"the NVIDIA driver is too old: {exc}; update it") from exc

    def _context_is_dead(self) -> bool:
        result, *_ = self.api.cuStreamQuery(self.api.CUstream(0))
        # invalid: no context is current in this thread, so nothing is known
        well = ("CUDA_SUCCESS", "CUDA_ERROR_NOT_READY", "CUDA_ERROR_INVALID_CONTEXT")
        return result.name not in well

    def attribute(self, name: str) -> int:
        """A device attribute by its name without CU_DEVICE_ATTRIBUTE_; 0 if it is unknown."""
        attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if attribute is None:
            return 0
        try:
            return int(self.call(self.api.cuDeviceGetAttribute, attribute, self.device))
        except CudaError:  # the driver is older than the attribute
            return 0


class Driver(Context):
    """The calls of the driver for one GPU."""

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the GPU's memory."""
        free, total = self.call(self.api.cuMemGetInfo)
        return int(free), int(total)

    def granularity(self) -> int:
        """The unit of allocation sizes: each must be a multiple of it."""
        kind = self.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call(self.api.cuMemGetAllocationGranularity, self._properties(), kind))

    # --- physical memory -----------------------------------------------------------------

    def create(self, nbytes: int) -> int:
        """Allocate; `release` frees the handle, and the memory goes when nothing refers to it."""
        return int(self.call(self.api.cuMemCreate, nbytes, self._properties(), 0))

    def release(self, handle: int) -> None:
        self.call(self.api.cuMemRelease, handle)

    def export(self, handle: int) -> OwnedFd:
        """A descriptor of the allocation, which keeps it allocated. The caller owns it."""
        return OwnedFd(
            int(self.call(self.api.cuMemExportToShareableHandle, handle, self._fd_type, 0))
        )

    def adopt(self, fd: int) -> int:
        """The handle of the allocation that exported `fd`. The caller keeps `fd`."""
        return int(self.call(self.api.cuMemImportFromShareableHandle, fd, self._fd_type))

    # --- address space -------------------------------------------------------------------

    def reserve(self, nbytes: int, alignment: int = 0) -> int:
        """Reserve a range of addresses; `free` gives it back when nothing is mapped there."""
        return int(self.call(self.api.cuMemAddressReserve, nbytes, alignment, 0, 0))

    def free(self, address: int, nbytes: int) -> None:
        self.call(self.api.cuMemAddressFree, address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map a whole allocation into a reserved range, with no access yet."""
        self.call(self.api.cuMemMap, address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap the range of one `map`. Blocks, perhaps for work on the GPU."""
        self.call(self.api.cuMemUnmap, address, nbytes)

    def set_access(self, address: int, nbytes: int, access: Access) -> None:
        """Set the access to a range that is mapped throughout, in one call."""
        rule = self.api.CUmemAccessDesc()
        rule.location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        rule.location.id = self.index
        rule.flags = self.api.CUmemAccess_flags(access)
        self.call(self.api.cuMemSetAccess, address, nbytes, [rule], 1)

    # --- host memory ---------------------------------------------------------------------

    def pin(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Page-lock memory of this process, for the GPU to read and, if `writable`, write."""
        flags = self.api.CU_MEMHOSTREGISTER_PORTABLE
        if not writable:
            flags |= self.api.CU_MEMHOSTREGISTER_READ_ONLY
        self.call(self.api.cuMemHostRegister, address, nbytes, flags)

    def pin_for_flags(self, address: int, nbytes: int) -> int:
        """Page-lock memory of this process that streams wait on; return its address for the GPU."""
        flags = self.api.CU_MEMHOSTREGISTER_PORTABLE | self.api.CU_MEMHOSTREGISTER_DEVICEMAP
        self.call(self.api.cuMemHostRegister, address, nbytes, flags)
        return int(self.call(self.api.cuMemHostGetDevicePointer, address, 0))

    def unpin(self, address: int) -> None:
        self.call(self.api.cuMemHostUnregister, address)

    def allocate_pinned(self, nbytes: int) -> int:
        """Allocate page-locked memory of the driver; `free_pinned` frees it."""
        flags = self.api.CU_MEMHOSTALLOC_PORTABLE
        return int(self.call(self.api.cuMemHostAlloc, nbytes, flags))

    def free_pinned(self, address: int) -> None:
        self.call(self.api.cuMemFreeHost, address)

    # --- streams, events, copies ---------------------------------------------------------

    def stream(self) -> Any:
        """A stream that waits for no other, the default stream included."""
        kind = self.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        return self.call(self.api.cuStreamCreate, kind)

    def destroy_stream(self, stream: Any) -> None:
        self.call(self.api.cuStreamDestroy, stream)

    def finish(self, stream: Any) -> None:
        """Block until everything on the stream is done."""
        self.call(self.api.cuStreamSynchronize, stream)

    def event(self) -> Any:
        """An event for `synchronize`: it has no timing, and waiting for it sleeps."""
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
        """Whether `synchronize` would return at once. Does not block."""
        return self._is_done(self.api.cuEventQuery, event)

    def is_idle(self, stream: Any) -> bool:
        """Whether everything on the stream is done. Does not block."""
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
        """Block until all work on every stream of the current context is done.

        This spoils a graph that is being captured on one of them, and blocks until its capture has
        ended: before, the state of the streams is unknown.
        """
        self.after_captures(lambda: self.call(self.api.cuCtxSynchronize))

    def after_captures(self, call: Callable[[], object]) -> None:
        """Make a call when no capture of a graph is in its way. Blocks until then."""
        while True:
            try:
                call()
                return
            except CudaError as exc:
                if not exc.of_a_capture:
                    raise
            time.sleep(_CAPTURE_LOOK_S)

    def is_capturing(self, stream: Any) -> bool:
        """Whether work put on the stream is captured into a graph instead of running."""
        return int(self.call(self.api.cuStreamIsCapturing, stream)) != 0

    def stream_id(self, stream: Any) -> int:
        """A number that no other stream of this process ever has, even after this one is
        destroyed."""
        return int(self.call(self.api.cuStreamGetId, stream))

    def wait_value(self, stream: Any, address: int, value: int) -> None:
        """Make the stream wait until the 64-bit word at `address` is at least `value`.

        `address` is the GPU's, aligned, and stays valid until the stream has gone on.
        """
        kind = self.api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self.call(self.api.cuStreamWaitValue64, stream, address, value, kind)

    @contextmanager
    def sparing_captures(self) -> Iterator[None]:
        """Allow this thread, in the context, calls that otherwise spoil graphs during capture.

        Most calls do, even an event's query. In a thread's default mode they end each capture that
        this thread has begun, and each that any thread has begun in global mode, as
        `torch.cuda.graph` does. These calls do not touch the captured streams. Calls that do fail
        in every mode, such as `is_idle` of a stream that captures.
        """
        relaxed = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self.call(self.api.cuThreadExchangeStreamCaptureMode, relaxed)
        try:
            yield
        finally:
            if not self.lost:
                self.api.cuThreadExchangeStreamCaptureMode(before)

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Enqueue a copy from host memory, which must not change until it is done."""
        self.call(self.api.cuMemcpyHtoDAsync, target, source, nbytes, stream)

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self.call(self.api.cuMemcpyDtoHAsync, target, source, nbytes, stream)

    def zero(self, address: int, nbytes: int) -> None:
        """Zero this memory of the GPU. Blocks: 1 ms for some GiB."""
        self.call(self.api.cuMemsetD8, address, 0, nbytes)
        self.call(self.api.cuCtxSynchronize)

    def zero_later(self, address: int, nbytes: int, stream: Any) -> None:
        """Enqueue the same."""
        self.call(self.api.cuMemsetD8Async, address, 0, nbytes, stream)

    @property
    def _fd_type(self) -> Any:
        return self.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self) -> Any:
        """Memory of this GPU that can be exported as a descriptor."""
        made = self.api.CUmemAllocationProp()
        made.type = self.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        made.location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        made.location.id = self.index
        made.requestedHandleTypes = self._fd_type
        return made


def _name(api: Any, result: Any) -> str:
    try:
        return str(api.CUresult(int(result)).name)
    except ValueError:
        return "an error without a name"


def _text(name: bytes) -> str:
    return name.split(b"\0", 1)[0].decode(errors="replace").strip()


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
