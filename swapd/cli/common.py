"""Shared by the commands: options, consoles, errors, JSON and times of day."""

import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import (
    Console,
    ConsoleOptions,
    ConsoleRenderable,
    RenderableType,
    RenderHook,
    RenderResult,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from swapd.cli import INTERRUPTED
from swapd.shared.errors import UserError
from swapd.shared.text import plain, plain_json, plain_lines
from swapd.spawn import SpawnError

Json = Annotated[bool, typer.Option("--json", help="JSON for scripts")]

#: Width without a terminal: enough for every table.
_WIDE = 200

#: How the kernel marks a folder that was removed.
_GONE = " (deleted)"

_NO_TEXT = re.compile("[\ud800-\udfff]")

T = TypeVar("T")


class _Shown:
    def __init__(self, what: ConsoleRenderable) -> None:
        self._what = what

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._what, options):
            yield segment if segment.control else Segment(plain_lines(segment.text), segment.style)


class _Harmless(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Shown(each) for each in renderables]


def _console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream is not None and stream.isatty() else _WIDE
    console = Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)
    console.push_render_hook(_Harmless())
    return console


console = _console()
errors = _console(stderr=True)


def say_error(text: str) -> None:
    """Print one line to stderr, so that it never mixes with piped output."""
    errors.print(Text.assemble(("swapd: ", "red"), plain(text)), soft_wrap=True)


def note(text: str) -> None:
    errors.print(Text(plain(f"swapd: {text}")), soft_wrap=True)


def say(text: str, style: str = "") -> None:
    console.print(Text(plain(text), style), soft_wrap=True)


def columns(
    cells: Mapping[str, Callable[[T], RenderableType]], rows: Iterable[T], left: Container[str]
) -> Table:
    """Return a table without lines. `cells`: by heading, what a column shows of a row. `left`:
    headings of the columns to align left."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in cells:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(shown(row) for shown in cells.values()))
    return table


def facts(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for what, known in rows:
        table.add_row(what, known)
    return table


def if_any(shown: Callable[[T], str], value: T | None) -> str:
    return shown(value) if value else ""


def option_of(parse: Callable[[str], object], metavar: str, about: str, *names: str) -> Any:
    """Return an option whose text `parse` reads. A ValueError of `parse` is a usage error."""

    def parsed(text: str) -> object:
        try:
            return parse(text)
        except ValueError as exc:
            raise typer.BadParameter(str(exc)) from None

    return typer.Option(*names, parser=parsed, metavar=metavar, help=about)


def show(found: T, page: Callable[[T], RenderableType], *, json: bool) -> None:
    if json:
        print_json(found)
    else:
        console.print(page(found))


def print_json(value: object) -> None:
    typer.echo(encoded_json(value))


def encoded_json(value: object) -> bytes:
    """Return JSON that is safe to show on a terminal."""
    try:
        encoded = msgspec.json.encode(value, enc_hook=int)  # msgspec encodes no subclass of int
    except UnicodeEncodeError:  # a path with invalid Unicode: escape as Python does
        text = json.dumps(msgspec.to_builtins(value, enc_hook=int), ensure_ascii=False)
        encoded = _NO_TEXT.sub(lambda found: rf"\\u{ord(found[0]):x}", text).encode()
    return shown_json(msgspec.json.format(encoded, indent=2))


def shown_json(encoded: bytes) -> bytes:
    return plain_json(encoded.decode(errors="replace")).encode()


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command: print an expected error as one line; let a bug end with its traceback.

    A parameter `daemon: ChosenDaemon` is replaced by the options of `ChosenDaemon`.
    """
    own = inspect.signature(command).parameters
    chosen = own["daemon"].annotation if "daemon" in own else None
    options = inspect.signature(chosen).parameters if chosen else {}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        try:
            if chosen:
                given["daemon"] = chosen(**{name: given.pop(name) for name in options})
            command(**given)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except BrokenPipeError:  # `swapd log | head`: the reader has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except (UserError, OSError) as exc:
            for line in _lines(exc):
                say_error(line)
            sys.exit(1)

    run.__signature__ = _joined(own, options)  # type: ignore[attr-defined]
    return run


def _lines(exc: UserError | OSError) -> list[str]:
    lines = str(exc).splitlines() if isinstance(exc, SpawnError) else [str(exc)]
    if isinstance(exc, FileNotFoundError) and os.readlink("/proc/self/cwd").endswith(_GONE):
        lines += ["the folder in which this command runs was removed: cd to another"]
    return lines


def _joined(
    own: Mapping[str, inspect.Parameter], options: Mapping[str, inspect.Parameter]
) -> inspect.Signature:
    kept = [one for name, one in own.items() if name != "daemon"]
    every = [one.replace(kind=one.KEYWORD_ONLY) for one in (*kept, *options.values())]
    return inspect.Signature(every)


def clock(time: float) -> str:
    return datetime.fromtimestamp(time).time().isoformat("milliseconds")


def day(time: float) -> str:
    local = datetime.fromtimestamp(time).astimezone()
    return f"{local.date()} UTC{local.isoformat()[-len('+00:00') :]}"
