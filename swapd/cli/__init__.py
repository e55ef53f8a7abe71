"""The command line. Needs the `daemon` extra; says so when it is missing."""

import sys


def main() -> None:
    """The entry point of `swapd`."""
    try:
        from swapd.cli.app import app
    except ModuleNotFoundError as exc:
        if exc.name not in ("typer", "rich", "uvloop"):
            raise
        sys.exit(f"swapd: {exc.name} is missing; install the daemon: pip install 'swapd[daemon]'")
    app()
