"""`--version` and `--help` of an install that lacks the `daemon` extra.

The commands are declared with typer, and import rich. Here stand-ins take their places for as long
as the declarations are read, so that there is one list of commands and of options. Nothing is run.
"""

import argparse
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, get_args, get_origin

from swapd import __version__

_ABOUT = "Let the stages of a multi-stage model take turns on one device."


def main(arguments: Sequence[str], missing: str) -> None:
    """Say what `arguments` ask of swapd itself; without `missing` nothing else can be done."""
    install = f"{missing} is missing; install the daemon: pip install 'swapd[daemon]'"
    asks = {"-h", "--help"}
    if arguments and arguments[0] == "--version":
        _say(f"swapd {__version__}")
    elif not arguments or arguments[0] in asks:
        _say(_all(_commands(), install))
    elif asks.isdisjoint(arguments):
        sys.exit(f"swapd: {install}")
    elif (command := _commands().get(arguments[0])) is None:
        sys.exit(f"swapd: there is no command {arguments[0]!r}; see swapd --help")
    else:
        _say(_one(arguments[0], command, install))


def _say(text: str) -> None:
    try:
        print(text, flush=True)  # noqa: T201
    except BrokenPipeError:  # `swapd --help | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


class _Declared:
    """Whatever is made with typer or rich: its arguments."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments = arguments
        self.named = named

    def __getattr__(self, name: str) -> Callable[..., Callable[[Any], Any]]:
        return lambda *_, **__: lambda function: function  # app.command("status")(status)


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> type[_Declared]:
        return type(name, (_Declared,), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ("typer", "rich"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _commands() -> dict[str, Callable[..., None]]:
    sys.meta_path.insert(0, _StandIns())
    from swapd.cli.app import COMMANDS

    return COMMANDS


def _all(commands: dict[str, Callable[..., None]], install: str) -> str:
    width = max(map(len, commands)) + 2
    lines = [f"  {n.ljust(width)}{_text(c).splitlines()[0]}" for n, c in commands.items()]
    return "\n".join(
        ["usage: swapd [--version] [--help] COMMAND ...", "", _ABOUT, "", *lines, "", install]
    )


def _one(name: str, command: Callable[..., None], install: str) -> str:
    parser = argparse.ArgumentParser(
        f"swapd {name}",
        description=_text(command),
        epilog=install,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for parameter in inspect.signature(command).parameters.values():
        _add(parser, parameter)
    return parser.format_help().rstrip()


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter) -> None:
    kind, declared = parameter.annotation, parameter.default
    if get_origin(kind) is not None and (found := getattr(kind, "__metadata__", ())):
        kind, declared = get_args(kind)[0], found[0]
    flags = [a for a in declared.arguments if isinstance(a, str)]
    about = str(declared.named.get("help", "")).replace("%", "%%")
    if type(declared).__name__ == "Argument":
        parser.add_argument(parameter.name, nargs="*", help=about)
        return
    flags = flags or [f"--{parameter.name.replace('_', '-')}"]
    if kind is bool:
        parser.add_argument(*flags, action="store_true", help=about)
    else:
        parser.add_argument(*flags, help=about)


def _text(command: Callable[..., None]) -> str:
    return inspect.getdoc(command) or ""
