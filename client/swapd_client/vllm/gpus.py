"""The daemon of each rank: one runtime folder for each GPU. Needs neither vllm nor torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from swapd.shared import config
from swapd_client.errors import SwapdError

if TYPE_CHECKING:
    from swapd_client.session.session import Session

#: Placeholder in an endpoint for the number of the rank's GPU.
GPU = "{gpu}"


class NoEndpoint(SwapdError, ValueError):
    """The daemon of a rank cannot be determined."""


def folder_of(endpoint: str, visible: int | None, rank: int = 0) -> Path:
    """Return the runtime folder of a rank's daemon.

    That is `endpoint`, else `$SWAPD_ENDPOINT`, else the folder of the GPU. `{gpu}` in the first two
    is the GPU's number on the machine. `visible` is torch's number of the GPU in this process;
    None: there is no GPU, and `{gpu}` is the `rank`. Raises: NoEndpoint.
    """
    said = endpoint or config.endpoint_from_environment()
    if said is None:
        return config.default_folder("host" if visible is None else f"cuda:{number_of(visible)}")
    if GPU in said:
        said = said.replace(GPU, str(rank if visible is None else number_of(visible)))
    if "{" in said:
        raise NoEndpoint(
            f"{said!r} is no endpoint: the only placeholder is {GPU}, the number of the GPU"
        )
    return Path(said)


def check(session: "Session", visible: int | None, stage: str) -> None:
    """Raise NoEndpoint unless the daemon serves torch's GPU of that number; None: a CPU."""
    if (served := session.processor.index) != visible:
        device = "a CPU" if visible is None else f"cuda:{visible}"
        there = "no GPU" if served is None else f"this process's cuda:{served}"
        raise NoEndpoint(
            f"{stage} computes on {device}, and swapd at {session.endpoint} serves {there}: give "
            f"the folder of that GPU's daemon, with {GPU} for its number, as in additional_config: "
            f"{{swapd: {{endpoint: /run/swapd/gpu{GPU}}}}}"
        )


def number_of(visible: int) -> int:
    """Return the number on the machine of the GPU that is number `visible` in this process.

    Reads `$CUDA_VISIBLE_DEVICES`. Raises: NoEndpoint if that lists UUIDs, or too few GPUs.
    """
    listed = config.listed_gpus()
    if not listed:
        return visible
    said = f"{config.VISIBLE_VARIABLE}={','.join(listed)}"
    if visible >= len(listed):
        raise NoEndpoint(
            f"{said} has no GPU number {visible}: list it there, or set "
            "the daemon's folder: additional_config: {swapd: {endpoint: /run/swapd/...}}"
        )
    if not listed[visible].isdecimal():
        raise NoEndpoint(
            f"{said} names GPUs by UUID, but a daemon's folder has a "
            "number: list numbers there, or set the folder: additional_config: "
            "{swapd: {endpoint: /run/swapd/...}}, or $" + config.ENDPOINT_VARIABLE
        )
    return int(listed[visible])
