"""All commands, in one list."""

from collections.abc import Callable
from typing import Annotated

import typer

from swapd import __version__
from swapd.cli.bench import bench
from swapd.cli.common import guarded
from swapd.cli.components import evict, forecast, pin, resize, unpin
from swapd.cli.daemons import ps, stop
from swapd.cli.demo import demo
from swapd.cli.doctor import doctor
from swapd.cli.log import log, trace
from swapd.cli.plan import plan
from swapd.cli.replay import replay
from swapd.cli.run import run
from swapd.cli.serve import serve
from swapd.cli.status import status
from swapd.cli.top import top

_ALL: tuple[Callable[..., None], ...] = (
    *(run, serve, stop, ps, status, top, resize, pin, unpin, evict),
    *(log, trace, replay, plan, forecast, doctor, bench, demo),
)
COMMANDS = {command.__name__.strip("_"): command for command in _ALL}

EPILOG = """
Which daemon: --endpoint FOLDER, else --device, else $SWAPD_ENDPOINT, else the only one of this user
that runs; `swapd ps` lists them.

Environment: SWAPD_ENDPOINT, the folder of a daemon; SWAPD_CONFIG, a file of settings for `swapd
serve`; SWAPD_BUDGET and the like, its settings.

Exit status: 0 for success; 1 for a failure, with the reason on stderr in one line; 2
for a usage error; 130 after Ctrl-C.

Examples: `swapd serve --device cuda:0 --budget 40GiB`; `swapd status`; `swapd log -f`; `swapd plan
./FLUX.1-dev --device-memory 24GiB`; `swapd stop`. Each command has --help of its own.
"""

app = typer.Typer(
    name="swapd",
    help="Let the stages of a multi-stage model take turns on one device.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # as a manual page: paragraphs are filled, and pipes work
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


#: The words after the first argument belong to another command line.
_RUNS_ANOTHER = {"allow_interspersed_args": False}

for _name, _command in COMMANDS.items():
    _about = (_command.__doc__ or "").partition("\n")[0]
    _settings = _RUNS_ANOTHER if _command is run else {}
    app.command(_name, short_help=_about, context_settings=_settings)(  # else click cuts it
        guarded(_command)
    )
