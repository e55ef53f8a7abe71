"""The encoding of tensors between the demo's processes: bytes with a type and a shape."""

import msgspec
import torch

Tensors = dict[str, torch.Tensor]


class Packed(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_decode = msgspec.msgpack.Decoder(dict[str, Packed]).decode


def pack(tensors: Tensors) -> bytes:
    """Encode named tensors; equal bytes mean bit-identical tensors."""
    packed = {
        name: Packed(
            str(t.dtype).removeprefix("torch."),
            tuple(t.shape),
            t.contiguous().flatten().view(torch.uint8).numpy().tobytes() if t.numel() else b"",
        )
        for name, t in sorted(tensors.items())
    }
    return msgspec.msgpack.encode(packed)


def unpack(data: bytes) -> Tensors:
    tensors = {}
    for name, p in _decode(data).items():
        dtype = getattr(torch, p.dtype)
        flat = torch.frombuffer(bytearray(p.data), dtype=dtype) if p.data else torch.empty(0)
        tensors[name] = flat.to(dtype).reshape(p.shape)
    return tensors
