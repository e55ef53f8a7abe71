"""`swapd resize`: set the resident size of a streamed component."""

from typing import Annotated

import typer

from swapd.cli.common import TIMEOUT_S, Endpoint, Timeout, ask, console
from swapd.cli.families import fold
from swapd.cli.target import Device
from swapd.shared.text import plain
from swapd.shared.units import parse_size

AUTO = "auto"


def resize(
    name: Annotated[str, typer.Argument(help="A component with parts")],
    amount: Annotated[
        str,
        typer.Argument(metavar="SIZE", help=f"Size to keep, as in 5.6GiB; {AUTO}: all that fits"),
    ],
    endpoint: Endpoint = None,
    device: Device = None,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Keep part of a component on the device, and stream the rest block by block."""
    try:
        nbytes = None if amount == AUTO else parse_size(amount)
    except ValueError as exc:
        raise typer.BadParameter(f"{exc}, or {AUTO}") from exc
    with ask(endpoint, "resize", timeout, device) as client:
        client.resize(name, nbytes, timeout=timeout)
        reply = client.status(timeout=timeout)
    for family in fold(reply.components):
        if family.streamed and family.name == name:
            console.print(f"{plain(name)}: {family.keeps}", markup=False)
