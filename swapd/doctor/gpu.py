"""Checks the GPUs of this machine. Asks the driver; makes no context on a GPU."""

import resource
from contextlib import closing
from pathlib import Path
from typing import Any

from swapd.device import DeviceError
from swapd.device.context import checked, device_names, load, uuid_of
from swapd.device.nvml import Nvml
from swapd.doctor.host import Check, package
from swapd.shared.units import size

#: The default chunk of `--device cuda:0`, and the daemon's other descriptors.
CHUNK_BYTES = 64 << 20
SPARE_FILES = 256

#: Printed with each GPU, as advice.
MEASURED = "docs/costs.md has the figures of an H200: `make gpu-check` measures this one"

_NEEDED = {
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "virtual memory management",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": "memory as a file descriptor",
}


def examine() -> list[Check]:
    nodes = sorted(Path("/dev").glob("nvidia[0-9]*"))
    try:
        api = load()
    except DeviceError as exc:
        return [no_driver(nodes, str(exc))]
    checks = [package("nvidia-ml-py", extra="cuda")]
    for index, name in enumerate(device_names(api)):
        checks += _gpu(api, index, name)
    return checks


def no_driver(nodes: list[Path], why: str) -> Check:
    if not nodes:
        advice = "swapd serve --device host works without; figures of a GPU need one"
        return Check("gpu", "ok", "no NVIDIA device", advice)
    found = f"{len(nodes)}x NVIDIA in /dev, which cannot be used"
    return Check("gpu", "warn", found, why)


def _gpu(api: Any, index: int, product: str) -> list[Check]:
    device = checked(api, api.cuDeviceGet, index)
    total = int(checked(api, api.cuDeviceTotalMem, device))
    name = f"cuda:{index}"
    found = f"{product}, {size(total)}"
    missing = [what for which, what in _NEEDED.items() if not _attribute(api, device, which)]
    if missing:
        advice = "WSL, some vGPUs and some sandboxes lack it; use --device host"
        return [Check(name, "warn", f"{found}, without {' and '.join(missing)}", advice)]
    with closing(Nvml(uuid_of(api, device))) as nvml:
        used = ", ".join(map(str, nvml.processes()))
        notes = nvml.notes(mps=bool(_attribute(api, device, "MPS_ENABLED")))
    advice = f"swapd serve --device {name} --budget ...; {MEASURED}"
    checks = [Check(name, "ok", f"{found}; {used or 'no process uses it'}", advice)]
    checks += [Check(name, "warn", note) for note in notes]
    if not _attribute(api, device, "READ_ONLY_HOST_REGISTER_SUPPORTED"):
        slow = "cannot pin memory that is mapped read-only"
        checks.append(
            Check(name, "warn", slow, "host copies are then mapped for writing in the daemon")
        )
    return [*checks, descriptors(total, resource.getrlimit(resource.RLIMIT_NOFILE)[1])]


def descriptors(total: int, limit: int) -> Check:
    needed = -(-total // CHUNK_BYTES) + SPARE_FILES
    found = f"{limit} at most; the whole GPU in chunks of {size(CHUNK_BYTES)} takes {needed}"
    if limit >= needed:
        return Check("gpu descriptors", "ok", found)
    advice = f"set `ulimit -n {needed}` (LimitNOFILE in a unit), or use a larger --chunk"
    return Check("gpu descriptors", "warn", found, advice)


def _attribute(api: Any, device: Any, name: str) -> int:
    which = getattr(api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    try:
        return 0 if which is None else int(checked(api, api.cuDeviceGetAttribute, which, device))
    except DeviceError:  # the driver is older than the attribute
        return 0
