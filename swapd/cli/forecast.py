"""`swapd forecast`: the effect of acquiring components now."""

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from swapd.cli.common import TIMEOUT_S, Endpoint, Json, Timeout, ask, console, print_json
from swapd.cli.target import Device
from swapd.shared.protocol import ForecastReply
from swapd.shared.text import plain
from swapd.shared.units import rate, seconds, size

Names = Annotated[list[str], typer.Argument(help="Components, acquired together")]


def forecast(
    names: Names,
    endpoint: Endpoint = None,
    device: Device = None,
    json: Json = False,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Predict the loads, evictions and wait of an acquire. Changes nothing."""
    with ask(endpoint, "forecast", timeout, device) as client:
        reply = client.forecast(*names, timeout=timeout)
    if json:
        print_json(reply)
    else:
        console.print(page(names, reply))


def page(names: list[str], reply: ForecastReply) -> Table:
    """The answer for people, for the components `names`."""
    table = Table.grid(padding=(0, 2), expand=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("acquire", Text(plain(" + ".join(names))))
    table.add_row("copies in", _copies(reply))
    table.add_row("evicts", _victims(reply))
    if reply.bytes_back:
        table.add_row("writes back", size(reply.bytes_back))
    table.add_row("waits for", _waits(reply))
    table.add_row("takes", _takes(reply))
    return table


def _copies(reply: ForecastReply) -> str:
    parts = [size(reply.bytes_in)] if reply.bytes_in else []
    parts += [f"{size(reply.bytes_coming)} on the way already"] if reply.bytes_coming else []
    if reply.victims:
        return ", ".join(parts) or "nothing: it comes in as zeros"
    return ", ".join(parts) or "nothing: it is in, or comes in as zeros"


def _victims(reply: ForecastReply) -> Text:
    if not reply.victims:
        return Text("nothing" if reply.at_once else "depends on who gives way")
    families: dict[str, list[int]] = {}
    for v in reply.victims:
        families.setdefault(v.part_of or v.name, []).append(v.nbytes)
    return Text(
        plain(
            ", ".join(
                f"{name} ({size(sum(parts))}{f' in {len(parts)} parts' if len(parts) > 1 else ''})"
                for name, parts in families.items()
            )
        )
    )


def _waits(reply: ForecastReply) -> Text:
    if reply.at_once:
        return Text("nobody", "green")
    return Text("\n".join(plain(f"{way.name}: {way.why}") for way in reply.waits_for), "yellow")


def _takes(reply: ForecastReply) -> str:
    if reply.seconds is None:
        return "not known: nothing was swapped in yet"
    took = "0 s" if not reply.seconds else f"about {seconds(reply.seconds)}"
    if reply.bytes_per_s and reply.seconds:
        took += f", at the {rate(reply.bytes_per_s)} measured"
    return took if reply.at_once else f"{took}, once these waits are over"
