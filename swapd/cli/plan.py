"""`swapd plan`: which components to keep, stream and swap on a device, and the settings."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from msgspec import structs
from rich.console import Group, RenderableType
from rich.text import Text

from swapd.cli.common import Json, columns, if_any, note, option_of, show
from swapd.cli.plan_input import (
    Bandwidth,
    advised,
    bandwidth_of,
    components_of,
    given_chunk,
    memory_of,
    status_of,
)
from swapd.cli.plan_page import page as vllm_page
from swapd.cli.plan_vllm import PlanOptions, StageFile, reports_of
from swapd.cli.replay import Budget, plan_log
from swapd.cli.target import TIMEOUT_S, Endpoint, TimeoutOption
from swapd.plan import deploy, offload_flags, omni, sizes, snippets
from swapd.plan.advice import Advice, PlanError, Treatment, advise
from swapd.plan.chunks import ChunkChoice, Isolation
from swapd.plan.deploy import Deploy
from swapd.run import servers
from swapd.shared.config import canonical
from swapd.shared.protocol import Status
from swapd.shared.text import plain
from swapd.shared.units import Size, parse_rate, rate, seconds, size, typed_size


class PlanReport(Advice, frozen=True, kw_only=True):
    """The output of `swapd plan --json`."""

    bandwidth_from: str
    chunk_bytes: int
    chunk_from: str
    stage_file: str
    python: str
    serve: str
    notes: tuple[str, ...]


_Blocks = Annotated[list[str], typer.Option(help="How many blocks a component has, as in dit=40")]
_sized = partial(option_of, typed_size, "SIZE")
_Compute = Annotated[list[str], typer.Option(help="Seconds that one pass computes, as in dit=0.4")]


def plan(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Files or folders of safetensors, diffusers folders, config.json, ids of cached "
            "models, NAME=SIZE; default: the components of a running daemon"
        ),
    ] = [],  # noqa: B006 - typer copies it
    vllm: Annotated[
        Path | None,
        typer.Option(
            help="A deploy file of vLLM-Omni: plan its stages, the sources, and print the settings "
            "with which they share their GPUs"
        ),
    ] = None,
    room: Annotated[
        list[str],
        typer.Option(help="With --vllm: a stage's KV cache and workspace, as in thinker=8GiB"),
    ] = [],  # noqa: B006
    config: Annotated[
        Path | None,
        typer.Option(
            help="With --vllm: the model's config.json, for its KV caches, where no source has it"
        ),
    ] = None,
    overlay: Annotated[
        bool, typer.Option("--overlay", help="With --vllm: print the deploy file alone")
    ] = False,
    device_memory: Annotated[
        int | None, _sized("As in 16GiB; default: a daemon's budget, or all of a GPU")
    ] = None,
    kv_cache: Annotated[
        int | None, _sized("Size of the KV cache, subtracted from --device-memory")
    ] = None,
    activations: Annotated[
        int | None, _sized("Size of the activations, subtracted from --device-memory")
    ] = None,
    overhead: Annotated[
        int | None, _sized("Size of CUDA contexts and graphs; default: a tenth")
    ] = None,
    bandwidth: Annotated[
        float | None, option_of(parse_rate, "RATE", "Of copies, as 25GB/s; default: measured")
    ] = None,
    chunk: Annotated[
        str | None,
        typer.Option(
            help="Chunk size of the daemon, as in 64MiB, or auto; default: a daemon's, or "
            "that of `swapd serve`"
        ),
    ] = None,
    isolation: Annotated[
        Isolation, typer.Option(help="Isolation of the daemon: relaxed or strict")
    ] = "relaxed",
    passes: Annotated[
        list[str], typer.Option(help="Passes over a component's weights in a request, as in dit=20")
    ] = [],  # noqa: B006
    blocks: _Blocks = [],  # noqa: B006
    compute: _Compute = [],  # noqa: B006
    from_log: Annotated[
        Path | None,
        typer.Option(
            help="A daemon's swap log: plan from its last run, by running it again, with --budget "
            "and --bandwidth"
        ),
    ] = None,
    budget: Budget = None,
    device: Annotated[str | None, typer.Option(help="host, or a GPU, as in cuda:0")] = None,
    endpoint: Endpoint = None,
    json: Json = False,
    timeout: TimeoutOption = TIMEOUT_S,
) -> None:
    """Plan which components to keep on a device, stream or swap, and the costs.

    With --vllm: the same for the stages of a deploy file, and the values to set in it.

    With --from-log: the daemon's settings with which the last run in its swap log would have waited
    least. They are found by running it again, as `swapd replay` does, with other rules, pins and
    sizes of streamed components.
    """
    of_parts = {
        "--kv-cache": kv_cache,
        "--activations": activations,
        "--passes": passes,
        "--blocks": blocks,
        "--compute": compute,
        "--device": device,
        "--endpoint": endpoint,
    }
    if from_log is not None:
        of_stages = {"--vllm": vllm, "--room": room, "--config": config, "--overlay": overlay}
        of_files = {"--device-memory": device_memory, "--overhead": overhead, "--chunk": chunk}
        of_files["--isolation"] = None if isolation == "relaxed" else isolation
        _refuse("--from-log", {"sources": sources, **of_stages, **of_files, **of_parts})
        return plan_log(from_log, budget, bandwidth, json)
    if budget is not None:
        raise PlanError("--budget goes with --from-log LOG; --device-memory is for a plan of files")
    if vllm is not None:
        _refuse("--vllm", of_parts)
        settings = PlanOptions(device_memory, overhead, bandwidth, chunk, isolation)
        file = StageFile(deploy_of(vllm, sources), sources, room, config)
        (planned,) = reports_of([file], settings).reports
        if overlay and not json:
            return typer.echo(planned.overlay, nl=False)
        return show(planned, vllm_page, json=json)
    if any((room, overlay, config)):
        raise PlanError("--room, --config and --overlay go with --vllm DEPLOY.yaml")
    complete = bool(device_memory and bandwidth)
    status, there, where = _daemon(sources, endpoint, timeout, device, complete=complete)
    components, notes = components_of(sources, status, passes, blocks, compute)
    uses = {"kv_cache": kv_cache, "activations": activations, "overhead": overhead}
    memory = memory_of(there, device, device_memory, uses)
    speed = bandwidth_of(bandwidth, there, where)
    advice, found = advised(
        lambda nbytes: advise(components, memory, speed.bytes_per_s, nbytes),
        there,
        where,
        given_chunk(chunk),
        isolation,
    )
    line = snippets.serve(where or "cuda:0", advice.budget_bytes, found.nbytes, isolation)
    show(_report(advice, speed, found, line, notes), page, json=json)


def deploy_of(path: Path, sources: Sequence[str]) -> Deploy:
    """Read a deploy file. A file with `stage_args` becomes an overlay over the deploy file that the
    installed vLLM-Omni has for the model, which is one of the sources. Raises: PlanError."""
    if not (listed := offload_flags.in_file(path)):
        return deploy.read(path)
    model = next((one for one in sources if sizes.named(one) is None), None)
    if model is None:
        raise PlanError(f"{path} has stage_args, for a deploy file of vllm-omni: name the model")
    folder = sizes.found(model)
    if (installed := omni.of_this_python([str(folder), model])) is None:
        raise PlanError(f"{path} has stage_args, for a deploy file of vllm-omni: install it here")
    own, said = servers.with_workers(servers.chosen(installed, listed), (), folder)
    for each in said:
        note(each)
    return deploy.read(path, own, installed)


def _refuse(beside: str, given: Mapping[str, object]) -> None:
    if mixed := [option for option, said in given.items() if said or type(said) is Size]:
        raise PlanError(f"{', '.join(mixed)} has no effect with {beside}; leave it out")


def _daemon(
    sources: list[str], endpoint: str | None, timeout: float, device: str | None, *, complete: bool
) -> tuple[Status | None, Status | None, str | None]:
    """Return a daemon's status, if needed; that of the device's daemon; and the device."""
    needed = not sources or endpoint is not None
    asks = needed or not complete
    status = status_of(endpoint, timeout, needed=needed) if asks else None
    served = status.device if status else None
    where = canonical(device) if device else served
    return status, status if served == where else None, where


# --- the report --------------------------------------------------------------------------


def _report(
    advice: Advice, speed: Bandwidth, chunk: ChunkChoice, serve: str, notes: list[str]
) -> PlanReport:
    unknown = [p.name for p in advice.treated("stream") if not p.compute_known]
    if unknown:
        notes = [
            *notes,
            f"{', '.join(unknown)}: its compute time is unknown, so the plan assumes that it hides "
            f"no copy; give --compute {unknown[0]}=SECONDS of one pass",
        ]
    return PlanReport(
        **structs.asdict(advice),
        bandwidth_from=speed.source,
        chunk_bytes=chunk.nbytes,
        chunk_from=f"{chunk.why}; each component, or block of one, takes whole ones",
        stage_file=snippets.stage_file(advice),
        python=snippets.python(advice),
        serve=serve,
        notes=tuple(notes),
    )


def page(report: PlanReport) -> RenderableType:
    parts: list[RenderableType] = [
        Text(str(report.memory)),
        Text(f"copies at {rate(report.bytes_per_s)}: {report.bandwidth_from}"),
        Text(f"memory in chunks of {size(report.chunk_bytes)}: {report.chunk_from}"),
        "",
        columns(_COLUMNS, report.placements, left=("component", "do")),
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


def _cost(report: PlanReport) -> str:
    if not report.moved_bytes:
        return "everything fits: no copies, and no waits"
    said = (
        f"a request moves {size(report.moved_bytes)} and waits {seconds(report.request_s)} for it"
    )
    if report.lru_bytes is None:
        return f"{said}; lru alone, with whole components, could not run"
    by_lru_s = report.lru_bytes / report.bytes_per_s
    return (
        f"{said}; by lru alone it would move {size(report.lru_bytes)} and wait {seconds(by_lru_s)}"
    )


def _each_pass(p: Treatment) -> str:
    if p.how != "stream":
        return ""
    return f"{seconds(p.step_s)} x {p.passes}" if p.step_s else "hidden"


_COLUMNS: dict[str, Callable[[Treatment], RenderableType]] = {
    "component": lambda p: Text(plain(p.name)),
    "size": lambda p: size(p.nbytes),
    "do": lambda p: p.how,
    "kept": lambda p: if_any(size, p.kept_bytes),
    "swap-in": lambda p: if_any(seconds, p.swap_in_s),
    "wait each pass": _each_pass,
    "wait each request": lambda p: if_any(seconds, p.request_s),
    "moved": lambda p: if_any(size, p.moved_bytes),
}
