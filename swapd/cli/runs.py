"""`swapd runs`: the runs and comparisons of `swapd run`, and the stored settings."""

import shlex
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from swapd.cli.common import console, say_error
from swapd.cli.run_compare import FILE, listed
from swapd.cli.run_told import Kept
from swapd.run import kept
from swapd.shared import config
from swapd.shared.text import plain
from swapd.shared.units import seconds
from swapd_client.errors import SwapdError


def runs(
    last: Annotated[int, typer.Option("--lines", "-n", min=1, help="Number of runs to list")] = 20,
    forget: Annotated[
        str | None,
        typer.Option("--forget", metavar="MODEL", help="Keep no settings for this model"),
    ] = None,
) -> None:
    """List the runs of `swapd run`: their time, duration and swaps.

    Lists comparisons with their tables, and then the settings stored for models.
    """
    if forget is not None:
        _forget(forget)
        return
    folder = config.state_folder() / "runs"
    found = sorted([*folder.glob("*/run.json"), *folder.glob(f"*/{FILE}")])[-last:]
    if not found:
        console.print("no run is kept; start one with: swapd run -- COMMAND")
    for path in found:
        if path.name == FILE:
            listed(path)
        else:
            _listed(path)
    for model, one in kept.all_of(config.state_folder()).items():
        console.print(
            plain(f"kept for {model}: {one.settings.options} ({one.why})"), soft_wrap=True
        )


def _listed(path: Path) -> None:
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Kept)
    except (OSError, msgspec.MsgspecError) as exc:
        say_error(f"{path} cannot be read: {exc}; remove it")
        return
    head = f"{path.parent.name}  status {run.status}, {seconds(run.took_s)}"
    console.print(plain(f"{head}  {shlex.join(run.command)}"), soft_wrap=True)
    for told in (*run.outcomes, *run.stages):
        console.print(plain(f"    {told}"), soft_wrap=True)


def _forget(named: str) -> None:
    model = kept.key_of(named)
    if not kept.forget(config.state_folder(), model):
        raise SwapdError(f"no settings are kept for {model}; `swapd runs` lists the others")
    console.print(plain(f"no settings are kept for {model} any more"), soft_wrap=True)
