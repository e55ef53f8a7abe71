"""`swapd resize`: how much of a component that is streamed stays on the device."""

from typing import Annotated

import typer

from swapd.cli.common import TIMEOUT_S, Endpoint, Timeout, ask, console
from swapd.cli.families import Family, fold
from swapd.shared.text import plain
from swapd.shared.units import parse_size

AUTO = "auto"


def resize(
    name: Annotated[str, typer.Argument(help="A component that was registered in parts")],
    amount: Annotated[
        str, typer.Argument(metavar="SIZE", help=f"As 5.6GiB; {AUTO}: as much as has room")
    ],
    endpoint: Endpoint = None,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Keep so much of a component on the device; the rest passes through it, block by block."""
    try:
        nbytes = None if amount == AUTO else parse_size(amount)
    except ValueError as exc:
        raise typer.BadParameter(f"{exc}, or {AUTO}") from exc
    with ask(endpoint, "resize", timeout) as client:
        client.resize(name, nbytes, timeout=timeout)
        reply = client.status(timeout=timeout)
    for family in fold(reply.components):
        if isinstance(family, Family) and family.name == name:
            console.print(f"{plain(name)}: {family.keeps}", markup=False)
