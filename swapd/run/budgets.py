"""How much of each device the daemon of a command gets, where that is not said."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from swapd.device.base import DeviceError
from swapd.device.driver import checked, load
from swapd.device.host import available_bytes
from swapd.plan import sizes
from swapd.plan.advise import PlanError
from swapd.run.commands import Command
from swapd.run.daemons import Wanted
from swapd.shared.config import Config, visible_gpus
from swapd.shared.extras import MissingExtra
from swapd.shared.units import size

#: Of what is free on a GPU: the rest is for what workers allocate themselves.
GPU_SHARE = 0.7
#: More than a model has, for what is rounded up to whole chunks.
_ROUND_UP = 1.05


def devices() -> list[str]:
    """The GPUs of this machine that this process may use, or the host if there are none."""
    try:
        api = load()
        count = int(checked(api, api.cuDeviceGetCount))
    except (DeviceError, MissingExtra, ImportError):
        return ["host"]
    listed = visible_gpus()
    numbers = [int(n) for n in listed.split(",") if n.strip().isdigit()] if listed else range(count)
    return [f"cuda:{number}" for number in numbers] or ["host"]


def wanted(command: Command, given: Sequence[str], budget: int | None) -> list[Wanted]:
    """One daemon for each device. Raises: PlanError if what is needed is not there."""
    found = list(given) or devices()[:1]
    return [_of(command, device, budget) for device in found]


def _of(command: Command, device: str, budget: int | None) -> Wanted:
    if budget is not None:
        return Wanted(device, budget, "--budget")
    free = free_on(device)
    if command.kind == "vllm" and command.model and Path(command.model).is_dir():
        found = sizes.of_path(Path(command.model))
        weights = sum(c.nbytes for c in found)
        if (needed := int(weights * _ROUND_UP)) > free:
            raise PlanError(
                f"{command.model} has {size(weights)} of weights, and {size(free)} are free on "
                f"{device}: nothing was started"
            )
        return Wanted(device, needed, f"the weights of {command.model}")
    if device == "host":
        return Wanted(device, Config().budget, "the default on the host")
    return Wanted(device, int(free * GPU_SHARE), f"{GPU_SHARE:.0%} of what is free")


def free_on(device: str) -> int:
    """Bytes that nobody uses now."""
    if device == "host":
        return available_bytes()
    try:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
    except Exception as exc:  # not there, or its own error
        raise PlanError(f"how much {device} has free is not known ({exc}): say --budget") from exc
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(device.removeprefix("cuda:")))
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    finally:
        pynvml.nvmlShutdown()
