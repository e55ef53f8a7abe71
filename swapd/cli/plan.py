"""`swapd plan`: what to keep, to stream and to swap on a device, and the settings for it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swapd.bench import plain as plain_copy
from swapd.bench import swap_in
from swapd.cli.common import Endpoint, Json, ask, console, errors, plain
from swapd.cli.forecast import forecast
from swapd.device.driver import checked, load
from swapd.plan import paste, sizes
from swapd.plan.advise import CHUNK_BYTES, Advice, Component, Memory, Placement, PlanError, advise
from swapd.protocol import StatusReply
from swapd.units import parse_rate, parse_size, rate, seconds, size
from swapd_client.errors import NotRunning

T = TypeVar("T", int, float)

#: What is planned with where nothing was measured: published, of pinned memory.
PUBLISHED = 25e9
_PUBLISHED_FROM = "published for PCIe 4.0 x16 and pinned memory; 5.0 x16 has about 55 GB/s"

#: Of a component of which only the size is known.
ASSUMED_BLOCKS = 32
#: What contexts, graphs and the allocator take of a device, where nobody says.
_OVERHEAD_SHARE = 0.1
_HOST_CHUNK = 2 << 20
_MEASURED_BYTES = 64 << 20
_MEASURED_ROUNDS = 5


class Bandwidth(NamedTuple):
    """Bytes per second of copies to the device, and where that is from."""

    bytes_per_s: float
    source: str


class Report(msgspec.Struct, frozen=True):
    """What `swapd plan --json` prints."""

    memory: Memory
    bytes_per_s: float
    bandwidth_from: str
    placements: tuple[Placement, ...]
    budget_bytes: int
    request_s: float
    moved_bytes: int
    lru_bytes: int | None
    stage_file: str
    python: str
    serve: str
    notes: tuple[str, ...]


_Sources = Annotated[
    list[str] | None,
    typer.Argument(
        help="Files or folders of safetensors, diffusers folders, config.json, NAME=SIZE; "
        "without any, what a running daemon has"
    ),
]
_Acquire = Annotated[
    bool,
    typer.Option("--acquire", help="Say what acquiring these components would do now, instead"),
]
_Passes = Annotated[
    list[str] | None,
    typer.Option(help="Passes over a component's weights in a request, as in dit=20"),
]
_Blocks = Annotated[
    list[str] | None, typer.Option(help="How many blocks a component has, as in dit=40")
]
_Compute = Annotated[
    list[str] | None, typer.Option(help="Seconds that one pass computes, as in dit=0.4")
]


def plan(
    sources: _Sources = None,
    acquire: _Acquire = False,
    device_memory: Annotated[
        str | None, typer.Option(help="As in 16GiB; default: a daemon's budget, or all of a GPU")
    ] = None,
    kv_cache: Annotated[str | None, typer.Option(help="What it takes of that, as in 3GiB")] = None,
    activations: Annotated[str | None, typer.Option(help="What they take of that")] = None,
    overhead: Annotated[
        str | None, typer.Option(help="What contexts and graphs take; default: a tenth")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Of copies, as in 25GB/s; default: measured")
    ] = None,
    passes: _Passes = None,
    blocks: _Blocks = None,
    compute: _Compute = None,
    device: Annotated[str | None, typer.Option(help="host, or a GPU, as in cuda:0")] = None,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Say what to keep on a device, what to stream, what to swap, and what it costs.

    With --acquire: what acquiring the named components would do now.
    """
    given = sources or []
    if acquire:
        return forecast(given, endpoint, json)
    needed = not given or endpoint is not None
    told_all = device_memory is not None and bandwidth is not None
    status = _status(endpoint, needed=needed) if needed or not told_all else None
    components, notes = _components(given, status, passes or [], blocks or [], compute or [])
    memory = _memory(
        status,
        device,
        device_memory,
        **{
            what: _size(f"--{what.replace('_', '-')}", value)
            for what, value in (
                ("kv_cache", kv_cache),
                ("activations", activations),
                ("overhead", overhead),
            )
        },
    )
    where = device or (status.device if status else None)
    chunk_bytes = status.chunk_bytes if status else _HOST_CHUNK if where == "host" else CHUNK_BYTES
    speed = _bandwidth(bandwidth, status, where)
    advice = advise(components, memory, speed.bytes_per_s, chunk_bytes)
    report = _report(advice, speed, where or "cuda:0", notes)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        console.print(page(report))


# --- what is asked about -----------------------------------------------------------------


def _status(endpoint: str | None, *, needed: bool) -> StatusReply | None:
    """What a daemon says; None if there is none, and it is not `needed`."""
    try:
        with ask(endpoint, "plan") as client:
            return client.status()
    except NotRunning as exc:
        if needed:
            raise PlanError(f"{exc}; or say of what to plan: files, folders, or NAME=SIZE") from exc
        return None


def _components(
    sources: Sequence[str],
    status: StatusReply | None,
    passes: Sequence[str],
    blocks: Sequence[str],
    compute: Sequence[str],
) -> tuple[list[Component], list[str]]:
    """The components, with what was said of them; and notes about what was not."""
    found: list[Component] = []
    for source in sources:
        given = sizes.named(source)
        found += [given] if given else sizes.of_path(Path(source))
    if not sources and status is not None:
        found = sizes.of_daemon(status.components)
    if not found:
        raise PlanError("the daemon has no components yet; register them, or give NAME=SIZE")
    names = [c.name for c in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise PlanError(f"several components are called {', '.join(sorted(twice))}")
    told = _Told(
        _pairs("--blocks", blocks, names, int),
        _pairs("--passes", passes, names, int),
        _pairs("--compute", compute, names, float),
    )
    notes: list[str] = []
    bare = {c.name for s in sources if (c := sizes.named(s))} if sources else set(names)
    return [_filled(c, told, notes, by_size_alone=c.name in bare) for c in found], notes


class _Told(NamedTuple):
    """What was said of components, by name."""

    blocks: dict[str, int]
    passes: dict[str, int]
    compute_s: dict[str, float]


def _filled(c: Component, told: _Told, notes: list[str], *, by_size_alone: bool) -> Component:
    """`c` with what was said of it, and else what is usual; adds to `notes` what was assumed."""
    blocks = told.blocks.get(c.name, c.blocks)
    if not blocks and by_size_alone:
        blocks = ASSUMED_BLOCKS
        notes.append(f"{c.name}: taken to have {blocks} blocks; say --blocks {c.name}=N")
    if blocks != c.blocks:
        size_of_one = -(-c.nbytes // blocks)
        c = msgspec.structs.replace(c, blocks=blocks, block_bytes=size_of_one, rest_bytes=0)
    passes = told.passes.get(c.name, sizes.TYPICAL_PASSES.get(c.name, 1))
    if passes > 1 and c.name not in told.passes:
        notes.append(f"{c.name}: taken to run {passes} times a request; say --passes {c.name}=N")
    return msgspec.structs.replace(c, passes=passes, compute_s=told.compute_s.get(c.name))


def _pairs(
    option: str, given: Sequence[str], names: Sequence[str], kind: Callable[[str], T]
) -> dict[str, T]:
    """`dit=20` and the like, each once for a component that there is."""
    pairs: dict[str, T] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
            raise PlanError(f"{option} {text}: no component is called {name!r}; {hint}")
        try:
            pairs[name] = kind(value)
        except ValueError as exc:
            raise PlanError(f"{option} {text}: write it like {name}=20") from exc
        if not pairs[name] > 0:
            raise PlanError(f"{option} {text}: it must be more than 0")
    return pairs


def _size(option: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as exc:
        raise PlanError(f"{option}: {exc}") from exc


# --- what there is to place them in ------------------------------------------------------


def _memory(
    status: StatusReply | None,
    device: str | None,
    device_memory: str | None,
    *,
    kv_cache: int | None,
    activations: int | None,
    overhead: int | None,
) -> Memory:
    """The device's memory and what else must fit there; a daemon's budget is for weights alone."""
    total = _size("--device-memory", device_memory)
    beside = kv_cache is not None or activations is not None
    if total is None and status is not None:
        if not beside or not status.device_bytes:
            return Memory(status.budget_bytes, kv_cache or 0, activations or 0, overhead or 0)
        total = status.device_bytes
    if total is None and device is not None and device != "host":
        total = _gpu_memory(device)
    if total is None:
        raise PlanError("say how much memory the device has: --device-memory 16GiB")
    if overhead is None:
        overhead = round(total * _OVERHEAD_SHARE)
    return Memory(total, kv_cache or 0, activations or 0, overhead)


def _gpu_memory(device: str) -> int:
    """All memory of a GPU, by the driver. Raises: DeviceError, PlanError."""
    number = _gpu_number(device)
    api = load()
    return int(checked(api, api.cuDeviceTotalMem, checked(api, api.cuDeviceGet, number)))


def _gpu_number(device: str) -> int:
    number = device.removeprefix("cuda").removeprefix(":") or "0"
    if not (device.startswith("cuda") and number.isdecimal()):
        raise PlanError(f"there is no device {device!r}; use --device host, cuda or cuda:0")
    return int(number)


def _bandwidth(given: str | None, status: StatusReply | None, device: str | None) -> Bandwidth:
    """As said, else as the daemon measured, else measured now, else as published."""
    if given is not None:
        try:
            return Bandwidth(parse_rate(given), "as given")
        except ValueError as exc:
            raise PlanError(f"--bandwidth: {exc}") from exc
    measured = [c for c in status.components if c.copy_s and c.nbytes] if status else []
    if took_s := sum(c.copy_s or 0.0 for c in measured):
        nbytes = sum(c.nbytes for c in measured)
        return Bandwidth(nbytes / took_s, f"measured by the daemon, in {len(measured)} swap-ins")
    if device is not None:
        with suppress(ModuleNotFoundError), errors.status("Measuring"):
            return Bandwidth(_measured(device), f"measured here now, on {device}")
    return Bandwidth(PUBLISHED, _PUBLISHED_FROM)


def _measured(device: str) -> float:
    """Bytes per second of swap-ins on the host; on a GPU, of a copy from pinned memory."""
    if device == "host":
        swaps = swap_in.measure(device, _MEASURED_BYTES, _MEASURED_ROUNDS)
        return swaps.nbytes / swaps.swap_s
    gpu = f"cuda:{_gpu_number(device)}"
    with plain_copy.copier(gpu, _MEASURED_BYTES) as copier:
        copier.copy()
        took_s = min(swap_in.seconds_of(copier.copy) for _ in range(_MEASURED_ROUNDS))
    return _MEASURED_BYTES / took_s


# --- what is said ------------------------------------------------------------------------


def _report(advice: Advice, speed: Bandwidth, device: str, notes: list[str]) -> Report:
    unknown = [p.name for p in advice.treated("stream") if not p.compute_known]
    if unknown:
        notes = [
            *notes,
            f"{', '.join(unknown)}: how long it computes is not known, so no copy was taken to be "
            f"hidden behind it; say --compute {unknown[0]}=SECONDS of one pass",
        ]
    return Report(
        memory=advice.memory,
        bytes_per_s=speed.bytes_per_s,
        bandwidth_from=speed.source,
        placements=advice.placements,
        budget_bytes=advice.budget_bytes,
        request_s=advice.request_s,
        moved_bytes=advice.moved_bytes,
        lru_bytes=advice.lru_bytes,
        stage_file=paste.stage_file(advice),
        python=paste.python(advice),
        serve=paste.serve(advice, device),
        notes=tuple(notes),
    )


def page(report: Report) -> RenderableType:
    """The whole advice for people."""
    parts: list[RenderableType] = [
        Text(str(report.memory)),
        Text(f"copies at {rate(report.bytes_per_s)}: {report.bandwidth_from}"),
        "",
        _table(report.placements),
        "",
        Text(_cost(report)),
    ]
    parts += [Text(plain(note), "yellow") for note in report.notes]
    for title, text in (
        ("stage file", report.stage_file),
        ("or in Python", report.python),
        ("the daemon", report.serve),
    ):
        parts += ["", Text(f"# {title}", "dim"), Text(text.rstrip())]
    return Group(*parts)


def _cost(report: Report) -> str:
    if not report.moved_bytes:
        return "everything fits: nothing is moved, nobody waits"
    said = (
        f"a request moves {size(report.moved_bytes)} and waits {seconds(report.request_s)} for it"
    )
    if report.lru_bytes is None:
        return f"{said}; by lru alone, as wholes, it could not run"
    by_lru_s = report.lru_bytes / report.bytes_per_s
    return (
        f"{said}; by lru alone it would move {size(report.lru_bytes)} and wait {seconds(by_lru_s)}"
    )


def _table(placements: Iterable[Placement]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("component", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("do", no_wrap=True)
    for heading in ("kept", "swap-in", "wait each pass", "wait each request", "moved"):
        table.add_column(heading, justify="right", no_wrap=True)
    for p in placements:
        table.add_row(
            Text(plain(p.name)),
            size(p.nbytes),
            p.how,
            size(p.kept_bytes) if p.kept_bytes else "",
            seconds(p.swap_in_s) if p.swap_in_s else "",
            _each_pass(p),
            seconds(p.request_s) if p.request_s else "",
            size(p.moved_bytes) if p.moved_bytes else "",
        )
    return table


def _each_pass(p: Placement) -> str:
    if p.how != "stream":
        return ""
    return f"{seconds(p.step_s)} x {p.passes}" if p.step_s else "hidden"
