"""Tensors over bytes at an address: the bytes may be absent, and never belong to torch.

DLPack names the device, so torch does not query the address. It takes every device, where other
interfaces take the CPU only, or read the memory first.
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

#: The host device.
HOST = Target(_CPU, 0)


def gpu(index: int) -> Target:
    """The GPU that has this index in this process."""
    return Target(_CUDA, index)


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor of DLPack 0.x, with the structs inside it flattened."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_UNSIGNED = 1
#: The capsule keeps the pointer to its name.
_NAME = b"dltensor"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

#: torch reads these until its last view is gone, at any later time, so they are never freed. The
#: deleter is NULL: one in Python would lose a pending exception.
_kept: list[tuple[_ManagedTensor, ctypes.Array[ctypes.c_int64], ctypes.Array[ctypes.c_int64]]] = []


def bytes_at(address: int, nbytes: int, target: Target) -> torch.Tensor:
    """A uint8 tensor of the bytes at `address`, which must stay reserved for ever."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=target.device)
    shape, strides = (ctypes.c_int64 * 1)(nbytes), (ctypes.c_int64 * 1)(1)
    managed = _ManagedTensor(
        data=address,
        device_type=target.kind,
        device_id=target.number,
        ndim=1,
        code=_UNSIGNED,
        bits=8,
        lanes=1,
        shape=shape,
        strides=strides,
    )
    _kept.append((managed, shape, strides))
    tensor: torch.Tensor = from_dlpack(_new_capsule(ctypes.addressof(managed), _NAME, None))
    return tensor
