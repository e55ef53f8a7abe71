"""The result of `swapd bench`."""

from typing import Literal

import msgspec

from swapd.bench import core, decode, hit, hooks, leaks, load, streaming, swap_in
from swapd.bench.machine import Surroundings


class Measurements(msgspec.Struct, frozen=True):
    """The figures of both sides of each measurement."""

    swap_in: swap_in.SwapIn
    hit: hit.Hit
    decode: decode.Decode
    handle: core.Handle
    handle_busy: core.Handle
    leaks: leaks.Leaks
    load: load.LoadTimes
    #: On the host device only, which has a configurable bandwidth.
    stream: streaming.StreamTimes | None = None
    hooked: hooks.HookCosts | None = None


class Judged(msgspec.Struct, frozen=True):
    """A figure and its bound on this machine."""

    side: Literal["at least", "at most"]
    bound: float
    verdict: Literal["ok", "failed", "not judged"]
    #: The reason if it is not judged.
    why: str = ""


class Report(msgspec.Struct, frozen=True):
    """The output of `swapd bench --json`."""

    #: Speed of a swap-in, call to grant, over that of a plain copy (above 1: faster):
    #: `torch.Tensor.copy_` on the host, one from pinned memory on a GPU.
    swap_in_ratio: float
    #: Bytes copied back to the host for clean components.
    bytes_back: int
    #: Acquire and release of a resident component over two bare round trips.
    hit_rtt_ratio: float
    #: Share that acquire and release add to a loop of 5 ms a step.
    decode_share: float
    #: Mean microseconds of `Residency.handle`: 10 components and 10 waiters; 100 and 1,000.
    handle_us: float
    handle_busy_us: float
    #: Descriptors that a round of swap cycles leaves open, and memory growth over all rounds: the
    #: larger of daemon and worker.
    fd_growth: float
    rss_growth_bytes: int
    #: Speed of loading a safetensors file, call to acquirable, over that of reading it; and peak
    #: host memory over the file's bytes.
    load_speed_ratio: float
    load_memory_ratio: float
    raw: Measurements
    machine: Surroundings
    device: str = "host"
    #: A pass over 16 blocks whose copies take as long as their computing, over computing alone; and
    #: the peak on the device, in blocks. None: not measured.
    stream_ratio: float | None = None
    stream_peak_blocks: float | None = None
    #: Share that hooks add to a forward of a resident model, of 16 blocks of 1 ms: the larger of a
    #: whole component and a streamed one. None: not measured.
    hooks_share: float | None = None
    #: By the name of the figure.
    judged: dict[str, Judged] = {}
