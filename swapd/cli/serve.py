"""`swapd serve`: read the settings, claim the folder, open the device, serve.

A thread writes messages to stderr: the reader of stderr may have stopped reading, and the daemon's
loop must not wait for it.
"""

import gc
import inspect
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import typer

from swapd import __version__
from swapd.cli.page import Page, open_page, reachable
from swapd.daemon import host_copy_orders
from swapd.daemon.daemon import Daemon
from swapd.device import number_of, open_device
from swapd.run import gpus
from swapd.shared import runtime_dir, system
from swapd.shared.config import Config, canonical, load, shown, usual_device
from swapd.shared.extras import needed
from swapd.shared.text import plain, plain_lines
from swapd.shared.units import size

log = logging.getLogger("swapd")


def run(
    config: Config,
    read_again: Callable[[], Config] | None = None,
    command: list[str] | None = None,
) -> NoReturn:
    """Serve until told to stop, then end the process; read the settings again on SIGHUP.

    `command`: replaces this program, in this process, on SIGUSR2. Raises: LimitError,
    RuntimeDirError, DeviceError, MissingExtra, OSError.
    """
    with needed("swapd serve"):
        import uvloop
    system.raise_open_files()
    with runtime_dir.claim(config.folder) as folder:
        page = open_page(config)
        with nullcontext() if page is None else closing(page):
            log.info("allocating %s", size(config.budget))
            device = open_device(
                config.device,
                config.budget,
                config.chunk_bytes,
                config.bandwidth,
                config.pin_limit,
                in_part=folder.follows,
            )
            for note in device.use().notes:
                log.warning("%s", note)
            own = (lambda: None) if page is None else (lambda: page.pid)
            daemon = Daemon(config, device, folder, read_again, own, may_upgrade=bool(command))
            gc.freeze()  # the loop waits for collections, which need not scan imported modules
            upgrades = uvloop.run(daemon.run(lambda: _ready(config, page)))
        logging.shutdown()
        if upgrades and command and not daemon.told_to_stop:
            folder.leave_locked()
            os.execvp(command[0], command)
        os._exit(0)  # its threads may use the device; the folder is locked until its memory is free


def _ready(config: Config, page: Page | None) -> None:
    if page is not None:
        page.start(config.folder)
    people = "" if page is None else f", people at {page.url}"
    with suppress(OSError):  # its reader may be gone, or the disk full: it serves all the same
        typer.echo(
            f"swapd serves {config.device}: {_served(config)} in chunks of "
            f"{size(config.chunk_bytes)}. Clients find it at {config.folder}{people}"
        )


def _served(config: Config) -> str:
    """Return how much memory that is, in whole chunks."""
    return size(config.budget - config.budget % config.chunk_bytes)


def serve(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML file of settings")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say what happens on stderr")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the settings, and serve nothing")
    ] = False,
    **flags: Any,
) -> None:
    """Own a device and serve its memory to workers, until SIGTERM.

    Each setting can also be SWAPD_<NAME> in the environment, or a line of the file. SIGHUP reads
    the file again: --ack-timeout, --residency-factor, --residency-bound, --patience, --overtake,
    --overtake-of, --turn, --keep-host, --stop-timeout, --linger, --swap-log-size, --swap-log-age
    and --host-memory change at once; the others need `swapd upgrade` or a restart, and stderr names
    them.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    handler = StderrHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    # its work may delay a start for long, so say what it does
    logging.getLogger(host_copy_orders.__name__).setLevel(logging.INFO)
    config = config and config.absolute()
    read = partial(load, config, given, defaults={"device": usual})
    settings = read()
    number_of(settings.device, settings.budget, settings.chunk_bytes, settings.bandwidth)
    if check:
        with needed("swapd serve"):
            import uvloop  # noqa: F401
        reachable(settings)
        what = f"{canonical(settings.device)}, {_served(settings)}, in {settings.folder}"
        typer.echo(f"swapd {__version__} would serve {what}")  # read by `swapd upgrade`
    else:
        run(settings, read, sys.orig_argv)


def usual() -> str:
    device = usual_device()
    if device != "host" and (there := gpus.count() or 0) > 1:
        log.warning("of %d GPUs this serves %s; --device takes another", there, device)
    return device


class LogFormatter(logging.Formatter):
    """Formats a record as one line, a traceback as several. Foreign text is harmless in both."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return plain(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return plain_lines(super().formatException(ei))


def _flags() -> Iterator[inspect.Parameter]:
    for name, hint in get_type_hints(Config, include_extras=True).items():
        kind, meta = get_args(hint)
        default = getattr(Config(), name)
        there = default is not None and name != "device"
        said = f" ({shown(name, default).replace(' ', '')})" if there else ""
        option = typer.Option(None, help=meta.description + said, show_default=False)
        given = (kind if get_origin(kind) is Literal else str) | None
        keyword = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, keyword, default=option, annotation=given)


_own = [one for name, one in inspect.signature(serve).parameters.items() if name != "flags"]
serve.__signature__ = inspect.Signature([*_own, *_flags()])  # type: ignore[attr-defined]


#: Beyond this the newest lines are dropped, and counted.
WAITING_MAX = 1000
CLOSE_S = 0.5


class StderrHandler(logging.Handler):
    """Hands formatted records to a thread that writes them to stderr."""

    def __init__(self) -> None:
        """Raises: LimitError if no thread can be started."""
        super().__init__()
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="swapd-log", daemon=True)
        system.start(self._thread)

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        with self._change:
            if len(self._lines) < WAITING_MAX:
                self._lines.append(line)
            else:
                self._dropped += 1
            self._change.notify()

    def close(self) -> None:
        """Blocks for at most CLOSE_S."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join(CLOSE_S)
        super().close()

    def _run(self) -> None:
        while (line := self._next()) is not None:
            try:  # not by sys.stderr: the interpreter could not end while this thread held its lock
                data = f"{line}\n".encode(errors="backslashreplace")
                while data:
                    data = data[os.write(2, data) :]
            except OSError:  # its reader is gone
                return

    def _next(self) -> str | None:
        with self._change:
            self._change.wait_for(lambda: self._lines or self._dropped or self._closed)
            if self._lines:
                return self._lines.popleft()
            dropped, self._dropped = self._dropped, 0
            return f"dropped {dropped} lines: stderr was not read in time" if dropped else None
