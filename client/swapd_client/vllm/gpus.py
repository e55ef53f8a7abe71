"""The daemon of each rank: one runtime folder for each GPU. Needs neither vllm nor torch."""

from pathlib import Path

from swapd.shared import config
from swapd_client.errors import SwapdError

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
