"""Tensors over bytes at an address. The bytes may be absent, and never belong to torch.

DLPack names the device, so torch does not query the address. Other interfaces take the CPU only, or
read the memory first.
"""

import ctypes
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack


class Target(NamedTuple):
    """The device of a component's tensors, in DLPack's terms."""

    kind: int
    number: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.number) if self.kind == _CUDA else torch.device("cpu")


_CPU, _CUDA = 1, 2

HOST = Target(_CPU, 0)


def gpu(index: int) -> Target:
    return Target(_CUDA, index)


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor of DLPack 0.x, with the structs inside it flattened, and its shape."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("length", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


_UNSIGNED = 1
#: The capsule keeps the pointer to its name.
_NAME = b"dltensor"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_c = ctypes.CDLL(None)
_c.malloc.restype = ctypes.c_void_p
_c.malloc.argtypes = [ctypes.c_size_t]


def bytes_at(address: int, nbytes: int, target: Target) -> torch.Tensor:
    """Return a uint8 tensor of the bytes at `address`, which must stay reserved for ever."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=target.device)
    described = _c.malloc(ctypes.sizeof(_ManagedTensor))
    if described is None:
        raise MemoryError
    managed = _ManagedTensor(
        data=address,
        device_type=target.kind,
        device_id=target.number,
        ndim=1,
        code=_UNSIGNED,
        bits=8,
        lanes=1,
        shape=described + _ManagedTensor.length.offset,
        strides=described + _ManagedTensor.stride.offset,
        # torch frees it after its last view, at any time. A deleter in Python would lose a pending
        # exception.
        deleter=ctypes.cast(_c.free, ctypes.c_void_p).value,
        length=nbytes,
        stride=1,
    )
    ctypes.memmove(described, ctypes.byref(managed), ctypes.sizeof(managed))
    tensor: torch.Tensor = from_dlpack(_new_capsule(described, _NAME, None))
    return tensor
