"""Chooses the daemon that a command asks: that of `--endpoint`, else of `--device`, else of
$SWAPD_ENDPOINT, else this user's only daemon."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import typer

import swapd_client
from swapd.shared import config, daemons
from swapd.shared.config import ConfigError
from swapd.shared.daemons import RunningDaemon
from swapd_client.errors import SwapdError

#: Prefix of this command line's session labels; the readable log omits these.
OWN_LABEL = "swapd "
TIMEOUT_S = 10.0
_TIMEOUT_MAX_S = 1e6


def where(endpoint: str | None, device: str | None, timeout: float) -> Path:
    """Return the runtime folder of the chosen daemon.

    The folder may lack a daemon; connecting reports that. May ask daemons for their devices, each
    within `timeout` seconds. Raises: SeveralDaemons, ConfigError.
    """
    if endpoint is not None:
        return Path(endpoint)
    if device is None:
        named = config.endpoint_from_environment()
        return Path(named) if named else daemons.usual_folder()
    if not config.DEVICE_NAME.fullmatch(device):
        raise ConfigError(f"there is no device {device!r}; use --device host, cuda or cuda:0")
    found = [daemon for daemon in daemons.running() if not daemon.unreachable]
    return _of_device(found, device, timeout)


def _of_device(found: list[RunningDaemon], device: str, timeout: float) -> Path:
    usual = config.default_folder(device)
    if any(daemon.folder == usual.resolve() for daemon in found):
        return usual
    wanted = config.canonical(device)
    return daemons.only([d for d in found if device_of(d.folder, timeout) == wanted]) or usual


def device_of(folder: Path, timeout: float) -> str | None:
    try:
        with connected(folder, "device", timeout) as client:
            return client.session.welcome.device
    except SwapdError:
        return None


def connected(folder: Path, command: str, timeout: float = TIMEOUT_S) -> swapd_client.Client:
    """Connect, as a session that the swap log labels `swapd <command>`. If the daemon ends, its
    calls fail at once: no other is waited for.

    Raises: NotRunning; Timeout after `timeout` seconds.
    """
    label = f"{OWN_LABEL}{command}"
    return swapd_client.connect(folder, label=label, timeout=timeout, reconnect=0)


def folders(incomplete: str) -> list[str]:
    found = (str(daemon.folder) for daemon in daemons.running() if not daemon.unreachable)
    return [folder for folder in found if folder.startswith(incomplete)]


def _seconds(given: float) -> float:
    if not 0.0 < given <= _TIMEOUT_MAX_S:
        raise typer.BadParameter(f"{given:g} is not a waiting time: give seconds, more than 0")
    return given


Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        "-e",
        help="Runtime folder of the daemon, else $SWAPD_ENDPOINT, else the only daemon there is",
        autocompletion=folders,
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", "-d", help="The daemon of this device, as in cuda:0, wherever it is"),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout", callback=_seconds, help="Seconds the daemon may take for each answer"
    ),
]


@dataclass
class ChosenDaemon:
    """The daemon that a command asks; `guarded` makes it from the three options."""

    endpoint: Endpoint = None
    device: Device = None
    timeout: TimeoutOption = TIMEOUT_S

    @cached_property
    def folder(self) -> Path:
        return where(self.endpoint, self.device, self.timeout)

    def client(self, command: str) -> swapd_client.Client:
        """As `connected`. Raises: SeveralDaemons, ConfigError, too."""
        return connected(self.folder, command, self.timeout)
