"""`swapd trace`: a run of the swap log as a trace for Perfetto."""

from pathlib import Path
from typing import Annotated

import typer

from swapd.cli.common import TIMEOUT_S, Endpoint, Timeout
from swapd.cli.log import File, Since, swap_log
from swapd.cli.target import Device, where
from swapd.log.reader import last_run, read
from swapd.log.trace import rendered

Out = Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The file to write")]


def trace(
    output: Out = Path("trace.json"),
    endpoint: Endpoint = None,
    device: Device = None,
    file: File = None,
    since: Since = None,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Write the swap log as a trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

    A track for each component, for the copies of each direction, and for each session's waits and
    leases; of the daemon that ran last.
    """
    folder = None if file else str(where(endpoint, device, timeout))
    lines = last_run(read(swap_log(folder, file, timeout)))
    with output.open("wb") as written:
        written.writelines(rendered((line.record for line in lines), since or 0.0))
    typer.echo(f"{output}: open it in https://ui.perfetto.dev")
