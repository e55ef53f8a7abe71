"""Checks each feature and limit of this machine that swapd needs, by a trial where possible.

Changes nothing: trials use a few pages of this process's own memory, and GPUs are checked through
the driver, without a context.
"""

import fcntl
import os
import re
import resource
import socket
import stat
from collections.abc import Callable
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec

from swapd.device import DeviceError
from swapd.device.context import checked, device_names, load, uuid_of
from swapd.device.host import Group
from swapd.device.nvml import Nvml
from swapd.shared import runtime_dir, vm
from swapd.shared.config import GPU_CHUNK, gpu_nodes
from swapd.shared.fds import OwnedFd, peer_of
from swapd.shared.runtime_dir import Folder
from swapd.shared.units import size


class Check(msgspec.Struct, frozen=True):
    """One finding. `fail`: swapd does not run without it; `warn`: something is slower or off."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def checked_that(
    holds: bool, name: str, found: str, advice: str, otherwise: Literal["warn", "fail"] = "warn"
) -> Check:
    return Check(name, "ok", found) if holds else Check(name, otherwise, found, advice)


#: The first with MADV_POPULATE_READ and _WRITE.
KERNEL_NEEDED = (5, 14)
#: A daemon holds about one descriptor for each component and three for each session.
FILES_WANTED = 1024
#: For the arena and host copies of the smallest useful set-up.
MEMORY_WANTED = 2 << 30

_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_TRIED_BYTES = 4 << 20


# --- the kernel ------------------------------------------------------------------------------


def kernel(system: str, release: str) -> Check:
    needed = ".".join(map(str, KERNEL_NEEDED))
    found = f"{system} {release}"
    if system != "Linux":
        return Check("kernel", "fail", found, f"swapd needs Linux {needed} or later")
    match = re.match(r"(\d+)\.(\d+)", release)
    new = not match or (int(match[1]), int(match[2])) >= KERNEL_NEEDED
    return checked_that(new, "kernel", found, f"use Linux {needed} or later", "fail")


def _tried(
    name: str,
    attempt: Callable[[], None],
    works: str,
    advice: str,
    otherwise: Literal["warn", "fail"] = "fail",
) -> Check:
    try:
        attempt()
    except (OSError, AttributeError) as exc:
        why = getattr(exc, "strerror", None) or exc
        return Check(name, otherwise, f"does not work: {why}", advice)
    return Check(name, "ok", works)


def populate() -> Check:
    def attempt() -> None:
        with OwnedFd(_memfd()) as fd:
            address = vm.map_shared(fd.fileno(), 0, _TRIED_BYTES, writable=True)
            try:
                vm.populate_in_one(address, _TRIED_BYTES, writable=True)
            finally:
                vm.free(address, _TRIED_BYTES)

    needed = ".".join(map(str, KERNEL_NEEDED))
    advice = f"host copies get ready more slowly; use Linux {needed} or later, without gVisor"
    return _tried("populate", attempt, "MADV_POPULATE works", advice, "warn")


def memfd_sealing() -> Check:
    def attempt() -> None:
        with OwnedFd(_memfd()) as fd:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, seals)
            if fcntl.fcntl(fd.fileno(), fcntl.F_GET_SEALS) & seals != seals:
                raise OSError("seals do not hold")

    advice = "allow memfd_create and its seals (a seccomp filter, or gVisor?)"
    return _tried("memfd", attempt, "made and sealed", advice)


def shelving() -> Check:
    """Check that the kernel can move pages of shared memory, which makes a swap cheap."""

    def attempt() -> None:
        with OwnedFd(_memfd()) as fd:
            shelf = vm.reserve(_TRIED_BYTES)
            address = vm.map_shared(fd.fileno(), 0, _TRIED_BYTES, writable=True)
            try:
                vm.view(address, 1)[0] = 7
                vm.move_pages(address, shelf, _TRIED_BYTES)
                if vm.view(shelf, 1)[0] != 7:
                    raise OSError("the pages were lost on the way")
            finally:
                vm.free(address, _TRIED_BYTES)
                vm.free(shelf, _TRIED_BYTES)

    advice = "swaps work, but fault every page anew; use Linux 5.13 or later"
    return _tried("mremap", attempt, "MREMAP_DONTUNMAP moves shared memory", advice, "warn")


def huge_pages(setting: Path = _SHMEM_ENABLED) -> Check:
    advice = f"copies and page tables are slower without: echo advise | sudo tee {setting}"
    with suppress(OSError):
        if chosen := re.search(r"\[(\w+)\]", setting.read_text()):
            found, has_some = f"for shared memory: {chosen[1]}", chosen[1] not in ("never", "deny")
            return checked_that(has_some, "huge pages", found, advice)
    return Check("huge pages", "warn", f"no {setting}", "this kernel has none for memfds")


def pidfd() -> Check:
    def attempt() -> None:
        with OwnedFd(os.pidfd_open(os.getpid())) as fd:
            if fd.await_readable(0):
                raise OSError("says that this process has ended")

    return _tried("pidfd", attempt, "works", "use Linux 5.3 or later; allow pidfd_open")


def peer_credentials() -> Check:
    def attempt() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            pid, uid = peer_of(ours)
            if (pid, uid) != (os.getpid(), os.getuid()):
                raise OSError(f"says process {pid} of user {uid}")

    return _tried("peercred", attempt, "SO_PEERCRED works", "use a kernel with Unix SEQPACKET")


# --- limits ----------------------------------------------------------------------------------


def memory(available: int, group: Group | None) -> Check:
    """`group`: the control group with the smallest limit."""
    found = f"{size(available)} available"
    limit = "no cgroup limit" if group is None else f"{size(group.limit)} in cgroup {group.path}"
    found += f", {limit}"
    advice = f"arena and host copies live there; {size(MEMORY_WANTED)} is little already"
    return checked_that(available >= MEMORY_WANTED, "memory", found, advice)


def open_files(limit: int) -> Check:
    advice = "each component takes one: ulimit -n 65536"
    return checked_that(limit >= FILES_WANTED, "open files", f"up to {limit}", advice)


def locked_memory(limit: int) -> Check:
    found = "no limit" if limit == resource.RLIM_INFINITY else f"up to {size(limit)}"
    return Check("locked memory", "ok", f"{found}; the host device locks none")


# --- the runtime folder ----------------------------------------------------------------------


def folder_usable(path: Path) -> Check:
    name = "runtime folder"
    try:
        with Folder(path, runtime_dir.open_folder(path)) as folder:
            mode = stat.S_IMODE(folder.stat().st_mode)
            problem = runtime_dir.problem_with(folder)
    except FileNotFoundError:
        parent = next(p for p in path.absolute().parents if p.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return Check(name, "ok", f"{path}, still to be made")
        why = f"{path} cannot be made: {parent} is not writable"
        problem = runtime_dir.Problem(why, runtime_dir.ELSEWHERE)
    except OSError as exc:
        problem = runtime_dir.refused(path, exc)
    if problem is not None:
        return Check(name, "fail", *problem)
    return Check(name, "ok", f"{path}, mode {mode:04o}")


# --- packages ----------------------------------------------------------------------------------


def package(name: str, *, needed: bool = False, extra: str = "") -> Check:
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        what = f"'swapd[{extra}]'" if extra else name
        purpose = {"torch": "to register modules: ", "transformers": "for swapd demo: "}
        advice = f"{purpose.get(name, '')}pip install {what}"
        return Check(name, "fail" if needed else "warn", "not installed", advice)


def _memfd() -> int:
    fd = os.memfd_create("swapd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _TRIED_BYTES)
    return fd


# --- GPUs -------------------------------------------------------------------------------


#: The number of a daemon's descriptors that are no chunks.
SPARE_FILES = 256

MEASURED = "docs/costs.md has the figures of an H200: `make gpu-check` measures this one"

_NEEDED = {
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "virtual memory management",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": "memory as a file descriptor",
}


def gpus() -> list[Check]:
    try:
        api = load()
    except DeviceError as exc:
        return [no_driver(gpu_nodes(), str(exc))]
    checks = [package("nvidia-ml-py", extra="cuda")]
    for index, name in enumerate(device_names(api)):
        checks += _gpu(api, index, name)
    return checks


def no_driver(nodes: list[Path], why: str) -> Check:
    if not nodes:
        advice = "swapd serve --device host works without; figures of a GPU need one"
        return Check("gpu", "ok", "no NVIDIA device", advice)
    return Check("gpu", "warn", f"{len(nodes)}x NVIDIA in /dev, which cannot be used", why)


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
    needed = -(-total // GPU_CHUNK) + SPARE_FILES
    found = f"{limit} at most; the whole GPU in chunks of {size(GPU_CHUNK)} takes {needed}"
    advice = f"set `ulimit -n {needed}` (LimitNOFILE in a unit), or use a larger --chunk"
    return checked_that(limit >= needed, "gpu descriptors", found, advice)


def _attribute(api: Any, device: Any, name: str) -> int:
    which = getattr(api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    try:
        return 0 if which is None else int(checked(api, api.cuDeviceGetAttribute, which, device))
    except DeviceError:  # the driver is older than the attribute
        return 0
