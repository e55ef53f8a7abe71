"""Which daemon a command asks: the one that is named, or else the only one there is."""

from pathlib import Path
from typing import Annotated

import typer

import swapd_client
from swapd.shared import config, daemons
from swapd.shared.daemons import Found
from swapd_client.errors import SwapdError

#: Of every command that asks a daemon.
Device = Annotated[
    str | None,
    typer.Option("--device", "-d", help="The daemon of this device, as in cuda:0, wherever it is"),
]


class SeveralDaemons(SwapdError):
    """More than one daemon may be meant. The message names them."""


def where(endpoint: str | None, device: str | None, timeout: float) -> Path:
    """The runtime folder of the daemon that is meant.

    As given, else that of `device`, else `$SWAPD_ENDPOINT`, else that of the only daemon of this
    user that runs. A folder in which none runs is for who connects to report. May ask daemons what
    they serve, each within `timeout` seconds. Raises: SeveralDaemons.
    """
    if endpoint is not None:
        return Path(endpoint)
    if device is None and (named := config.endpoint_from_environment()):
        return Path(named)
    found = [daemon for daemon in daemons.running() if not daemon.unreachable]
    if device is None:
        return only(found) or config.default_folder("host")
    return _of_device(found, device, timeout)


def only(found: list[Found]) -> Path | None:
    """The folder of the only one; None if there is none. Raises: SeveralDaemons."""
    if len(found) > 1:
        raise SeveralDaemons(
            f"{len(found)} daemons of this user run: {daemons.named(found)}. Say which is meant: "
            f"--endpoint {found[0].folder}, or --device; `swapd ps` lists them"
        )
    return found[0].folder if found else None


def _of_device(found: list[Found], device: str, timeout: float) -> Path:
    """The daemon in the default folder of `device`, else the only one that says it serves it."""
    usual = config.default_folder(device)
    if any(daemon.folder == usual.resolve() for daemon in found):
        return usual
    wanted = "cuda:0" if device == "cuda" else device
    return only([d for d in found if _device_of(d.folder, timeout) == wanted]) or usual


def _device_of(folder: Path, timeout: float) -> str | None:
    """What a daemon serves; None if it does not say."""
    try:
        with swapd_client.connect(folder, label="swapd", timeout=timeout) as client:
            return client.session.welcome.device
    except SwapdError:
        return None


def folders(incomplete: str) -> list[str]:
    """For completion: the runtime folders of the daemons that run."""
    found = (str(daemon.folder) for daemon in daemons.running() if not daemon.unreachable)
    return [folder for folder in found if folder.startswith(incomplete)]
