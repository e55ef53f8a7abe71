"""The table of all commands. A process imports only the modules of the command that it runs."""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Annotated

import typer

from swapd import __version__
from swapd.cli.common import guarded

#: The module of each command, in the order of `swapd --help`.
COMMANDS = {
    "run": "run",
    "serve": "serve",
    "stop": "daemons",
    "upgrade": "daemons",
    "ps": "daemons",
    "status": "status",
    "top": "top",
    "resize": "components",
    "pin": "components",
    "unpin": "components",
    "evict": "components",
    "forget": "components",
    "log": "log",
    "trace": "log",
    "replay": "replay",
    "plan": "plan",
    "forecast": "components",
    "doctor": "doctor",
    "bench": "bench",
    "demo": "demo",
}

EPILOG = """
Which daemon: --endpoint FOLDER, else --device, else $SWAPD_ENDPOINT, else the only one of this user
that runs; `swapd ps` lists them.

Environment: SWAPD_ENDPOINT, the folder of a daemon; SWAPD_CONFIG, a file of settings for `swapd
serve`; SWAPD_BUDGET and the like, its settings.

Exit status: 0 for success; 1 for a failure, with the reason on stderr in one line; 2
for a usage error; 130 after Ctrl-C, which ends `serve` and `top` in order, with 0.

Examples: `swapd serve --device cuda:0 --budget 40GiB`; `swapd status`; `swapd log -f`; `swapd plan
./FLUX.1-dev --device-memory 24GiB`; `swapd stop`. Each command has --help of its own.
"""


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"swapd {__version__}")
        raise typer.Exit


def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print it")
    ] = False,
) -> None:
    """Let the stages of a multi-stage model take turns on one device."""


def app_for(words: list[str]) -> typer.Typer:
    return app_of(words[:1]) if words and words[0] in COMMANDS else app_of()


def app_of(names: Iterable[str] = COMMANDS) -> typer.Typer:
    app = typer.Typer(
        name="swapd",
        help=_main.__doc__,
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # as in a manual page: paragraphs are filled, and pipes work
        epilog=EPILOG,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_main)
    for name in names:
        command = command_of(name)
        about = (command.__doc__ or "").partition("\n")[0]
        # the words after the first argument of `run` belong to another command line
        settings = {"allow_interspersed_args": False} if name == "run" else {}
        app.command(name, short_help=about, context_settings=settings)(  # click would cut it
            guarded(command)
        )
    return app


def command_of(name: str) -> Callable[..., None]:
    command: Callable[..., None] = getattr(import_module(f"swapd.cli.{COMMANDS[name]}"), name)
    return command
