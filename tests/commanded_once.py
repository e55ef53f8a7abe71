"""To be imported by a process that forks: what typer imports at a first command it has imported
then, pydantic among it."""

import typer

from swapd.cli.app import app

_swapd = typer.main.get_command(app)
_serve = _swapd.get_command(typer.Context(_swapd), "serve")  # type: ignore[attr-defined]
_serve.make_context("serve", ["--budget", "1MiB"])
