"""The command line. Without the `daemon` extra only `--version` and `--help` work."""

import io
import os
import sys

from swapd import __version__
from swapd.shared.config import DISABLE_VARIABLE
from swapd.shared.extras import extra_of

INTERRUPTED = 130

HELP = """\
usage: swapd [--version] [--help] COMMAND ...

Let the stages of a multi-stage model take turns on one device.
"""


def main() -> None:
    for stream in (sys.stdout, sys.stderr):  # show "?" for a character it cannot encode
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ.pop(DISABLE_VARIABLE, None)  # noqa: TID251 - commands are about a daemon
    try:
        from swapd.cli.app import app_for

        app = app_for(sys.argv[1:])
    except KeyboardInterrupt:  # imports take most of a second on a busy machine
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as exc:
        if extra_of(exc) != "daemon":
            raise
        missing = str(exc.name)
    else:
        try:
            app(prog_name="swapd")  # explicit, as `python -m swapd` needs the name for completion
        except OSError as exc:  # of --help and --version, where nothing can be written
            sys.exit(f"swapd: {exc}")
        return
    _say_without(missing, sys.argv[1:])


def _say_without(missing: str, arguments: list[str]) -> None:
    install = f"{missing} is missing; install the daemon: pip install 'swapd[daemon]'"
    match arguments:
        case ["--version"]:
            print(f"swapd {__version__}")  # noqa: T201
        case [] | ["--help" | "-h"]:
            print(f"{HELP}\n{install}")  # noqa: T201
        case _:
            sys.exit(f"swapd: {install}")
