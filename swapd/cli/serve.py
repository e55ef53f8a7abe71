"""`swapd serve`: read the settings, claim the folder, open the device, serve."""

import gc
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import typer

from swapd import __version__
from swapd.cli.page import Page, open_page
from swapd.daemon import host_copy_orders
from swapd.daemon.daemon import Daemon
from swapd.daemon.logs import StderrHandler
from swapd.device import open_device
from swapd.shared import runtime_dir, system
from swapd.shared.config import Config, gpus_here, load, shown, usual_device
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

    `command`: runs in place of this program, in this process, on SIGUSR2. Raises: LimitError,
    RuntimeDirError, DeviceError, MissingExtra, OSError."""
    with needed("swapd serve"):
        import uvloop
    system.raise_open_files()
    with runtime_dir.claim(config.folder) as folder:
        with _page(config) as page:
            log.info("allocating %s", size(config.budget))
            device = open_device(
                config.device, config.budget, config.chunk_bytes, config.bandwidth, config.pin_limit
            )
            for note in device.use().notes:
                log.warning("%s", note)
            own = (lambda: None) if page is None else (lambda: page.pid)
            daemon = Daemon(config, device, folder, read_again, own, may_upgrade=bool(command))
            gc.freeze()  # the loop waits for collections: they need not look at imported modules
            upgrades = uvloop.run(daemon.run(lambda: _ready(config, page)))
        logging.shutdown()
        if upgrades and command:
            folder.leave_locked()
            os.execvp(command[0], command)
        os._exit(0)  # its threads may use the device; the folder is locked until its memory is free


@contextmanager
def _page(config: Config) -> Iterator[Page | None]:
    page = open_page(config)
    try:
        yield page
    finally:
        if page is not None:
            page.close()


def _ready(config: Config, page: Page | None) -> None:
    if page is not None:
        page.start(config.folder)
    people = "" if page is None else f", people at {page.url}"
    typer.echo(
        f"swapd serves {config.device}: {size(config.budget)} in chunks of "
        f"{size(config.chunk_bytes)}. Clients find it at {config.folder}{people}"
    )


def _serve(
    config: Path | None = None, verbose: bool = False, check: bool = False, **flags: Any
) -> None:
    """Own a device and serve its memory to workers, until SIGTERM.

    Each setting can also be SWAPD_<NAME> in the environment, or a line of the file. SIGHUP reads
    the file again: --ack-timeout, --residency-factor, --residency-bound, --patience,
    --overtake, --turn, --keep-host, --stop-timeout, --linger, --swap-log-size, --swap-log-age and
    --host-memory change at once; the others need `swapd upgrade` or a restart, and stderr names
    them.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    handler = StderrHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    logging.getLogger(host_copy_orders.__name__).setLevel(
        logging.INFO
    )  # it may delay a start for long
    config = config and config.absolute()
    read = partial(load, config, given, defaults={"device": _device})
    settings = read()
    if check:
        with needed("swapd serve"):
            import uvloop  # noqa: F401
        typer.echo(f"swapd {__version__} would serve {settings.device}, {size(settings.budget)}")
    else:
        run(settings, read, sys.orig_argv)


def _device() -> str:
    device = usual_device()
    if (gpus := gpus_here()) > 1:
        log.warning("of %d GPUs this serves %s; --device takes another", gpus, device)
    return device


class LogFormatter(logging.Formatter):
    """Prints a record as one line, a traceback as several; foreign text is harmless in both."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return plain(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return plain_lines(super().formatException(ei))


def _with_a_flag_for_each_setting(command: Callable[..., None]) -> Callable[..., None]:
    config = typer.Option(None, "--config", "-c", help="TOML file of settings")
    verbose = typer.Option(False, "--verbose", "-v", help="Say what happens on stderr")
    check = typer.Option(False, "--check", help="Only read the settings, and serve nothing")
    parameters = [
        _parameter("config", Path | None, config),
        _parameter("verbose", bool, verbose),
        _parameter("check", bool, check),
    ]
    for name, hint in get_type_hints(Config, include_extras=True).items():
        kind, meta = get_args(hint)
        default = getattr(Config(), name)
        there = default is not None and name != "device"
        said = f" ({shown(name, default).replace(' ', '')})" if there else ""
        option = typer.Option(None, help=meta.description + said, show_default=False)
        parameters.append(_parameter(name, _flag_type(kind), option))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    kinds = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kinds, default=default, annotation=kind)


def _flag_type(kind: Any) -> Any:
    """The type of a flag: text for `load` to parse, except for choices."""
    return kind | None if get_origin(kind) is Literal else str | None


serve = _with_a_flag_for_each_setting(_serve)
