"""What the commands share: options, consoles, how errors end, how the daemon is asked."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import swapd_client
from swapd.config import ConfigError
from swapd.device import DeviceError
from swapd.extras import MissingExtra
from swapd.plan.advise import PlanError
from swapd.runtime_dir import RuntimeDirError
from swapd.spawn import SpawnError
from swapd_client.errors import SwapdError

#: Where to find the daemon, for every command that asks one.
Endpoint = Annotated[
    str | None,
    typer.Option("--endpoint", "-e", help="Runtime folder of the daemon, else $SWAPD_ENDPOINT"),
]


def _seconds(given: float) -> float:
    if not 0.0 < given <= _TIMEOUT_MAX_S:
        raise typer.BadParameter(f"{given:g} is no time to wait: seconds, more than 0")
    return given


#: Of every command that asks a daemon: none of them waits for ever.
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", callback=_seconds, help="Seconds the daemon may take for each answer"
    ),
]
TIMEOUT_S = 10.0
_TIMEOUT_MAX_S = 1e6
Json = Annotated[bool, typer.Option("--json", help="JSON for scripts")]

#: Columns where there is no terminal to ask: enough that no table is cut.
_WIDE = 200

#: What users can cause and mend: one line, no traceback.
_EXPECTED = (
    ConfigError,
    DeviceError,
    MissingExtra,
    PlanError,
    RuntimeDirError,
    SpawnError,
    SwapdError,
    OSError,
)

INTERRUPTED = 130


def _console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream is not None and stream.isatty() else _WIDE
    return Console(stderr=stderr, width=width, highlight=False)


console = _console()
errors = _console(stderr=True)


def say_error(text: str) -> None:
    """One line for the user, on stderr: it never gets between the lines of a pipe."""
    errors.print(Text.assemble(("swapd: ", "red"), text), soft_wrap=True)


@contextmanager
def plain_errors() -> Iterator[None]:
    """End with one clear line where the user can help it, with a traceback where we can."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `swapd log | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except _EXPECTED as exc:
        say_error(str(exc))
        sys.exit(1)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """`command` under `plain_errors`, with the same signature for typer to read."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with plain_errors():
            command(*args, **kwargs)

    return run


def ask(endpoint: str | None, command: str, timeout: float) -> "swapd_client.Client":
    """Connect to the daemon; the swap log then shows `swapd <command>` as a session.

    Raises: NotRunning, NotAnswering if it takes longer than `timeout` seconds.
    """
    return swapd_client.connect(endpoint, label=f"{OWN_LABEL}{command}", timeout=timeout)


#: How sessions of this command line begin their label: the readable log leaves them out.
OWN_LABEL = "swapd "


def plain(text: str) -> str:
    """`text` from another process, harmless on a terminal: no escapes, no line breaks."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
