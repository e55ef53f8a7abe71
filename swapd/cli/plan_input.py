"""The input of a plan (components, memory, bandwidth) from options, files or a daemon."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple, TypeVar

import msgspec

from swapd.bench import swap_in
from swapd.cli.common import errors, say_error
from swapd.cli.target import ChosenDaemon
from swapd.device.context import checked, load
from swapd.plan import chunks, sizes
from swapd.plan.advice import Advice, MemoryBudget, ModelComponent, PlanError
from swapd.plan.chunks import ChunkChoice, Isolation
from swapd.shared import config
from swapd.shared.protocol import Status
from swapd.shared.text import meant
from swapd.shared.units import measured_loads, size
from swapd_client.errors import NotRunning, SwapdError

T = TypeVar("T", int, float)

#: A published figure, for pinned memory.
PUBLISHED = 25e9
_PUBLISHED_FROM = "published for PCIe 4.0 x16 and pinned memory; 5.0 x16 has about 55 GB/s"

#: For a component whose blocks are unknown.
ASSUMED_BLOCKS = 32
_OVERHEAD_SHARE = 0.1
_MEASURED_BYTES = 64 << 20
_MEASURED_ROUNDS = 5


class Bandwidth(NamedTuple):
    bytes_per_s: float
    source: str


def status_of(endpoint: str | None, timeout: float, *, needed: bool) -> Status | None:
    """Return None if no daemon answers and the status is not `needed`."""
    try:
        # unless needed, only the daemon in the default place: another may be unrelated to the plan
        if not (needed or endpoint):
            endpoint = config.endpoint_from_environment() or str(config.usual_folder())
        with ChosenDaemon(endpoint, timeout=timeout).client("plan") as client:
            return client.status(timeout=timeout)
    except NotRunning as exc:
        if needed:
            raise PlanError(f"{exc}; or give files, folders, or NAME=SIZE") from exc
    except SwapdError as exc:
        if needed:
            raise
        say_error(f"{exc}. Planned without it")
    return None


def components_of(
    sources: Sequence[str],
    status: Status | None,
    passes: Sequence[str],
    blocks: Sequence[str],
    compute: Sequence[str],
) -> tuple[list[ModelComponent], list[str]]:
    found, filled, notes = _found(sources, status), list[ModelComponent](), list[str]()
    names = [c.name for c in found]
    given_blocks = pairs("--blocks", blocks, names, int)
    given_passes = pairs("--passes", passes, names, int)
    given_compute = pairs("--compute", compute, names, float)
    by_size = filter(None, map(sizes.named, sources))
    bare = {c.name for c in by_size} if sources else set(names)
    for c in found:
        count = given_blocks.get(c.name, c.blocks)
        if not count and c.name in bare:
            count = ASSUMED_BLOCKS
            notes.append(f"{c.name}: taken to have {count} blocks; give --blocks {c.name}=N")
        if count != c.blocks:
            size_of_one = -(-c.nbytes // count)
            c = msgspec.structs.replace(c, blocks=count, block_bytes=size_of_one, rest_bytes=0)
        runs = given_passes.get(c.name, sizes.TYPICAL_PASSES.get(c.name, 1))
        if runs > 1 and c.name not in given_passes:
            notes.append(f"{c.name}: taken to run {runs} times a request; give --passes {c.name}=N")
        compute_s = given_compute.get(c.name)
        filled.append(msgspec.structs.replace(c, passes=runs, compute_s=compute_s))
    return filled, notes


def _found(sources: Sequence[str], status: Status | None) -> list[ModelComponent]:
    found: list[ModelComponent] = []
    for source in sources:
        named = sizes.named(source)
        found += [named] if named else sizes.of_path(sizes.found(source))
    if not sources and status is not None:
        found = sizes.of_daemon(status.components)
    if not found:
        raise PlanError("the daemon has no components yet; register them, or give NAME=SIZE")
    sizes.check_names(found, sources)
    return found


def pairs(
    option: str,
    given: Sequence[str],
    names: Sequence[str],
    kind: Callable[[str], T],
    like: str = "20",
    most: int = 1_000_000,
) -> dict[str, T]:
    """Raises: PlanError."""
    found: dict[str, T] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in names:
            raise PlanError(f"{option} {text}: nothing is called {name!r}; {meant(name, names)}")
        try:
            found[name] = kind(value)
        except ValueError as exc:
            raise PlanError(f"{option} {text}: write it like {name}={like}") from exc
        if not 0 < found[name] <= most:
            raise PlanError(f"{option} {text}: it must be more than 0, and at most {most}")
    return found


# --- the device --------------------------------------------------------------------------


def memory_of(
    status: Status | None,
    device: str | None,
    total: int | None,
    uses: Mapping[str, int | None],
) -> MemoryBudget:
    """Return the device's memory, `total` if given, with its other `uses`, which are named as in
    MemoryBudget.

    A daemon's budget is for weights alone. Raises: PlanError.
    """
    given = {name: nbytes for name, nbytes in uses.items() if nbytes is not None}
    if total is None and status is not None:
        total = status.device_bytes
        if not total or given.keys().isdisjoint(("kv_cache", "activations")):
            return MemoryBudget(status.budget_bytes, **given)
    if total is None:
        if device in (None, "host"):
            raise PlanError("the memory of the device is unknown: give --device-memory 16GiB")
        total = gpu_memory(str(device))
    return MemoryBudget(total, **{"overhead": round(total * _OVERHEAD_SHARE), **given})


def gpu_memory(device: str) -> int:
    """Raises: DeviceError, PlanError."""
    number = _gpu_number(device)
    api = load()
    return int(checked(api, api.cuDeviceTotalMem, checked(api, api.cuDeviceGet, number)))


def _gpu_number(device: str) -> int:
    if (number := config.gpu_number(device)) is None:
        raise PlanError(f"there is no device {device!r}; use --device host, cuda or cuda:0")
    return number


def given_chunk(text: str | None) -> int | Literal["auto"] | None:
    """Parse the value of `--chunk` as `swapd serve` does. Raises: PlanError, ConfigError."""
    if text is None:
        return None
    found = config.load(None, {"chunk": text}, {}).chunk
    if not isinstance(found, int):
        return found
    if found % config.HOST_CHUNK:
        raise PlanError(f"--chunk {text}: it is a multiple of {size(config.HOST_CHUNK)}")
    return int(found)


def advised(
    plan_with: Callable[[int], Advice],
    status: Status | None,
    device: str | None,
    given: int | Literal["auto"] | None,
    isolation: Isolation,
) -> tuple[Advice, ChunkChoice]:
    if status is not None and given is None:
        found = ChunkChoice(status.chunk_bytes, f"the daemon's at {status.runtime_dir}")
        return plan_with(found.nbytes), found
    if device == "host" and not isinstance(given, int):
        found = ChunkChoice(config.HOST_CHUNK, "the default of --chunk on the host")
        return plan_with(found.nbytes), found
    return chunks.chosen(
        plan_with,
        lambda one: chunks.Cost([one.budget_bytes], one.moved_bytes, one.request_s),
        given,
        isolation,
    )


def bandwidth_of(given: float | None, status: Status | None, device: str | None) -> Bandwidth:
    if given is not None:
        return Bandwidth(given, "as given")
    if status is not None and (found := measured_loads(status.components)) is not None:
        return Bandwidth(found[0], f"measured by the daemon, in {found[1]} swap-ins")
    if device is not None:
        with suppress(ModuleNotFoundError), errors.status("Measuring"):
            return Bandwidth(_measured(device), f"measured here now, on {device}")
    return Bandwidth(PUBLISHED, _PUBLISHED_FROM)


def _measured(device: str) -> float:
    if device == "host":
        swaps = swap_in.measure(device, _MEASURED_BYTES, _MEASURED_ROUNDS)
        return swaps.nbytes / swaps.swap_s
    gpu = f"cuda:{_gpu_number(device)}"
    with swap_in.copier(gpu, _MEASURED_BYTES) as copier:
        copier.copy()
        took_s = min(swap_in.seconds_of(copier.copy) for _ in range(_MEASURED_ROUNDS))
    return _MEASURED_BYTES / took_s
