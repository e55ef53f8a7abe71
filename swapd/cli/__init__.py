"""The command line. Needs the `daemon` extra; without it there are `--version` and `--help`."""

import sys

from swapd import __version__
from swapd.shared.extras import extra_of

HELP = """\
usage: swapd [--version] [--help] COMMAND ...

Let the stages of a multi-stage model take turns on one device.

  serve     Own a device and serve its memory to workers, until SIGTERM.
  status    Show what is on the device, who holds it, and how much was moved.
  resize    Keep so much of a component on the device; the rest passes through it, block by block.
  log       Show the swap log: what moved, when, and what for.
  plan      Say what to keep on a device, what to stream, what to swap, and what it costs.
  forecast  Say what acquiring components would do now. Changes nothing.
  doctor    Check what this machine offers. Ends with status 1 if something needed is missing.
  bench     Measure what swapd costs on this machine, beside what it is compared with.
  demo      Run a real Qwen2.5-Omni architecture on a device that cannot hold its three stages.
"""


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
    _say_without(missing, sys.argv[1:])


def _say_without(missing: str, arguments: list[str]) -> None:
    """What can be said without `missing`."""
    install = f"{missing} is missing; install the daemon: pip install 'swapd[daemon]'"
    match arguments:
        case ["--version"]:
            print(f"swapd {__version__}")  # noqa: T201
        case [] | ["--help" | "-h"]:
            print(f"{HELP}\n{install}")  # noqa: T201
        case _:
            sys.exit(f"swapd: {install}")
