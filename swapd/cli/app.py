"""All commands, in one list."""

from collections.abc import Callable
from typing import Annotated

import typer

from swapd import __version__
from swapd.cli.bench import bench
from swapd.cli.common import guarded
from swapd.cli.demo import demo
from swapd.cli.doctor import doctor
from swapd.cli.forecast import forecast
from swapd.cli.log import log
from swapd.cli.plan import plan
from swapd.cli.resize import resize
from swapd.cli.serve import serve
from swapd.cli.status import status

COMMANDS: dict[str, Callable[..., None]] = {
    "serve": serve,
    "status": status,
    "resize": resize,
    "log": log,
    "plan": plan,
    "forecast": forecast,
    "doctor": doctor,
    "bench": bench,
    "demo": demo,
}

app = typer.Typer(
    name="swapd",
    help="Let the stages of a multi-stage model take turns on one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"swapd {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it")
    ] = False,
) -> None:
    """Let the stages of a multi-stage model take turns on one device."""


for _name, _command in COMMANDS.items():
    app.command(_name)(guarded(_command))
