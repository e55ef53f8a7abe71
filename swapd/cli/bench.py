"""`swapd bench`: measure, and show the figures beside the project's bounds."""

import sys
from typing import Annotated

import typer
from rich.table import Table

from swapd import bench as suite
from swapd.bench import Raw, Report
from swapd.cli.common import Json, console, errors, print_json, say_error
from swapd.shared.units import seconds, size

Device = Annotated[str, typer.Option(help="What to swap onto: host, or a GPU, as in cuda:0")]


def bench(device: Device = "host", json: Json = False) -> None:
    """Measure what swapd costs on this machine, beside what it is compared with.

    Takes about a minute, 1.5 GiB of memory, and 0.5 GiB of disk. On the host it needs torch.
    """
    try:
        with errors.status("Measuring") as status:
            report = suite.run(lambda what: status.update(what), device)
    except ModuleNotFoundError as exc:
        say_error(f"{exc.name} is missing; pip install 'swapd[daemon,torch]'")
        sys.exit(1)
    if json or not console.is_terminal:
        print_json(report)
    else:
        console.print(_table(report))


def _table(report: Report) -> Table:
    table = Table(title=f"swapd bench on {report.device}", title_justify="left")
    for heading in ("what", "figure", "bound", "both sides"):
        table.add_column(heading, justify="right" if heading in ("figure", "bound") else "left")
    sides = _sides(report.raw)
    for key, side, bound in suite.BOUNDS:
        if key == "swap_in_ratio" and report.device != "host":
            bound = suite.GPU_SWAP_IN
        value = getattr(report, key)
        if value is None:
            continue
        holds = value >= bound if side == "at least" else value <= bound
        figure = f"[{'green' if holds else 'red'}]{value:.4g}[/]"
        table.add_row(key, figure, f"{side} {bound:g}", sides[key])
    return table


def _sides(raw: Raw) -> dict[str, str]:
    """The figures behind each key, for people."""
    swap, leaks, load, blocks = raw.swap_in, raw.leaks, raw.load, raw.stream
    streamed = blocks and {
        "stream_ratio": f"streamed {seconds(blocks.stream_s)}, alone {seconds(blocks.alone_s)} "
        f"({blocks.blocks} blocks of {seconds(blocks.block_s)})",
        "stream_peak_blocks": f"{size(blocks.block_bytes)} each; "
        + ", ".join(f"{n:.3g} copied with {kept} kept" for kept, n in blocks.copied.items()),
    }
    hooked = raw.hooked and {
        "hooks_share": f"forward {seconds(raw.hooked.bare_s)}, attached "
        f"{seconds(raw.hooked.whole_s)}, streamed {seconds(raw.hooked.streamed_s)}",
    }
    core = {
        "swap_in_ratio": f"swap {seconds(swap.swap_s)}, copy {seconds(swap.copy_s)} "
        f"({size(swap.nbytes)}, {swap.copy_threads} threads)",
        "bytes_back": f"{size(swap.bytes_in)} in",
        "hit_rtt_ratio": f"hit {seconds(raw.hit.hit_s)}, two round trips "
        f"{seconds(raw.hit.two_round_trips_s)}",
        "decode_share": f"acquire {seconds(raw.decode.acquire_s)}, release "
        f"{seconds(raw.decode.release_s)} in a step of {seconds(raw.decode.step_s)}",
        "handle_us": f"{raw.handle.components} components, {raw.handle.waiters} waiters",
        "handle_busy_us": f"{raw.handle_busy.components} components, "
        f"{raw.handle_busy.waiters} waiters",
        "fd_growth": f"{leaks.swaps} swaps",
        "rss_growth_bytes": f"daemon {size(leaks.daemon_rss_bytes)}, "
        f"worker {size(leaks.worker_rss_bytes)}; idle: {leaks.idle_wakeups_per_s:.2g} wake-ups/s",
        "load_speed_ratio": f"load {seconds(load.load_s)}, read {seconds(load.read_s)} "
        f"({size(load.nbytes)})",
        "load_memory_ratio": f"{size(load.peak_bytes)} at most",
    }
    return core | (streamed or {}) | (hooked or {})
