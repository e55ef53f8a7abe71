"""Imported by a process that forks, so that first commands are quick in its children.

They inherit typer's late imports (pydantic among them), and the command objects made here.
"""

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
