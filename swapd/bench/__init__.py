"""`swapd bench`: what swapd costs, each figure beside what it is compared with.

Every measurement takes both sides in turn in one run and reports medians: the machine's
speed drifts, the ratio does not.
"""

from collections.abc import Callable

import msgspec

from swapd.bench import core, decode, hit, hooks, leaks, load, streaming, swap_in
from swapd.shared.units import size


class Raw(msgspec.Struct, frozen=True):
    """The figures of both sides of each measurement."""

    swap_in: swap_in.SwapIn
    hit: hit.Hit
    decode: decode.Decode
    handle: core.Handle
    handle_busy: core.Handle
    leaks: leaks.Leaks
    load: load.Load
    #: On the host alone, which can be told how slow to be.
    stream: streaming.Streaming | None = None
    hooked: hooks.Hooks | None = None


class Report(msgspec.Struct, frozen=True):
    """What `swapd bench --json` prints."""

    #: Speed of a swap-in, call to grant, over that of a plain copy (above 1: faster):
    #: `torch.Tensor.copy_` on the host, one from pinned memory on a GPU.
    swap_in_ratio: float
    #: Bytes copied back to the host for clean components.
    bytes_back: int
    #: Acquire and release of a resident component over two bare round trips.
    hit_rtt_ratio: float
    #: What acquire and release at every step add to a loop of 5 ms a step.
    decode_share: float
    #: Mean microseconds of `Residency.handle`: 10 components and 10 waiters; 100 and 1,000.
    handle_us: float
    handle_busy_us: float
    #: After 1,000 swap cycles, the larger of daemon and worker.
    fd_growth: int
    rss_growth_bytes: int
    #: Speed of loading a safetensors file, call to acquirable, over that of reading it; and the
    #: most host memory meanwhile, over the file's bytes.
    load_speed_ratio: float
    load_memory_ratio: float
    raw: Raw
    device: str = "host"
    #: A pass over 16 blocks whose copies take as long as they compute, over computing alone; and
    #: the most that was on the device, in blocks. None: not measured.
    stream_ratio: float | None = None
    stream_peak_blocks: float | None = None
    #: What hooks add to a forward that finds all of the model there, of 16 blocks of 1 ms: of one
    #: that is a component, or of one that is streamed, whichever is more.
    #: None: not measured.
    hooks_share: float | None = None


#: Bounds the project holds itself to: key, whether it may not be less or not be more, value.
BOUNDS: tuple[tuple[str, str, float], ...] = (
    ("swap_in_ratio", "at least", 0.80),  # GPU_SWAP_IN there
    ("bytes_back", "at most", 0),
    ("hit_rtt_ratio", "at most", 1.5),
    ("decode_share", "at most", 0.01),
    ("hooks_share", "at most", 0.01),
    ("handle_us", "at most", 30),
    ("handle_busy_us", "at most", 100),
    ("fd_growth", "at most", 0),
    ("rss_growth_bytes", "at most", 2 << 20),
    ("stream_ratio", "at most", 1.15),
    ("stream_peak_blocks", "at most", 3),
    ("load_speed_ratio", "at least", 0.80),
    ("load_memory_ratio", "at most", 1.15),
)

#: The bound of the first on a GPU, whose copies cost the host nothing.
GPU_SWAP_IN = 0.95


def run(say: Callable[[str], None], device: str = "host") -> Report:
    """Measure everything; takes about a minute. `say` hears what is being measured."""
    # first: what the others leave to be collected, or open late, is not counted here
    say("1,000 swap cycles: descriptors, memory; then an idle daemon")
    leak = leaks.measure(device)
    nbytes = swap_in.NBYTES if device == "host" else swap_in.GPU_NBYTES
    say(f"Swap-in of {size(nbytes)} against a plain copy")
    swap = swap_in.measure(device, nbytes)
    say("A resident component against bare round trips")
    rtt = hit.measure(device)
    say("A decode loop")
    loop = decode.measure(device)
    say("Hooks around a model that fits")
    hooked = hooks.measure() if device == "host" else None
    say("The core alone")
    quiet, busy = core.measure(10, 10), core.measure(100, 1000)
    blocks = None
    if device == "host":
        say("A component streamed block by block")
        blocks = streaming.measure()
    say(f"Loading {size(load.NBYTES)} of safetensors against reading them")
    loaded = load.measure(device)
    return Report(
        swap_in_ratio=swap.ratio,
        bytes_back=swap.bytes_back,
        hit_rtt_ratio=rtt.ratio,
        decode_share=loop.share,
        handle_us=quiet.mean_us,
        handle_busy_us=busy.mean_us,
        fd_growth=max(leak.daemon_fds, leak.worker_fds),
        rss_growth_bytes=max(leak.daemon_rss_bytes, leak.worker_rss_bytes),
        load_speed_ratio=loaded.speed_ratio,
        load_memory_ratio=loaded.memory_ratio,
        raw=Raw(swap, rtt, loop, quiet, busy, leak, loaded, blocks, hooked),
        device=device,
        stream_ratio=blocks.ratio if blocks else None,
        stream_peak_blocks=blocks.peak_blocks if blocks else None,
        hooks_share=max(hooked.whole_share, hooked.streamed_share) if hooked else None,
    )
