"""Three stages start on one simulated GPU, and vLLM computes the size of each KV cache.

Run it in a process of its own, because it patches vLLM's classes. The worker classes and all of
vLLM's arithmetic are real; the GPU and its allocator are numbers.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.gpu_worker import Worker as VllmWorker
from vllm_omni.worker.base import OmniGPUWorkerBase

from swapd.plan.shares import CONTEXT_BYTES, GpuPlan, GpuShare, utilization
from swapd_client.vllm.omni import ARWorker, GenerationWorker
from swapd_client.vllm.worker import Worker

MIB = 1 << 20

#: Beside its weights, each stage has buffers, a peak while it is profiled, and memory of kernels
#: that is not torch's.
BUFFERS = 96 * MIB
PEAK = 700 * MIB
KERNELS = 130 * MIB

CLASSES = {"thinker": ARWorker, "talker": Worker, "code2wav": GenerationWorker}


class Gpu:
    """The memory of a GPU, and its users."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.arena = 0
        #: The memory of processes other than the one that measures.
        self.others = 0
        self.torch = self.peak = self.context = 0

    @property
    def free(self) -> int:
        return self.total - self.arena - self.others - self.torch - self.context

    def begin(self) -> None:
        """Another process measures from now on."""
        self.others += self.torch + self.context
        self.torch = self.peak = 0
        self.context = CONTEXT_BYTES

    def allocate(self, nbytes: int) -> None:
        self.torch += nbytes
        self.peak = max(self.peak, self.torch)
        assert self.free >= 0, "out of memory"

    def seen(self, patched: Any) -> None:
        """Have torch report these numbers."""
        patched.memory_stats = lambda _: {
            "allocated_bytes.all.peak": self.peak,
            "allocated_bytes.all.current": self.torch,
        }
        patched.get_memory_info = lambda _: (self.free, self.total)
        patched.memory_reserved = lambda _: self.torch
        patched.empty_cache = lambda: None
        patched.reset_peak_memory_stats = lambda _: setattr(self, "peak", self.torch)


class Stage:
    """Changes the memory of a GPU as `swapd_client.vllm.stage.Stage` does."""

    def __init__(self, gpu: Gpu, weights: int) -> None:
        self.gpu = gpu
        self.weights = weights
        self.memory = self

    @contextlib.contextmanager
    def loading(self, nbytes: int) -> Iterator[None]:
        self.gpu.arena -= nbytes
        yield
        self.gpu.arena += nbytes

    def take(
        self, models: object, outside: object, aliases: object, *, beside: int, content: None
    ) -> int:
        self.gpu.torch -= self.weights
        return self.weights

    using = contextlib.nullcontext
    options = SimpleNamespace(kv="private", streams=[])
    #: Of a daemon that keeps nothing.
    client = SimpleNamespace(status=lambda: SimpleNamespace(keep_host_bytes=0))


class WeightMove:
    """Plays `swapd_client.vllm.weight_move.WeightMove` without a model."""

    def move(self, models: object, take: Callable[..., int], *of_models: object) -> int:
        return take({}, ())

    def warn_of_rest(self, read: int | None, moved: int) -> None: ...

    warn_of_more = warn_of_rest


class Runner:
    """A model runner that loads and is profiled."""

    model_memory_usage = 0

    def __init__(self, gpu: Gpu, weights: int) -> None:
        self.gpu = gpu
        self.weights = weights

    def load_model(self, *args: object) -> None:
        self.gpu.allocate(self.weights + BUFFERS)
        self.model_memory_usage = self.weights + BUFFERS

    def profile_run(self) -> None:
        self.gpu.context += KERNELS
        self.gpu.allocate(PEAK)
        self.gpu.torch -= PEAK

    def get_model(self) -> object:
        return None


def start(gpu: Gpu, share: GpuShare) -> int:
    """Start a stage; returns the bytes of its KV cache, which is in the arena."""
    gpu.begin()
    used = utilization(share.room_bytes, gpu.total)
    kind: Any = CLASSES[share.name]
    worker = kind.__new__(kind)
    worker.init_snapshot = MemorySnapshot(device="cpu")
    worker.requested_memory = int(gpu.total * used)
    worker.cache_config = SimpleNamespace(
        kv_cache_memory_bytes=share.cache_bytes or None, gpu_memory_utilization=used
    )
    worker.local_rank = worker.rank = 0
    worker.model_runner = Runner(gpu, share.weights_bytes)
    worker.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        model_config=None,
        load_config=SimpleNamespace(load_format="dummy"),
    )
    worker.model_config = SimpleNamespace(multimodal_config=None)
    worker.parallel_config = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    worker.get_draft_model = lambda: None
    worker._swapd = stage = Stage(gpu, share.weights_bytes)
    worker._moving = WeightMove()
    with stage.memory.loading(share.weights_bytes):
        worker._load(share.name)
    kv_cache = int(worker.determine_available_memory())
    gpu.allocate(PEAK)  # a request as large as in the profile
    gpu.torch -= PEAK
    return kv_cache


def run(plan: GpuPlan) -> dict[str, Any]:
    """The KV cache of each stage, and the free memory after all starts."""
    gpu = Gpu(plan.total_bytes)
    gpu.arena, gpu.others = plan.budget_bytes, CONTEXT_BYTES
    gpu.seen(torch.accelerator)
    return {"kv_cache": {s.name: start(gpu, s) for s in plan.shares}, "free": gpu.free}


def run_all(plans: str) -> list[dict[str, Any]]:
    """`run` of each plan, given as JSON."""
    for above in (OmniGPUWorkerBase, VllmWorker):
        above.load_model = lambda self, *args, **kwargs: self.model_runner.load_model()
    return [run(plan) for plan in msgspec.json.decode(plans, type=list[GpuPlan])]
