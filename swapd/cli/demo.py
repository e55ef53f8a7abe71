"""`swapd demo`: the demo, its swap log, and its summary."""

import os
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from swapd.cli.common import Json, console, errors, print_json
from swapd.cli.log import LOOK_S, LogView
from swapd.cli.target import connected
from swapd.log.history import Filter
from swapd.log.reader import Tail
from swapd.shared.extras import needed
from swapd.shared.units import seconds, size


def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Number of runs of the pipeline")] = 3,
    prompt: Annotated[str, typer.Option(help="Prompt for the thinker")] = "What do you hear?",
    wav: Annotated[Path, typer.Option(help="File for the resulting sound")] = Path(
        "swapd-demo.wav"
    ),
    json: Json = False,
) -> None:
    """Run a real Qwen2.5-Omni architecture on a device that cannot hold its three stages.

    Thinker, talker and token2wav have reduced configurations and random weights. Each runs in a
    process of its own, first without swapd and then with it, and every output is compared bit for
    bit. Takes about half a minute and 2 GiB of memory; downloads nothing.
    """
    is_new = not wav.exists()
    wav.open("ab").close()  # what refuses it is known before the work
    if is_new:
        wav.resolve().unlink()  # it may be interrupted
    with needed("swapd demo"):
        if find_spec("transformers") is None:  # only the processes of the stages import it
            raise ModuleNotFoundError(name="transformers")
        from swapd.demo import run as run_demo

    say = errors if json else console
    summary = run_demo.run(
        os.fsencode(prompt),
        rounds,
        wav,
        say=lambda text: say.print(text, style="bold"),
        watch=(lambda folder: None) if json else _scroll,
    )
    if json:
        print_json(summary)
    else:
        _show(summary, wav)
    if not summary.bit_identical:
        sys.exit(1)


def _scroll(folder: Path) -> None:
    with connected(folder, "demo") as client:
        tail = Tail(Path(client.status().swap_log))

    def follow() -> None:
        view = LogView(Filter())
        while True:
            view.show(tail.read())
            time.sleep(LOOK_S)

    threading.Thread(target=follow, name="swap-log", daemon=True).start()


def _show(summary: "run_demo.Summary", wav: Path) -> None:  # type: ignore[name-defined]  # noqa: F821
    s = summary
    verdict = ("bit-identical", "green") if s.bit_identical else ("NOT identical", "red")
    saved = 1 - s.peak_bytes / s.sum_bytes
    console.print()
    console.print(Text.assemble("Outputs of every stage, with and without swapd: ", verdict))
    console.print(
        f"Peak device memory {size(s.peak_bytes)} of {size(s.sum_bytes)} ({saved:.0%} less), "
        f"budget {size(s.budget_bytes)}\n"
        f"{s.evictions} evictions, {s.loads} loads, {size(s.bytes_in)} copied in, "
        f"{size(s.bytes_out)} copied back\n"
        f"{seconds(s.wait_seconds)} of {seconds(s.total_seconds)} spent waiting for swaps; "
        f"sound in {wav}"
    )
