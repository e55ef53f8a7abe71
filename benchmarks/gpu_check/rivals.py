"""The same model swapped in three ways: swapd, vLLM's sleep and wake (level 1), and `module.to()`.

The last one uses pinned memory. In a turn one model leaves the GPU and another one of its size
enters. Each way has both models, takes the same turns, and is measured in the same rounds as the
others.
"""

import importlib.util
import statistics
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import torch

import swapd_client
from benchmarks.gpu_check import torchish
from benchmarks.gpu_check.raw import Gpu, chain, seconds
from benchmarks.gpu_check.rig import chunks_of, room_for, serving
from benchmarks.gpu_check.rows import Check, spread
from benchmarks.gpu_check.settings import GIB, MIB, Settings
from benchmarks.gpu_check.torchish import Stack
from swapd.bench import swap_in
from swapd.device.driver import Access
from swapd_client import Client

LAYERS = 16


class Way(Protocol):
    """A way to swap. `come(i)` ends when model i can be used; `leave(i)` when its memory is free.

    `note` describes the way.
    """

    name: str
    note: str

    def come(self, model: int) -> None: ...
    def leave(self, model: int) -> None: ...


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    torchish.start(settings)
    nbytes = room_for(settings, settings.swap_bytes, of=4.5, host_copies=7)
    with ExitStack() as stack:
        ways: list[Way] = []
        for make in (_swapd, _sleep_and_wake, _module_to):
            with check.part(make.__name__.strip("_").replace("_", " ")):
                ways.append(make(settings, nbytes, stack))
        _rows(check, settings, nbytes, ways)


def _rows(check: Check, settings: Settings, nbytes: int, ways: list[Way]) -> None:
    outs: list[list[float]] = [[] for _ in ways]
    ins: list[list[float]] = [[] for _ in ways]
    for way in ways:
        way.come(0)
    for number in range(settings.rounds + 1):
        here, there = number % 2, (number + 1) % 2
        for way, out, into in zip(ways, outs, ins, strict=True):
            out.append(seconds(partial(way.leave, here)))
            into.append(seconds(partial(way.come, there)))
    base = 0.0
    for way, out, into in zip(ways, outs, ins, strict=True):
        turns = [a + b for a, b in zip(out[1:], into[1:], strict=True)]
        turn = statistics.median(turns)
        base = base or turn
        note = (
            f"{turn / base:.3g} times swapd's; out {spread(out[1:], 1e3)}, "
            f"in {spread(into[1:], 1e3)} ms; {way.note}"
        )
        check.row(f"a turn of {nbytes / GIB:.3g} GiB, by {way.name}", turn * 1e3, "ms", note)


# --- swapd -------------------------------------------------------------------------------


class Swapd:
    """No work to leave: the other's acquire makes room."""

    name = "swapd"
    note = "clean: nothing is copied out; addresses stay; other processes take part"

    def __init__(self, client: Client) -> None:
        self._client = client

    def come(self, model: int) -> None:
        self._client.acquire(f"model {model}").release()

    def leave(self, model: int) -> None:
        pass


def _swapd(settings: Settings, nbytes: int, stack: ExitStack) -> Way:
    daemon = stack.enter_context(serving(settings, chunks_of(nbytes, settings)))
    client = stack.enter_context(swapd_client.connect(daemon.folder, label="gpu-check"))
    way = Swapd(client)
    for number in range(2):
        model = Stack(settings, nbytes, LAYERS, number)
        torchish.register(client, settings, f"model {number}", model)
    swap_in.until_pinned(client, 2 * nbytes, chain(partial(way.come, 0), partial(way.come, 1)))
    return way


# --- sleep and wake ----------------------------------------------------------------------


class Vllm:
    """vLLM's own allocator. It puts all its memory to sleep at once, so it has one model.

    The next stage's model would be in another process, and cost the same.
    """

    name = "vLLM's sleep and wake, level 1"
    note = "vLLM's CuMemAllocator itself; copied out and in; addresses stay; one process"

    def __init__(self, settings: Settings, nbytes: int) -> None:
        from vllm.device_allocator.cumem import CuMemAllocator

        self._allocator = CuMemAllocator.get_instance()
        with self._allocator.use_memory_pool(tag="weights"):
            self._model = Stack(settings, nbytes, LAYERS, 0)
        self.leave(0)

    def come(self, model: int) -> None:
        self._allocator.wake_up()

    def leave(self, model: int) -> None:
        self._allocator.sleep(offload_tags=("weights",))


class Technique:
    """The steps of vLLM's level 1, with the driver's calls.

    Each allocation is copied to pinned memory, unmapped and freed; then allocated and mapped again
    at its address and copied in. The pinned memory is kept, as torch's host allocator keeps it.
    """

    name = "sleep and wake, as vLLM's level 1 does it"
    note = "the technique, made again (vLLM is not installed); copied out and in; one process"

    def __init__(self, settings: Settings, nbytes: int, stack: ExitStack) -> None:
        self._gpu = Gpu(settings)
        #: One allocation for each layer, as torch's allocator asks for large ones.
        self._each = max(nbytes // LAYERS // (2 * MIB), 1) * 2 * MIB
        self._host = self._gpu.allocate_pinned(self._each * LAYERS * 2)
        stack.callback(self._gpu.free_pinned, self._host)
        self._addresses = [[self._gpu.reserve(self._each) for _ in range(LAYERS)] for _ in range(2)]
        self._handles: dict[int, int] = {}
        stack.callback(self._free)

    def come(self, model: int) -> None:
        for address in self._addresses[model]:
            handle = self._handles[address] = self._gpu.create(self._each)
            self._gpu.map(address, self._each, handle)
            self._gpu.set_access(address, self._each, Access.READ_WRITE)
        for number, address in enumerate(self._addresses[model]):
            self._gpu.copy_to_device(
                address, self._place(model, number), self._each, self._gpu.main
            )
        self._gpu.finish(self._gpu.main)

    def leave(self, model: int) -> None:
        for number, address in enumerate(self._addresses[model]):
            self._gpu.copy_to_host(self._place(model, number), address, self._each, self._gpu.main)
        self._gpu.finish(self._gpu.main)
        for address in self._addresses[model]:
            self._gpu.unmap(address, self._each)
            self._gpu.release(self._handles.pop(address))

    def _place(self, model: int, number: int) -> int:
        return self._host + (model * LAYERS + number) * self._each

    def _free(self) -> None:
        for address, handle in self._handles.items():
            self._gpu.unmap(address, self._each)
            self._gpu.release(handle)


def _sleep_and_wake(settings: Settings, nbytes: int, stack: ExitStack) -> Way:
    if importlib.util.find_spec("vllm") is not None and not settings.stub:
        return Vllm(settings, nbytes)
    return Technique(settings, nbytes, stack)


# --- module.to() -------------------------------------------------------------------------


class ModuleTo:
    """Weights copied between the GPU's allocator and pinned memory that is kept."""

    name = "module.to() with pinned memory"
    note = "nothing is copied out, its pinned copy is kept; new addresses each time; one process"

    def __init__(self, settings: Settings, nbytes: int) -> None:
        self._settings = settings
        self._device = torchish.device_of(settings)
        self._models = [Stack(settings, nbytes, LAYERS, number) for number in range(2)]
        self._pinned = [[self._pin(p) for p in model.parameters()] for model in self._models]
        for number in range(2):
            self.leave(number)

    def come(self, model: int) -> None:
        for weight, host in zip(self._models[model].parameters(), self._pinned[model], strict=True):
            weight.data = host.to(self._device, non_blocking=True, copy=True)
        torchish.synchronize(self._settings)

    def leave(self, model: int) -> None:
        for weight, host in zip(self._models[model].parameters(), self._pinned[model], strict=True):
            weight.data = host

    def _pin(self, weight: torch.Tensor) -> torch.Tensor:
        host = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=not self._settings.stub)
        return host.copy_(weight)


def _module_to(settings: Settings, nbytes: int, stack: ExitStack) -> Way:
    return ModuleTo(settings, nbytes)
