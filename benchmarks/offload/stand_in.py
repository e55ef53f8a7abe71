"""Memory that stands in for a device's, for offloaders that move modules with `.to()`.

Their hooks compare a module's device, and move the module. There is no GPU, so the device is
`cpu:0`: torch distinguishes it from `cpu` in comparisons, and computes on it as on the CPU. It
really copies a module that moves there to other memory, and back, at a given bandwidth, and counts
every byte.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

HOST = torch.device("cpu")
DEVICE = torch.device("cpu:0")


class _Parameter(torch.nn.Parameter):
    """A parameter that reports the device as its own."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE


class _Buffer(torch.Tensor):
    """A buffer that reports the device as its own."""

    # operators give plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE


class StandIn:
    """The device's memory, and the copied bytes. `bandwidth` in bytes a second."""

    def __init__(self, bandwidth: float | None = None) -> None:
        self.bytes_in = 0
        self.bytes_back = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        #: Seconds in `move`.
        self.waited_s = 0.0
        self._bandwidth = bandwidth
        #: Memory of each tensor on the device, by the tensor's id.
        self._taken: dict[int, torch.Tensor] = {}
        #: Free memory by size, kept for reuse as in torch's allocator for GPUs.
        self._free: dict[int, list[torch.Tensor]] = {}

    def move(self, module: torch.nn.Module, device: torch.device) -> bool:
        """Copy parameters and buffers that are not on `device` yet; return whether there were any.

        Blocks for the copy.
        """
        return self.move_tensors([*module.parameters(), *module.buffers()], device)

    def move_tensors(self, tensors: Iterable[torch.Tensor], device: torch.device) -> bool:
        """As `move`, for tensors."""
        started = time.perf_counter()
        moved = 0
        for tensor in tensors:
            if tensor.device != device:
                moved += self._bring(tensor) if device == DEVICE else self._send_back(tensor)
        if self._bandwidth is not None and moved:
            time.sleep(max(0.0, started + moved / self._bandwidth - time.perf_counter()))
        self.waited_s += time.perf_counter() - started
        return moved > 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make `Module.to` of every module mean this device, until the block ends."""
        usual = torch.nn.Module.to

        def to(module: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
            device, dtype, _, _ = torch._C._nn._parse_to(*args, **options)
            if dtype is not None:
                usual(module, dtype)
            if device is not None:
                self.move(module, device)
            return module

        torch.nn.Module.to = to  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.nn.Module.to = usual  # type: ignore[method-assign]

    def _bring(self, tensor: torch.Tensor) -> int:
        nbytes = tensor.numel() * tensor.element_size()
        free = self._free.setdefault(nbytes, [])
        memory = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8)
        there = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        there.copy_(tensor.detach())
        tensor.data = there
        tensor.__class__ = _Parameter if isinstance(tensor, torch.nn.Parameter) else _Buffer
        self._taken[id(tensor)] = memory
        self.bytes_in += nbytes
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return nbytes

    def _send_back(self, tensor: torch.Tensor) -> int:
        tensor.__class__ = torch.nn.Parameter if isinstance(tensor, _Parameter) else torch.Tensor
        memory = self._taken.pop(id(tensor))
        here = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        here.copy_(tensor.detach())
        tensor.data = here
        self._free[memory.nbytes].append(memory)
        self.bytes_back += memory.nbytes
        self.live_bytes -= memory.nbytes
        return memory.nbytes
