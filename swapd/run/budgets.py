"""Computes the budget of each device's daemon, where no option sets it."""

from collections.abc import Sequence
from contextlib import closing

from swapd.device.host import available_bytes
from swapd.plan import hub, sizes
from swapd.plan.advice import PlanError
from swapd.run import gpus
from swapd.run.commands import Command, division_of, shards_of
from swapd.run.daemons import DaemonSpec
from swapd.run.servers import model_folder
from swapd.shared.config import Config, usual_device
from swapd.shared.units import size

#: The rest of a GPU's free memory is for the workers' own allocations.
GPU_SHARE = 0.7
#: For rounding to whole chunks.
_ROUND_UP = 1.05


def devices() -> list[str]:
    return [f"cuda:{number}" for number in range(gpus.count() or 0)] or [usual_device()]


def wanted(
    commands: Sequence[Command], given: Sequence[str], budget: int | None
) -> list[DaemonSpec]:
    """Return a daemon for each device, shared by all commands. Raises: PlanError."""
    found = list(given) or devices()[: max(map(shards_of, commands), default=1)]
    return [_of(commands, device, budget) for device in found]


def _of(commands: Sequence[Command], device: str, budget: int | None) -> DaemonSpec:
    if budget is not None:
        return DaemonSpec(device, budget, "--budget")
    free = free_on(device)
    weights = [
        (c.model, int(nbytes * _ROUND_UP))
        for c in commands
        if c.model and (nbytes := weights_of(c))
    ]
    found, why = _for_weights(weights, free, device)
    if not weights or len(weights) < len(commands):  # other commands register an unknown amount
        share = f"{GPU_SHARE:.0%} of the free memory"
        usual = (Config().budget, "the default on the host")
        most = max((found, why), usual if device == "host" else (int(free * GPU_SHARE), share))
        return DaemonSpec(device, *most, least=found)
    return DaemonSpec(device, found, why)


def weights_of(command: Command) -> int | None:
    """Return the most weights of one process of a plain vLLM server; None for other commands.
    Raises: PlanError if its model is missing here."""
    if command.kind != "vllm" or not command.model:
        return None
    try:
        division = division_of(command)
        return sum(c.share(*division) for c in sizes.of_path(model_folder(command)))
    except hub.NotInCache as exc:
        raise PlanError(
            f"{exc}, or give a budget: --budget, or budget in a file's [daemon]"
        ) from exc


def _for_weights(weights: Sequence[tuple[str, int]], free: int, device: str) -> tuple[int, str]:
    """Return the room for the weights, and the reason."""
    for model, needed in weights:
        if needed > free:
            raise PlanError(
                f"{model} needs {size(needed)} for its weights, and {size(free)} are free on "
                f"{device}: free some of it, say another device, or take quantised weights; "
                "nothing was started"
            )
    whole = sum(needed for _, needed in weights)
    why = f"the weights of {' and '.join(model for model, _ in weights)}"
    if whole <= max(free * GPU_SHARE, *(needed for _, needed in weights), 0):
        return whole, why
    least = max(needed for _, needed in weights)
    return max(least, int(free * GPU_SHARE)), f"{why}, {size(whole)}, take turns in it"


def free_on(device: str) -> int:
    if device == "host":
        return available_bytes()
    with closing(gpus.nvml_of(device)) as nvml:
        if (memory := nvml.memory()) is None:
            why = nvml.missing or "NVML does not say"
            raise PlanError(
                f"the free memory of {device} is unknown ({why}): give --budget, or -d host"
            )
        return int(memory.free)
