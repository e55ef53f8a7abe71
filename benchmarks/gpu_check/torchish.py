"""Torch on the GPU; on the stub, torch on the CPU in its place. Needs torch.

The CPU can read and write the stub's device memory at the same addresses, with the same access
rights. So the checks run there line by line, and only the functions here differ: places of tensors,
registration of weights, graphs.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_check.raw import Gpu
from benchmarks.gpu_check.settings import Settings
from swapd.device.driver import Driver
from swapd_client import Client, Component, Lease
from swapd_client.memory import dlpack

#: Numbers of 16 bits in a piece of `sums`.
SUMMED = 8 << 20


def device_of(settings: Settings) -> torch.device:
    return torch.device("cpu") if settings.on_cpu else torch.device("cuda", settings.index)


def start(settings: Settings) -> torch.device:
    """Make this process use the GPU, with reproducible results."""
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True  # its transposed convolutions may add in any order
    torch.set_num_threads(1)
    if not settings.on_cpu:
        torch.cuda.set_device(settings.index)
        torch.cuda.init()  # type: ignore[no-untyped-call]
    return device_of(settings)


def synchronize(settings: Settings) -> None:
    if not settings.on_cpu:
        torch.cuda.synchronize()


def graph_of(settings: Settings, what: Callable[[], None]) -> Callable[[], None]:
    """Capture `what`, which has run before, and return the replay of it."""
    if settings.stub:
        return what
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        what()
    return graph.replay


class StreamWaits:
    """Makes torch's stream wait for segments.

    On the stub a stream of the driver waits, and torch on the CPU waits for that one.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._driver = Driver(settings.index) if settings.stub else None
        if self._driver is not None:
            with self._driver.current():
                self._stream = self._driver.stream()

    def wait(self, lease: Lease, segment: int | None = None) -> None:
        """Computations from here on come after the segment. Does not block on a GPU."""
        if self._driver is None:
            lease.wait(segment, stream=torch.cuda.current_stream())
            return
        with self._driver.current():
            lease.wait(segment, stream=int(self._stream))
            self._driver.finish(self._stream)


def bytes_at(address: int, nbytes: int, settings: Settings) -> torch.Tensor:
    """A tensor of bytes over a range that need not be mapped. It is never freed."""
    target = dlpack.HOST if settings.stub else dlpack.gpu(settings.index)
    return dlpack.bytes_at(address, nbytes, target)


# --- where a module is -------------------------------------------------------------------


class Moved:
    """A module that moves to the GPU and back, as with `module.to()`.

    On the stub it moves to memory of the stub; on the host device it stays in place.
    """

    def __init__(self, settings: Settings, module: torch.nn.Module) -> None:
        self._settings = settings
        self._module = module
        self._gpu = Gpu(settings) if settings.stub else None
        self._address = 0

    def come(self) -> None:
        if self._gpu is None:
            self._module.to(device_of(self._settings))
            return
        weights = list(self._module.parameters())
        at = self._address = self._gpu.alloc(sum(_padded(weight) for weight in weights))
        for weight in weights:
            weight.data = _at(at, weight, self._settings).copy_(weight)
            at += _padded(weight)

    def leave(self) -> None:
        """Move it out; its memory is then free for other processes."""
        if self._gpu is None:
            self._module.to("cpu")
            torch.cuda.empty_cache()
            return
        for weight in self._module.parameters():
            weight.data = weight.data.clone()
        self._gpu.dealloc(self._address)


def free_bytes(settings: Settings) -> int:
    """The driver's free bytes on the device; 0 without a driver."""
    if settings.on_host:
        return 0
    if not settings.stub:
        return int(torch.cuda.mem_get_info(settings.index)[0])
    driver = Driver(settings.index)
    with driver.current():
        free, _ = driver.memory()
    driver.close()
    return free


def _at(address: int, weight: torch.Tensor, settings: Settings) -> torch.Tensor:
    """A tensor like `weight`, over memory at `address`."""
    whole = bytes_at(address, weight.nbytes, settings)
    return whole.view(weight.dtype).view(weight.shape)


def _padded(weight: torch.Tensor) -> int:
    return -(-weight.nbytes // 256) * 256


# --- models ------------------------------------------------------------------------------


class Stack(torch.nn.Module):
    """Layers of one size, with weights from a seed. One is a segment."""

    #: The input, which stays private and in place.
    x: torch.Tensor

    def __init__(self, settings: Settings, nbytes: int, layers: int, seed: int) -> None:
        super().__init__()
        where = device_of(settings)
        dtype = torch.float32 if settings.stub else torch.bfloat16
        self.width = max(int((nbytes / layers / dtype.itemsize) ** 0.5) // 64 * 64, 64)
        self.rows = 16
        random = torch.Generator(where).manual_seed(seed)
        self.layers = torch.nn.ModuleList()
        for _ in range(layers):
            layer = torch.nn.Linear(self.width, self.width, bias=False, device=where, dtype=dtype)
            layer.weight.requires_grad_(False)
            layer.weight.normal_(0, self.width**-0.5, generator=random)
            self.layers.append(layer)
        x = torch.randn(self.rows, self.width, device=where, dtype=dtype, generator=random)
        self.register_buffer("x", x, persistent=False)

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def step(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """One layer's work."""
        return torch.tanh(self.layers[number](x))

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        y = self.x if x is None else x
        for number in range(len(self.layers)):
            y = self.step(number, y)
        return y

    def segments(self) -> list[list[str]]:
        return [[f"layers.{number}"] for number in range(len(self.layers))]

    def addresses(self) -> list[int]:
        return [p.data_ptr() for p in self.parameters()]


def register(
    client: Client, settings: Settings, name: str, module: torch.nn.Module, **options: Any
) -> Component:
    """Register a module's weights. On the stub: as bytes, which the CPU reads in place."""
    if not settings.stub:
        return client.register(name, module, **options)
    weights = dict(module.named_parameters())
    buffers = {key: _bytes_of(weight) for key, weight in weights.items()}
    part = client.register(name, buffers, **options)
    at = part.address
    for weight in weights.values():
        weight.data = _at(at, weight, settings)
        at += _padded(weight)
    return part


def load(client: Client, settings: Settings, name: str, path: str, **options: Any) -> Component:
    """Load a file. On the stub its tensors are the CPU's, which reads them in place."""
    here = mock.patch.object(dlpack, "gpu", return_value=dlpack.HOST)
    with here if settings.stub else nullcontext():
        return client.load(name, path, **options)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def digest(tensor: torch.Tensor) -> str:
    """Digest of a small tensor: equal for equal bits only."""
    import hashlib

    host = tensor.detach().cpu().contiguous().view(torch.uint8).flatten()
    return hashlib.blake2b(_bytes_of(host), digest_size=12).hexdigest()


def sums(tensor: torch.Tensor) -> list[int]:
    """The sums of a tensor's bits as numbers of 16, one for each piece of it."""
    numbers = tensor.detach().flatten().view(torch.int16)
    starts = range(0, numbers.numel(), SUMMED)
    return [int(numbers[at : at + SUMMED].sum(dtype=torch.int64)) for at in starts]


def same_bits(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Compare in place; NaNs are like any other bits."""
    pairs = zip(tensors, others, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
