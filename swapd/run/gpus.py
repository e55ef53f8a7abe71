"""Which GPUs a command may use, and which GPU a number stands for.

`cuda:1` is the second GPU that $CUDA_VISIBLE_DEVICES shows, as in CUDA, torch and vLLM. The folder
of a daemon has the number on the machine, by which a worker of vLLM finds it.
"""

from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from swapd.device.base import DeviceError
from swapd.device.context import checked, load, uuid_of
from swapd.device.nvml import Nvml
from swapd.shared import config
from swapd.shared.config import VISIBLE_VARIABLE, ConfigError, gpu_number, gpus_in
from swapd.shared.extras import MissingExtra

_UUID_CHARS = 12
_PROC = Path("/proc")


def numbers_of(devices: Sequence[str]) -> list[int]:
    return [number for one in devices if (number := gpu_number(one)) is not None]


def name_of(device: str, listed: Sequence[str] | None) -> str:
    """Return a GPU's number or UUID on the machine; another device as it is.

    `listed`: the GPUs that $CUDA_VISIBLE_DEVICES shows where `device` is named.
    """
    number = gpu_number(device)
    if number is None:
        return device
    if listed is None:
        return str(number)
    return listed[number] if number < len(listed) else f"none of {','.join(listed)}"


def same(one: str, other: str) -> bool:
    """Compare the names of GPUs; UUIDs may be cut short."""
    if one.isdecimal() == other.isdecimal():
        return one == other or ("-" in one and (one.startswith(other) or other.startswith(one)))
    number, uuid = sorted((one, other), key=lambda name: not name.isdecimal())
    if not number.isdecimal():
        return False
    with closing(Nvml(number)) as nvml:
        return nvml.uuid().startswith(uuid)


def folder_of(device: str) -> Path:
    name = name_of(device, config.listed_gpus())
    if name.isdecimal():
        return config.default_folder(f"cuda:{name}")
    if gpu_number(device) is None:
        return config.default_folder(device)
    return config.default_folder(f"cuda-{name.partition('-')[2][-_UUID_CHARS:]}")


def listed_by(pid: int) -> tuple[str, ...] | None:
    """Return the GPUs that $CUDA_VISIBLE_DEVICES showed a process of this user at its start; None
    if all, or unknown."""
    with suppress(OSError):
        for line in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            name, _, value = line.partition(b"=")
            if name.decode(errors="replace") == VISIBLE_VARIABLE:
                return gpus_in(value.decode(errors="replace"))
    return None


# --- what there is -------------------------------------------------------------------------


def count() -> int | None:
    """Return the number of GPUs that this process may use; None if unknown."""
    listed = config.listed_gpus()
    if listed == ():
        return 0
    try:
        api = load()
        return int(checked(api, api.cuDeviceGetCount))
    except (DeviceError, MissingExtra, ImportError):
        return None if listed is None else len(listed)


def in_words() -> str:
    listed, there = config.listed_gpus(), count()
    known = ", ".join(f"cuda:{number}" for number in range(there or 0))
    if listed is None:
        return f"this machine has {known or 'no GPU'}"
    if not listed:
        return f"{VISIBLE_VARIABLE} is empty, which hides all GPUs"
    return f"{VISIBLE_VARIABLE}={','.join(listed)} shows {known or 'none'}"


def check(devices: Sequence[str], source: str) -> None:
    """Raise ConfigError unless each GPU is visible to this process, as far as is known.

    `source`: where the devices are named, as in `-d`.
    """
    there = count()
    for device in devices:
        number = gpu_number(device)
        if number is not None and there is not None and number >= there:
            also = "" if there else ", or host"
            raise ConfigError(
                f"{source} {device}: there is no such GPU, since {in_words()}: say one of those"
                f"{also}, or list more in {VISIBLE_VARIABLE}"
            )


def check_numbered(devices: Sequence[str]) -> None:
    """Raise ConfigError unless workers can find each daemon by the number of its GPU."""
    listed = config.listed_gpus()
    if any(gpu_number(one) is not None and "-" in name_of(one, listed) for one in devices):
        raise ConfigError(
            f"{VISIBLE_VARIABLE}={','.join(listed or ())} names GPUs by UUID, and of several "
            f"daemons ({', '.join(devices)}) a worker finds its own by the number of its GPU: list "
            "numbers there"
        )


def nvml_of(device: str) -> Nvml:
    """NVML ignores CUDA_VISIBLE_DEVICES."""
    try:
        api = load()
        return Nvml(uuid_of(api, checked(api, api.cuDeviceGet, gpu_number(device) or 0)))
    except (DeviceError, MissingExtra, ImportError):
        return Nvml(name_of(device, config.listed_gpus()))
