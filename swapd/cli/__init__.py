"""The command line. Needs the `daemon` extra; without it there are `--version` and `--help`."""

import sys

from swapd.extras import extra_of


def main() -> None:
    """The entry point of `swapd`."""
    try:
        from swapd.cli.app import app
    except ModuleNotFoundError as exc:
        if extra_of(exc) != "daemon":
            raise
        missing = str(exc.name)
    else:
        app()
        return
    from swapd.cli import plainly

    plainly.main(sys.argv[1:], missing)
