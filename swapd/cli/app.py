"""All commands, and what they share: how errors end, and how clients find the daemon."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from swapd import __version__
from swapd.cli.serve import serve
from swapd.config import ConfigError
from swapd.device import DeviceError
from swapd.runtime_dir import RuntimeDirError
from swapd_client.errors import SwapdError

app = typer.Typer(
    name="swapd",
    help="Let the stages of a multi-stage model take turns on one device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: Where to find the daemon, for every command that asks one.
Endpoint = Annotated[
    str | None,
    typer.Option("--endpoint", "-e", help="Runtime folder of the daemon, else $SWAPD_ENDPOINT"),
]
Json = Annotated[bool, typer.Option("--json", help="JSON for scripts")]

console = Console()
errors = Console(stderr=True)

#: What users can cause and mend: one line, no traceback.
_EXPECTED = (ConfigError, DeviceError, RuntimeDirError, SwapdError, OSError)


@contextmanager
def plain_errors() -> Iterator[None]:
    """End with one clear line where the user can help it, with a traceback where we can."""
    try:
        yield
    except _EXPECTED as exc:
        errors.print(f"[red]swapd:[/] {exc}", highlight=False, soft_wrap=True)
        sys.exit(1)


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        with plain_errors():
            command(*args, **kwargs)

    return guarded


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


app.command("serve")(_guarded(serve))
