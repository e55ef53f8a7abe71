"""Direct driver calls for the probes: memory, timing, work for the GPU, faults in children.

`Gpu` adds to `swapd.device.driver.Driver` calls that only the probes need.
"""

import array
import ctypes
import importlib.util
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

from benchmarks.gpu_check.settings import GIB, MIB, ROOT, Settings
from swapd.device.driver import Access, Driver
from swapd.shared import vm


class Gpu(Driver):
    """The GPU of `settings`, its context current in this thread for good."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.index)
        self.settings = settings
        self.call(self.api.cuCtxSetCurrent, self._context)
        self.main = self.stream()

    def alloc(self, nbytes: int) -> int:
        """Ordinary device memory, as from cudaMalloc."""
        return int(self.call(self.api.cuMemAlloc, nbytes))

    def dealloc(self, address: int) -> None:
        self.call(self.api.cuMemFree, address)

    def fill(self, address: int, nbytes: int, value: int, stream: Any = None) -> None:
        """Enqueue a memset; without a stream, also wait for it."""
        self.call(self.api.cuMemsetD8Async, address, value, nbytes, stream or self.main)
        if stream is None:
            self.finish(self.main)

    def read(self, address: int, nbytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(nbytes)
        self.call(self.api.cuMemcpyDtoH, ctypes.addressof(buffer), address, nbytes)
        return buffer.raw

    def copy_in(self, target: int, source: int, nbytes: int, piece: int = 0) -> None:
        """Copy in pieces, on the main stream, and wait."""
        for at in range(0, nbytes, piece or nbytes):
            length = min(piece or nbytes, nbytes - at)
            self.copy_to_device(target + at, source + at, length, self.main)
        self.finish(self.main)

    def free_bytes(self) -> int:
        return self.memory()[0]

    @property
    def has_kernels(self) -> bool:
        """Whether torch can run kernels on it."""
        if self.settings.stub or importlib.util.find_spec("torch") is None:
            return False
        import torch

        return torch.cuda.is_available()


class Mapped:
    """Chunks of device memory, mapped in one range read-write. Free them with `close`."""

    def __init__(self, gpu: Gpu, chunk_bytes: int, count: int) -> None:
        self.gpu = gpu
        self.chunk_bytes = chunk_bytes
        self.nbytes = chunk_bytes * count
        self.handles = [gpu.create(chunk_bytes) for _ in range(count)]
        self.address = gpu.reserve(self.nbytes)
        self.map()

    def map(self, access: Access = Access.READ_WRITE) -> None:
        for i, handle in enumerate(self.handles):
            self.gpu.map(self.address + i * self.chunk_bytes, self.chunk_bytes, handle)
        self.gpu.set_access(self.address, self.nbytes, access)

    def unmap(self) -> None:
        for i in range(len(self.handles)):
            self.gpu.unmap(self.address + i * self.chunk_bytes, self.chunk_bytes)

    def close(self) -> None:
        self.unmap()
        for handle in self.handles:
            self.gpu.release(handle)
        self.gpu.free(self.address, self.nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Memfd:
    """A memfd, mapped here, as host copies are. `writable`: of the mapping."""

    def __init__(self, nbytes: int, *, present: bool = True, writable: bool = True) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("gpu-check")
        os.ftruncate(self.fd, nbytes)
        if present or not writable:
            # the first write through any mapping makes the memfd's pages
            whole = mmap.mmap(self.fd, nbytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
            vm.populate(address, nbytes, writable=True)
        self.address = vm.map_shared(self.fd, 0, nbytes, writable=writable)
        if present:
            vm.populate(self.address, nbytes, writable=writable)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        vm.free(self.address, self.nbytes)
        os.close(self.fd)


@contextmanager
def pinned(gpu: Gpu, nbytes: int) -> Iterator[int]:
    """Page-locked memory that is a memfd, as host copies are; its address."""
    with Memfd(nbytes) as memory:
        for at in range(0, nbytes, GIB):
            gpu.pin(memory.address + at, min(GIB, nbytes - at), writable=True)
        try:
            yield memory.address
        finally:
            for at in range(0, nbytes, GIB):
                gpu.unpin(memory.address + at)


# --- time --------------------------------------------------------------------------------


def seconds(what: Callable[[], object]) -> float:
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


def chain(*steps: Callable[[], object]) -> Callable[[], None]:
    """All of them, one after the other, as one step to be timed."""

    def run() -> None:
        for step in steps:
            step()

    return run


def median_s(what: Callable[[], object], times: int) -> float:
    """The median over `times` runs, after one that does not count."""
    what()
    return statistics.median(seconds(what) for _ in range(times))


class Pair(NamedTuple):
    """Median seconds of two steps done in turn."""

    first_s: float
    second_s: float


def in_turn(first: Callable[[], object], second: Callable[[], object], times: int) -> Pair:
    """Do both, one after the other, `times` times, so that drift affects both alike."""
    chain(first, second)()
    one, other = [], []
    for _ in range(times):
        one.append(seconds(first))
        other.append(seconds(second))
    return Pair(statistics.median(one), statistics.median(other))


# --- work for the GPU --------------------------------------------------------------------


class Busy:
    """Work that keeps the GPU busy for a while, on a stream of its own.

    Matrix products by torch if it can run them; else fills, which are the driver's own.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._stream = gpu.stream()
        self._unit_s = 0.0
        self.what = "matrix products" if gpu.has_kernels else "memory fills"
        self._one = self._products() if gpu.has_kernels else self._fills()
        self._one()
        self.wait()
        self._unit_s = max(seconds(chain(self._one, self.wait)), 1e-6)

    def _products(self) -> Callable[[], None]:
        import torch

        device = torch.device("cuda", self.gpu.index)
        self._torch_stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream = self._torch_stream.cuda_stream
        # long enough that a queue of them, which the driver bounds, is a second of work
        x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        out = torch.empty_like(x)

        def one() -> None:
            with torch.cuda.stream(self._torch_stream):
                torch.mm(x, x, out=out)

        return one

    def _fills(self) -> Callable[[], None]:
        nbytes = 8 * MIB
        address = self.gpu.alloc(nbytes)
        return lambda: self.gpu.fill(address, nbytes, 1, self._stream)

    def enqueue(self, wanted_s: float) -> None:
        """Queue work for about so long; does not wait for it."""
        for _ in range(max(int(wanted_s / self._unit_s), 1)):
            self._one()

    def wait(self) -> None:
        self.gpu.call(self.gpu.api.cuStreamSynchronize, self._stream)

    def running(self) -> bool:
        result, *_ = self.gpu.api.cuStreamQuery(self._stream)
        return bool(result.name == "CUDA_ERROR_NOT_READY")


# --- other processes ---------------------------------------------------------------------


class Child:
    """Another process that runs `module` of this package, with a socket to it."""

    def __init__(self, module: str, settings: Settings, *arguments: object) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", f"benchmarks.gpu_check.{module}"]
            self.process = subprocess.Popen(
                [*command, settings.encode(), str(number), *map(str, arguments)],
                cwd=ROOT,
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def tell(self, text: str, *fds: int) -> None:
        """Send a line, with descriptors if there are any, which the caller still owns."""
        send(self.socket, text, *fds)

    def hear(self) -> tuple[str, list[int]]:
        """Its next line, "" when it has ended, and the descriptors with it."""
        return receive(self.socket)

    def ask(self, text: str, *fds: int) -> str:
        self.tell(text, *fds)
        return self.hear()[0]


def send(sock: socket.socket, text: str, *fds: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([text.encode()], rights)


def receive(sock: socket.socket) -> tuple[str, list[int]]:
    try:
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 64)
    except ConnectionResetError:
        return "", []
    return data.decode(), fds


def adopted(gpu: Gpu, fd: int, nbytes: int, access: Access = Access.READ_WRITE) -> int:
    """Import the chunk behind `fd`, which is closed, and map it; return the address."""
    handle = gpu.adopt(fd)
    os.close(fd)
    address = gpu.reserve(nbytes)
    gpu.map(address, nbytes, handle)
    gpu.set_access(address, nbytes, access)
    gpu.release(handle)
    return address
