"""`swapd bench`: measure, and show each figure beside its bound."""

import sys
from typing import Annotated

import typer
from msgspec import structs
from rich.table import Table
from rich.text import Text

from swapd import bench as suite
from swapd.bench import Measurements, Report
from swapd.bench.core import Handle
from swapd.bench.machine import REFERENCE_US
from swapd.cli.common import Json, console, errors, print_json
from swapd.shared.extras import needed
from swapd.shared.units import seconds, size

Device = Annotated[str, typer.Option(help="Device to swap onto: host, or a GPU, as in cuda:0")]
Quick = Annotated[bool, typer.Option("--quick", help="Few rounds; only counts are judged")]

FAILED, NOT_JUDGED = 1, 3
_COLOURS = {"ok": "green", "failed": "bold red", "not judged": "yellow"}


def bench(device: Device = "host", quick: Quick = False, json: Json = False) -> None:
    """Measure the costs of swapd on this machine, and those of alternatives.

    Ends with status 1 if a figure is beyond its bound. Ends with 3 if no figure is, but some could
    not be judged because the machine was busy. Takes about a minute and a half, 1.5 GiB of memory,
    and 0.5 GiB of disk. On the host it needs torch.
    """
    with needed("swapd bench"), errors.status("Measuring") as status:
        report = suite.run(status.update, device, quick=quick)
    if json:
        shown = structs.asdict(report)
        print_json({**shown.pop("figures"), **shown})
    else:
        console.print(_table(report))
        console.print(_notes(report))
    if code := exit_code(report):
        sys.exit(code)


def exit_code(report: Report) -> int:
    verdicts = {judged.verdict for judged in report.judged.values()}
    if "failed" in verdicts:
        return FAILED
    return NOT_JUDGED if "not judged" in verdicts else 0


def _table(report: Report) -> Table:
    table = Table(title=f"swapd bench on {report.device}", title_justify="left")
    for heading in ("measurement", "figure", "bound", "", "both sides"):
        table.add_column(heading, justify="right" if heading in ("figure", "bound") else "left")
    sides = _sides(report.raw)
    for key, judged in report.judged.items():
        verdict = Text(judged.verdict, _COLOURS[judged.verdict])
        figure = Text(f"{report.figures[key]:.4g}", verdict.style)
        told = Text.assemble(sides[key], (f"\n{judged.why}" if judged.why else "", "yellow"))
        table.add_row(key, figure, f"{judged.side} {judged.bound:.4g}", verdict, told)
    return table


def _notes(report: Report) -> Text:
    machine, unjudged = report.machine, [j for j in report.judged.values() if j.why]
    lines = [
        f"A pass of a plain loop took {machine.loop_us:.3g} us at best, {REFERENCE_US:g} us where "
        "the bounds in microseconds were set: they are as many passes here."
    ]
    lines += [f"Not known here: {what}." for what in machine.not_probed]
    if unjudged:
        lines.append(f"{len(unjudged)} of {len(report.judged)} figures could not be judged.")
    return Text("\n".join(lines))


def _sides(raw: Measurements) -> dict[str, str]:
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
        "handle_us": _handled(raw.handle),
        "handle_busy_us": _handled(raw.handle_busy),
        "fd_growth": f"a round of {leaks.cycles} cycles; {leaks.swaps} swaps in all",
        "rss_growth_bytes": f"daemon {size(leaks.daemon_rss_bytes)}, "
        f"worker {size(leaks.worker_rss_bytes)}; idle: {leaks.idle_wakeups_per_s:.2g} wake-ups/s",
        "load_speed_ratio": f"load {seconds(load.load_s)}, read {seconds(load.read_s)} "
        f"({size(load.nbytes)})",
        "load_memory_ratio": f"{size(load.peak_bytes)} at most",
    }
    return core | (streamed or {}) | (hooked or {})


def _handled(found: Handle) -> str:
    return (
        f"{found.components} components, {found.waiters} waiters; "
        f"{found.mean_us / found.loop_us:.3g} passes of a plain loop, {found.loop_us:.3g} us each"
    )
