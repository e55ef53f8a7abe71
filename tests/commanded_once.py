"""To be imported by a process that forks: what typer imports at a first command it has imported
then, pydantic among it, and what it makes of the commands it has made."""

from typing import Any

import typer

from swapd.cli.app import app

_make = typer.main.get_command
_swapd = _make(app)
_serve = _swapd.get_command(typer.Context(_swapd), "serve")  # type: ignore[attr-defined]
_serve.make_context("serve", ["--budget", "1MiB"])


def _made(of: typer.Typer) -> Any:
    return _swapd if of is app else _make(of)


vars(typer.main)["get_command"] = _made
