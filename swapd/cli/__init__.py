"""The command line. Needs the `daemon` extra; without it there are `--version` and `--help`."""

import io
import os
import sys

from swapd import __version__
from swapd.shared.config import DISABLE_VARIABLE
from swapd.shared.extras import extra_of

HELP = """\
usage: swapd [--version] [--help] COMMAND ...

Let the stages of a multi-stage model take turns on one device.

  run       Run a command with the daemons that it needs, which end when it ends.

  serve     Own a device and serve its memory to workers, until SIGTERM.
  stop      Tell a daemon to stop (SIGTERM), and return when its process has ended.
  ps        List this user's daemons on this machine, wherever their folders are.

  status    Show the components on the device, their holders, and the bytes moved.
  top       Watch a device live, full-screen: components, waiters and copies.
  resize    Keep part of a component on the device, and stream the rest block by block.

  pin       Keep a component on the device: load it when there is room, and do not evict it.
  unpin     Allow the eviction of a pinned component again.
  evict     Evict an idle component at once, and save changes to it.

  log       Show the swap log: loads, evictions and waits, with their causes.
  trace     Write the swap log as a trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.
  replay    Run the daemon's last recorded run again, under other settings.

  plan      Plan which components to keep on a device, stream or swap, and the costs.
  forecast  Predict the loads, evictions and wait of an acquire. Changes nothing.

  doctor    Check this machine. Ends with status 1 if a required part is missing.
  bench     Measure the costs of swapd on this machine, and those of alternatives.
  demo      Run a real Qwen2.5-Omni architecture on a device that cannot hold its three stages.
"""


def main() -> None:
    for stream in (sys.stdout, sys.stderr):  # a stream that cannot show a character shows a "?"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ.pop(DISABLE_VARIABLE, None)  # noqa: TID251 - commands are about a daemon
    try:
        from swapd.cli.app import app
    except ModuleNotFoundError as exc:
        if extra_of(exc) != "daemon":
            raise
        missing = str(exc.name)
    else:
        app(prog_name="swapd")  # also for `python -m swapd`: completion needs the name
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
