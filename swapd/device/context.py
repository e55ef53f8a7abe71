"""One GPU's context in this process: opens it, calls the driver in it, and interprets errors.

Imports only `cuda.bindings.driver`, with the first `Context`.
"""

import importlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from swapd.device.base import DeviceError, DeviceLost

#: CUDA 12.0, which daemon and client need, as `cuDriverGetVersion` reports it.
NEEDED_VERSION = 12000

#: The context does not survive these. Per cuda.h, any further work in the process returns the same
#: error, or the context is gone.
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
#: After these errors the context may be intact; `call` checks.
_DOUBTFUL = {"CUDA_ERROR_UNKNOWN", "CUDA_ERROR_DEVICE_UNAVAILABLE"}

#: For errors whose text names no remedy.
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
        """Whether the call conflicts with the capture of a graph."""
        return "CAPTURE" in self.name

    @property
    def out_of_memory(self) -> bool:
        return self.name == "CUDA_ERROR_OUT_OF_MEMORY"


def load() -> Any:
    """Return `cuda.bindings.driver`, initialised. Raises: DeviceError that names what is missing
    and the remedy."""
    try:
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as exc:
        raise DeviceError(
            f"the CUDA driver's Python bindings are missing ({exc}): pip install 'swapd[cuda]', or "
            "use --device host"
        ) from exc
    try:
        version = checked(api, api.cuDriverGetVersion)
    except RuntimeError as exc:
        # the loader's error, which is no ImportError
        raise DeviceError(
            "there is no NVIDIA driver here (libcuda.so.1 was not found): install one, start "
            "a container with --gpus all, or use --device host"
        ) from exc
    if version < NEEDED_VERSION:
        raise DeviceError(
            "the NVIDIA driver is too old: it is for CUDA "
            f"{version // 1000}.{version % 1000 // 10}, and CUDA 12.0 (driver 525) or newer is "
            "needed, by torch's default builds CUDA 13 (driver 580); update the driver"
        )
    checked(api, api.cuInit, 0)
    return api


def checked(api: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the values of the driver's `function`: None, a value, or a tuple. With a `Driver`, use
    `Driver.call`. Raises: CudaError."""
    result, *values = function(*arguments)
    if result:
        raise CudaError(_name(api, result), int(result), function.__name__)
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def device_names(api: Any) -> list[str]:
    return [
        _text(checked(api, api.cuDeviceGetName, 256, checked(api, api.cuDeviceGet, index)))
        for index in range(checked(api, api.cuDeviceGetCount))
    ]


def uuid_of(api: Any, device: Any) -> str:
    """As nvidia-smi shows it, the same in every process."""
    return f"GPU-{uuid.UUID(bytes=checked(api, api.cuDeviceGetUuid, device).bytes)}"


class Context:
    """One GPU and its primary context, which is kept until `close`.

    Methods may be called in any thread. After an error that the context does not survive, all raise
    DeviceLost with that error's name, and call the driver no more.
    """

    def __init__(self, index: int) -> None:
        """Blocks 0.1 s or more. Raises: DeviceError."""
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
        self.uuid = uuid_of(api, self.device)
        self._context = self.call(api.cuDevicePrimaryCtxRetain, self.device)

    @classmethod
    def by_uuid(cls, wanted: str) -> Self:
        """Open the GPU with this uuid, whatever its index in this process. Raises: DeviceError."""
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
        return self._lost is not None

    def close(self) -> None:
        """Release the context. Nothing made through it may be used any more."""
        with self._changing:
            context, self._context = self._context, None
        if context is not None and not self.lost:
            self.call(self.api.cuDevicePrimaryCtxRelease, self.device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the GPU's context current in this thread, and restore the previous one
        afterwards."""
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

        Raises: DeviceLost if the device is lost, before or by this call; CudaError; DeviceError if
        the installed driver has no such function.
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
        """`name`: without CU_DEVICE_ATTRIBUTE_. Return 0 for an unknown attribute."""
        attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if attribute is None:
            return 0
        try:
            return int(self.call(self.api.cuDeviceGetAttribute, attribute, self.device))
        except CudaError:  # the driver is older than the attribute
            return 0


def _name(api: Any, result: Any) -> str:
    try:
        return str(api.CUresult(int(result)).name)
    except ValueError:
        return "an error without a name"


def _text(name: bytes) -> str:
    return name.split(b"\0", 1)[0].decode(errors="replace").strip()
