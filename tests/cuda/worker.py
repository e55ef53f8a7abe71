"""A worker process on a GPU: `tests.guarantees.worker`, with bytes that the CPU cannot read.

Its "compute" is copies within GPU memory, on named streams. A test can hold them back
(`cuMemcpyDtoDAsync hold async`), and they fault like kernels where they may not read or write.
"""

import ctypes
import gc
import os
import resource
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swapd.device.context import Context
from swapd.device.driver import Driver
from swapd_client import lease
from swapd_client.leases import cache
from swapd_client.session.gpu import streams
from tests.guarantees import worker
from tests.guarantees.worker import digest, pattern
from tests.sleeping import more_sleeps, sleeps

MIB = 1 << 20
#: Writes to memory that others had, without end.
KERNEL = Path(__file__).parent / "programs" / "kernel.py"


class GpuWorker(worker.Worker):
    """A method for each command, in addition to the base's."""

    def __init__(self) -> None:
        super().__init__()
        self._driver: Driver | None = None
        self._streams: dict[str, Any] = {}
        #: The copies that work has made: address and size, by stream or by name.
        self._results: dict[str, tuple[int, int]] = {}
        self._taken: list[Any] = []

    @property
    def driver(self) -> Driver:
        if self._driver is None:
            self._driver = Driver.by_uuid(self.client.session.welcome.uuid)
        return self._driver

    def _register(self, name: str, data: bytearray | memoryview, options: dict[str, Any]) -> None:
        self._parts[name] = self.client.register(name, {"data": data}, **options)

    def _show(self, name: str) -> None:
        """The CPU cannot see it."""

    def register_tensor(self, name: str, nbytes: int, *, seed: int = 0, **options: Any) -> str:
        """As the base, but its tensor is on the CPU, which can reach the memory of the fake GPU."""
        from swapd_client.memory import dlpack

        dlpack.gpu = lambda index: dlpack.HOST
        return super().register_tensor(name, nbytes, seed=seed, **options)

    def register_from_gpu(self, name: str, *sizes: int) -> tuple[str, int]:
        """Register tensors of so many bytes that are on the GPU; return the digest of the
        component, and the peak of this process's additional host memory meanwhile.
        """
        import torch

        from swapd_client.memory import dlpack
        from swapd_client.memory.layout import ALIGN_BYTES

        class OnGpu(torch.nn.Parameter):
            is_cuda = True

        dlpack.gpu = lambda index: dlpack.HOST
        whole, tensors = bytearray(), {}
        for number, nbytes in enumerate(sizes):
            with self.driver.current():
                address = int(self.driver.call(self.driver.api.cuMemAlloc, nbytes))
            self._store(address, data := pattern(number, nbytes))
            there = dlpack.bytes_at(address, nbytes, dlpack.HOST)
            tensors[f"t{number}"] = OnGpu(there, requires_grad=False)
            whole += bytes(-len(whole) % ALIGN_BYTES) + data
        expected = digest(whole)
        del whole, data
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = _peak()
        self._parts[name] = self.client.register(name, tensors)
        return expected, _peak() - before

    def arrive(self, lease: str, segment: int) -> str:
        """Wait for a segment, all of one size; return its digest."""
        part = self._parts[lease]
        self._leases[lease].wait(segment)
        nbytes = part.nbytes // part.segments
        return digest(self._fetch(part.address + segment * nbytes, nbytes))

    def look(self, name: str) -> tuple[int, str]:
        """The address of the bytes, and their digest; under a lease, or at the end only."""
        part = self._parts[name]
        return part.address, digest(self._fetch(part.address, part.nbytes))

    def peek(self, name: str) -> int:
        """Have the GPU read one byte, lease or not."""
        return self._fetch(self._parts[name].address, 1)[0]

    def peek_at(self, name: str, offset: int) -> int:
        """The same at another address."""
        return self._fetch(self._parts[name].address + offset, 1)[0]

    def write(self, name: str, seed: int) -> str:
        part = self._parts[name]
        data = pattern(seed, part.nbytes)
        self._store(part.address, data)
        return digest(data)

    def use_to_write(self, name: str, seed: int) -> str:
        """Acquire, write to it, release."""
        self.acquire(name)
        written = self.write(name, seed)
        self.release(name)
        return written

    def swap_both(self, one: str, other: str, times: int) -> None:
        """Use both in turn, many times."""
        for _ in range(times):
            self.client.acquire(one).release()
            self.client.acquire(other).release()

    def write_segment(self, name: str, segment: int, seed: int) -> str:
        """Write to one segment, all of one size; return its digest."""
        part = self._parts[name]
        nbytes = part.nbytes // part.segments
        data = pattern(seed, nbytes)
        self._store(part.address + segment * nbytes, data)
        return digest(data)

    def see(self, name: str, count: int) -> list[str]:
        part = self._parts[name]
        nbytes = part.nbytes // count
        return [digest(self._fetch(part.address + i * nbytes, nbytes)) for i in range(count)]

    def work(self, name: str, *, stream: str = "s", lease: str = "", use: bool = True) -> None:
        """Queue a copy of the component on a stream; if `use`, its lease is told of the stream."""
        part = self._parts[name]
        self._copy(stream, part.address, part.nbytes)
        if use:
            self._leases[lease or name].uses(int(self._stream(stream)))

    def leave_work(self, name: str) -> None:
        """Acquire, queue a copy of it, and release before that is done."""
        self.acquire(name)
        self.work(name)
        self.release(name)

    def uses(self, lease: str, *, stream: str = "s") -> None:
        self._leases[lease].uses(int(self._stream(stream)))

    def wait_on(self, lease: str, segment: int, *, stream: str = "s") -> bool:
        """Have a stream wait for a segment; return whether the component was complete then."""
        held = self._leases[lease]
        held.wait(segment, stream=int(self._stream(stream)))
        return all(map(self.client.session.arrivals.is_complete, held._record.granted.placements))

    def work_on_segment(self, name: str, segment: int, *, stream: str = "s") -> None:
        """The same for one segment, all of one size; the stream waits for it."""
        part = self._parts[name]
        nbytes = part.nbytes // part.segments
        self._leases[name].wait(segment, stream=int(self._stream(stream)))
        self._copy(stream, part.address + segment * nbytes, nbytes)

    def step_with_work(self, name: str, steps: int) -> int:
        """A loop that acquires at every step, with work in the first; the number of streams it
        names.
        """
        streams = 0
        for step in range(steps):
            held = self.client.acquire(name)
            if not step:
                part = self._parts[name]
                self._copy("s", part.address, part.nbytes)
                held.uses(int(self._stream("s")))
            held.release()
            work: Any = held._record.work
            streams = max(streams, len(work.marks) if work else 0)
        return streams

    def decode(self, name: str, steps: int) -> None:
        """A loop that releases its lease before the work of each step is done."""
        with self._target(self._parts[name].nbytes) as target:
            for _ in range(steps):
                self._use_in_turn([name], target, self._parts[name].nbytes)

    @contextmanager
    def _target(self, nbytes: int) -> Iterator[Any]:
        """Memory to copy to."""
        api = self.driver.api
        with self.driver.current():
            target = self.driver.call(api.cuMemAlloc, nbytes)
        yield target
        with self.driver.current():
            self.driver.call(api.cuMemFree, target)

    def _use_in_turn(self, names: list[str], target: Any, nbytes: int) -> None:
        """Release each before its copy is done, and wait for the copies at the end."""
        stream, copy = self._stream("s"), self.driver.api.cuMemcpyDtoDAsync
        for name in names:
            held = self.client.acquire(name)
            with self.driver.current():
                self.driver.call(copy, target, self._parts[name].address, nbytes, stream)
            held.uses(int(stream))
            held.release()
        with self.driver.current():
            self.driver.finish(stream)

    def linger_on(self) -> None:
        """Keep leases for an hour, and hear of no hurry: nothing ends by itself in a test."""
        for module in (cache, lease):
            module.KEEP_S = module.LINGER_S = 3600.0  # type: ignore[attr-defined]

    def sleeps_of_steps(self, names: list[str], steps: int) -> dict[str, int]:
        """Use these in turn, and release each before its work is done; return how often other
        Python threads went to sleep meanwhile, by name, without those that slept throughout.
        """
        with self._target(MIB) as target:
            before = sleeps()
            for _ in range(steps):
                self._use_in_turn(names, target, MIB)
            return more_sleeps(before)

    def leave_a_kernel(self) -> int:
        """Start a process that writes to all chunks of this process, also after its end; its pid.

        It has the same descriptors. Like a kernel until the driver has ended it: the memory in its
        reach is not free.
        """
        fds = {}
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{fd}")
                if "/gpu0/" in path and path.endswith(".memory"):
                    fds[path] = fd
        command = [sys.executable, str(KERNEL), *fds.values()]
        null = subprocess.DEVNULL  # otherwise it would hold the worker's pipes
        kernel = subprocess.Popen(
            command, pass_fds=[int(fd) for fd in fds.values()], stdin=null, stdout=null, stderr=null
        )
        return kernel.pid

    def result(self, *, stream: str = "s") -> str:
        """The digest of the copy on the stream, when it is done. Blocks."""
        address, nbytes = self._results[stream]
        with self.driver.current():
            self.driver.finish(self._stream(stream))
        return digest(self._fetch(address, nbytes))

    def is_done(self, *, stream: str = "s") -> bool:
        with self.driver.current():
            return self.driver.is_idle(self._stream(stream))

    def check(self, lease: str) -> None:
        self._leases[lease].check()

    def wait_for(self, lease: str, segment: int | None = None) -> None:
        self._leases[lease].wait(segment)

    def allocate(self, nbytes: int) -> None:
        """Take GPU memory with another allocator, and keep it."""
        with self.driver.current():
            self._taken.append(self.driver.call(self.driver.api.cuMemAlloc, nbytes))

    def free(self) -> None:
        """Free the allocated memory."""
        with self.driver.current():
            for address in self._taken:
                self.driver.call(self.driver.api.cuMemFree, address)
        self._taken.clear()

    def start_as_engine(self, loads: int, keeps: int) -> list[int]:
        """In its turn to start, load in a workspace, measure, and keep a cache; return the change
        of the GPU's free memory by each of these steps.
        """
        with self.client.acquire_start():
            free = [self.measure()]
            with self.client.acquire_workspace(loads):
                self.allocate(loads)
                free.append(self.measure())
                self.free()
            while any(c.kind == "workspace" for c in self.client.status().components):
                pass
            free.append(self.measure())
            self.allocate(keeps)
            free.append(self.measure())
        return [after - before for before, after in pairwise(free)]

    def measure(self) -> int:
        """Bytes that are free on the GPU."""
        with self.driver.current():
            return self.driver.memory()[0]

    def view(self, name: str) -> None:
        self._parts[name].view("data")

    def close_and_tell(self) -> list[str]:
        """Close the client; return its warnings."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.disconnect()
        return [str(one.message) for one in caught if one.category is RuntimeWarning]

    def count_descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def allow_descriptors(self, more: int, *, at_most: int | None = None) -> None:
        """Limit this process to so many more descriptors than it has.

        `at_most`: the number by which it may raise that limit itself.
        """
        now = self.count_descriptors()
        hard = now + (more if at_most is None else at_most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (now + more, hard))

    def uses_cuda(self) -> bool:
        """Whether this process has loaded the driver."""
        return "/libcuda.so" in Path("/proc/self/maps").read_text()

    def threads(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())

    def grant_no_threads(self, prefix: str) -> None:
        """From now on threads with such a name cannot start."""
        start = threading.Thread.start

        def granted(self: threading.Thread) -> None:
            if self.name.startswith(prefix):
                raise RuntimeError("can't start new thread")
            start(self)

        threading.Thread.start = granted  # type: ignore[method-assign]

    def count_boards(self) -> int:
        """The number of sessions whose boards this process still has mapped."""
        gc.collect()
        return Path("/proc/self/maps").read_text().count("swapd-board")

    def board(self) -> int:
        """The address of the session's board."""
        return self.client.session._board.address

    def is_pinned(self, address: int) -> bool:
        """Whether host memory is registered with the driver."""
        with self.driver.current():
            return not self.driver.api.cuMemHostGetDevicePointer(address, 0)[0]

    def join_threads(self, prefix: str) -> None:
        """Wait until no thread with such a name is left."""
        for thread in threading.enumerate():
            if thread.name.startswith(prefix):
                thread.join()

    def register_blocks(self, blocks: int, nbytes: int, **options: Any) -> list[str]:
        """Register `m` block by block; return their digests."""
        from swapd_client.offload.stream import Stream

        parts = {str(i): {"data": pattern(i, nbytes)} for i in range(blocks)}
        digests = [digest(part["data"]) for part in parts.values()]
        self._blocks = self.client.register_family("m", parts, **options)
        self._passes = Stream(self.client, "m", None, [part.name for part in self._blocks])
        return digests

    def run_pass(self) -> None:
        """A pass over the blocks, with a copy of each queued on the default stream."""
        self._passes.here().enter()
        for i, part in enumerate(self._blocks):
            self._passes.here().need(i)
            self._copy("default", part.address, part.nbytes, result=str(i))
            self._passes.here().done(i)
        self._passes.here().leave()

    def blocks(self) -> list[str]:
        """The digests of the blocks; under a lease."""
        return [digest(self._fetch(part.address, part.nbytes)) for part in self._blocks]

    def results(self) -> list[str]:
        """The digests of the copies of the last pass, when all are done. Blocks."""
        with self.driver.current():
            self.driver.finish(0)
        return [digest(self._fetch(*self._results[str(i)])) for i in range(len(self._blocks))]

    # --- steps of a loop -----------------------------------------------------------------

    def work_of_torch_is_on(self, stream: str, number: int) -> None:
        """From now on torch's current stream is this one, with that number of torch's."""
        current = SimpleNamespace(cuda_stream=int(self._stream(stream)), stream_id=number)
        cuda = SimpleNamespace(current_stream=lambda _: current)
        streams._torch_on_gpu = lambda: SimpleNamespace(cuda=cuda)

    def loop(self, name: str, steps: int) -> int:
        """Use it again and again; return the number of the driver's calls, after the first two."""
        calls = 0
        called = Context.call

        def counted(self: Context, function: Any, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return called(self, function, *arguments)

        for step in range(steps + 2):
            if step == 2:
                Context.call = counted  # type: ignore[method-assign]
            self.client.acquire(name).release()
        Context.call = called  # type: ignore[method-assign]
        return calls

    def step(self, name: str, *, stream: str = "default") -> None:
        """One more step, with work; its lease is kept."""
        with self.client.acquire(name):
            self.work(name, stream=stream, use=False)

    # --- captures ------------------------------------------------------------------------

    def destroy(self, stream: str) -> None:
        """Destroy a stream, even with work on it."""
        with self.driver.current():
            self.driver.destroy_stream(self._streams.pop(stream))

    def steps_on_streams_that_go(self, name: str, steps: int) -> None:
        """A loop in which each step works on its own stream, and destroys it afterwards."""
        for step in range(steps):
            with self.client.acquire(name) as lease:
                part = self._parts[name]
                self._copy(f"of {step}", part.address, 4096)
                lease.uses(int(self._stream(f"of {step}")))
            self.destroy(f"of {step}")

    def work_and_rest(self, name: str) -> None:
        """Work on a stream under a lease that continues, and destroy the stream."""
        self.work(name, stream="gone")
        self._leases[name].rests()
        self.destroy("gone")

    def begin_capture(self, *, stream: str = "captured", mode: str = "GLOBAL") -> None:
        """Capture this thread's work on a stream into a graph. The same thread must end the
        capture.
        """
        handle, api = self._stream(stream), self.driver.api
        modes = api.CUstreamCaptureMode
        with self.driver.current():
            chosen = getattr(modes, f"CU_STREAM_CAPTURE_MODE_{mode}")
            self.driver.call(api.cuStreamBeginCapture, handle, chosen)

    def end_capture(self, *, stream: str = "captured") -> str:
        """The result of the capture: "CUDA_SUCCESS" if it is valid."""
        with self.driver.current():
            result, graph = self.driver.api.cuStreamEndCapture(self._stream(stream))
            if not result:
                self.driver.call(self.driver.api.cuGraphDestroy, graph)
        return str(result.name)

    def capture_mode(self) -> str:
        """The capture mode of this thread."""
        api = self.driver.api
        mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        before = self.driver.call(api.cuThreadExchangeStreamCaptureMode, mode)
        self.driver.call(api.cuThreadExchangeStreamCaptureMode, before)
        return str(before.name)

    # --- the GPU -------------------------------------------------------------------------

    def _stream(self, name: str) -> Any:
        if name == "default":
            return 0
        if name not in self._streams:
            with self.driver.current():
                api = self.driver.api
                blocking = name == "blocking"  # the default stream waits for it
                self._streams[name] = (
                    self.driver.call(api.cuStreamCreate, 0) if blocking else self.driver.stream()
                )
        return self._streams[name]

    def _copy(self, stream: str, address: int, nbytes: int, result: str = "") -> None:
        driver = self.driver
        with driver.current():
            target = int(driver.call(driver.api.cuMemAlloc, nbytes))
            self._results[result or stream] = target, nbytes
            driver.call(driver.api.cuMemcpyDtoDAsync, target, address, nbytes, self._stream(stream))

    def _fetch(self, address: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        memory = (ctypes.c_char * nbytes).from_buffer(data)
        with self.driver.current():
            stream = self._stream("looking")
            self.driver.copy_to_host(ctypes.addressof(memory), address, nbytes, stream)
            self.driver.finish(stream)
        return data

    def _store(self, address: int, data: bytearray) -> None:
        memory = (ctypes.c_char * len(data)).from_buffer(data)
        with self.driver.current():
            stream = self._stream("looking")
            self.driver.copy_to_device(address, ctypes.addressof(memory), len(data), stream)
            self.driver.finish(stream)


def _peak() -> int:
    """The peak of this process's host memory, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (said,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(said) << 10


if __name__ == "__main__":
    GpuWorker().serve()
