"""`swapd bench`: measure, and hold the figures against the project's bounds."""

import sys

import msgspec
from rich.console import Console
from rich.table import Table

from swapd.cli.common import Json, console, errors, say_error
from swapd.units import seconds, size


def bench(json: Json = False) -> None:
    """Measure what swapd costs on this machine, beside what it is compared with.

    Takes about 20 seconds and 1.5 GiB of memory. Needs torch. Ends with status 1 if a
    bound is missed.
    """
    try:
        from swapd import bench as suite

        with errors.status("Measuring") as status:
            report = suite.run(lambda what: status.update(what))
    except ModuleNotFoundError as exc:
        say_error(f"{exc.name} is missing; pip install 'swapd[daemon,torch]'")
        sys.exit(1)
    if json or not console.is_terminal:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())  # noqa: T201
        return
    _show(console, report)
    if not all(_holds(report, *bound) for bound in suite.BOUNDS):
        sys.exit(1)


def _holds(report: object, key: str, side: str, bound: float) -> bool:
    value = getattr(report, key)
    return bool(value >= bound if side == "at least" else value <= bound)


def _show(console: Console, report: object) -> None:
    from swapd.bench import BOUNDS, Report

    assert isinstance(report, Report)
    table = Table(title="swapd bench", title_justify="left")
    for heading in ("what", "figure", "bound", "both sides"):
        table.add_column(heading, justify="right" if heading in ("figure", "bound") else "left")
    for key, side, bound in BOUNDS:
        colour = "green" if _holds(report, key, side, bound) else "red"
        figure = f"[{colour}]{getattr(report, key):.4g}[/]"
        table.add_row(key, figure, f"{side} {bound:g}", _sides(report, key))
    console.print(table)


def _sides(report: object, key: str) -> str:
    """The raw figures behind a key, for people."""
    raw = getattr(report, "raw")  # noqa: B009 - a dict of structs, one for each measurement
    swap, hit, leaks = raw["swap_in"], raw["hit"], raw["leaks"]
    return {
        "swap_in_ratio": f"swap {seconds(swap.swap_s)}, copy {seconds(swap.copy_s)} "
        f"({size(swap.nbytes)}, {swap.copy_threads} threads)",
        "bytes_back": f"{size(swap.bytes_in)} in",
        "hit_rtt_ratio": f"hit {seconds(hit.hit_s)}, two round trips "
        f"{seconds(hit.two_round_trips_s)}",
        "handle_us": "10 components, 10 waiters",
        "handle_busy_us": "100 components, 1,000 waiters",
        "fd_growth": f"{leaks.swaps} swaps",
        "rss_growth_bytes": f"daemon {size(leaks.daemon_rss_bytes)}, "
        f"worker {size(leaks.worker_rss_bytes)}; idle: {leaks.idle_wakeups_per_s:.2g} wake-ups/s",
    }[key]
