"""`swapd bench`: the costs of swapd, each with its baseline.

Every measurement runs both sides in turn and reports medians: the machine's speed drifts, the ratio
does not. `machine.py` watches the machine, and figures of a busy machine are not judged.
"""

from collections.abc import Callable
from importlib.util import find_spec

import msgspec

from swapd.bench import core, decode, hit, hooks, leaks, load, streaming, swap_in
from swapd.bench.bounds import judge
from swapd.bench.machine import Machine
from swapd.bench.report import Judged, Measurements, Report
from swapd.shared.units import size

__all__ = ["FULL", "QUICK", "Extent", "Judged", "Measurements", "Report", "run"]


class Extent(msgspec.Struct, frozen=True):
    """The extent of the measurements. Sizes are bytes."""

    #: Rounds of swap cycles in the search for leaks, and cycles of each.
    leak_rounds: int = leaks.ROUNDS
    leak_cycles: int = leaks.CYCLES
    leak_bytes: int = leaks.NBYTES
    swap_bytes: int = swap_in.NBYTES
    swap_rounds: int = swap_in.ROUNDS
    hit_blocks: int = hit.BLOCKS
    decode_steps: int = decode.STEPS
    hook_rounds: int = hooks.ROUNDS
    core_events: int = core.EVENTS
    stream_rounds: int = streaming.ROUNDS
    stream_block_s: float = streaming.BLOCK_S
    load_bytes: int = load.NBYTES
    load_rounds: int = load.ROUNDS
    #: Judge the counts, but not the times.
    too_short: bool = False


FULL = Extent()
#: Every line runs and every count is right; the times have too few rounds.
QUICK = Extent(
    leak_bytes=4 << 20,
    swap_bytes=16 << 20,
    swap_rounds=3,
    hit_blocks=2,
    decode_steps=20,
    hook_rounds=1,
    core_events=2_000,
    stream_rounds=1,
    stream_block_s=0.005,
    load_bytes=32 << 20,
    load_rounds=1,
    too_short=True,
)


def run(say: Callable[[str], None], device: str = "host", extent: Extent = FULL) -> Report:
    """Measure everything; takes about a minute. `say` gets the name of each measurement.

    Raises: ModuleNotFoundError before it measures anything, on the host without torch.
    """
    if device == "host" and find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    machine = Machine()
    # first: later it would count garbage and late descriptors of the other measurements
    say(f"{extent.leak_rounds * extent.leak_cycles} swap cycles: descriptors, memory; then idle")
    leak = machine.watch(
        "leaks",
        lambda: leaks.measure(device, extent.leak_rounds, extent.leak_cycles, extent.leak_bytes),
    )
    nbytes = extent.swap_bytes
    if device != "host" and not extent.too_short:
        nbytes = swap_in.GPU_NBYTES
    say(f"Swap-in of {size(nbytes)} against a plain copy")
    swap = machine.watch("swap_in", lambda: swap_in.measure(device, nbytes, extent.swap_rounds))
    say("A resident component against bare round trips")
    rtt = machine.watch("hit", lambda: hit.measure(device, extent.hit_blocks))
    say("A decode loop")
    loop = machine.watch("decode", lambda: decode.measure(device, extent.decode_steps))
    say("Hooks around a model that fits")
    hooked = None
    if device == "host":
        with streaming.one_thread():
            hooked = machine.watch("hooked", lambda: hooks.measure(extent.hook_rounds))
    say("The core alone")
    quiet = machine.watch("handle", lambda: core.measure(10, 10, extent.core_events))
    busy = machine.watch("handle_busy", lambda: core.measure(100, 1000, extent.core_events))
    blocks = None
    if device == "host":
        say("A component streamed block by block")
        blocks = machine.watch(
            "stream", lambda: streaming.measure(extent.stream_rounds, extent.stream_block_s)
        )
    say(f"Loading {size(extent.load_bytes)} of safetensors against reading them")
    loaded = machine.watch(
        "load", lambda: load.measure(device, extent.load_bytes, extent.load_rounds)
    )
    raw = Measurements(swap, rtt, loop, quiet, busy, leak, loaded, blocks, hooked)
    report = _report(raw, machine, device)
    return msgspec.structs.replace(report, judged=judge(report, too_short=extent.too_short))


def _report(raw: Measurements, machine: Machine, device: str) -> Report:
    leak, blocks, hooked = raw.leaks, raw.stream, raw.hooked
    return Report(
        swap_in_ratio=raw.swap_in.ratio,
        bytes_back=raw.swap_in.bytes_back,
        hit_rtt_ratio=raw.hit.ratio,
        decode_share=raw.decode.share,
        handle_us=raw.handle.mean_us,
        handle_busy_us=raw.handle_busy.mean_us,
        fd_growth=max(leak.daemon_fds, leak.worker_fds),
        rss_growth_bytes=max(leak.daemon_rss_bytes, leak.worker_rss_bytes),
        load_speed_ratio=raw.load.speed_ratio,
        load_memory_ratio=raw.load.memory_ratio,
        raw=raw,
        machine=machine.surroundings(),
        device=device,
        stream_ratio=blocks.ratio if blocks else None,
        stream_peak_blocks=blocks.peak_blocks if blocks else None,
        hooks_share=max(hooked.whole_share, hooked.streamed_share) if hooked else None,
    )
