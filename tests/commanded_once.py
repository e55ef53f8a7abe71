"""Imported by a process that forks, so that first commands are quick in its children.

They inherit typer's late imports (pydantic among them), and the command objects made here.
"""

from typing import Any

import typer

from swapd.cli import app

_make = typer.main.get_command
_all = app.app_of()
_swapd = _make(_all)
_serve = _swapd.get_command(typer.Context(_swapd), "serve")  # type: ignore[attr-defined]
_serve.make_context("serve", ["--budget", "1MiB"])


def _made(of: typer.Typer) -> Any:
    return _swapd if of is _all else _make(of)


vars(typer.main)["get_command"] = _made
vars(app)["app_for"] = lambda words: _all
