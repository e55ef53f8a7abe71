"""`swapd plan --vllm`: the stages of a vLLM-Omni deploy file on the GPUs that they share."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from swapd.cli.plan_input import Bandwidth, bandwidth_of, given_chunk, gpu_memory, pairs
from swapd.cli.plan_page import VllmPlanReport
from swapd.plan import chunks, claims, deploy, kv, shares, sizes, snippets
from swapd.plan.advice import ModelComponent, PlanError
from swapd.plan.chunks import Isolation
from swapd.plan.claims import PlainServer
from swapd.plan.demands import Demand
from swapd.plan.deploy import Deploy
from swapd.plan.shares import GpuPlan
from swapd.shared.units import parse_size, size
from swapd_client.vllm import checkpoint
from swapd_client.vllm.options import KEY, options_of

_MOST = 1 << 50


class JointPlan(NamedTuple):
    #: One for each file, of its own stages; the budgets of the GPUs are for all files.
    reports: list[VllmPlanReport]
    gpus: list[GpuPlan]
    #: The settings that the plan changes: for each file, by the ids of its stages.
    changes: list[dict[int, dict[str, Any]]]


class StageFile(NamedTuple):
    deploy: Deploy
    #: Sources of the sizes of its weights: folders, files, or NAME=SIZE.
    sources: Sequence[str]
    rooms: Sequence[str] = ()
    config: Path | None = None


class PlanOptions(NamedTuple):
    device_memory: int | None = None
    overhead: int | None = None
    bandwidth: float | None = None
    chunk: str | None = None
    isolation: Isolation = "relaxed"


def reports_of(
    files: Sequence[StageFile],
    options: PlanOptions,
    *,
    servers: Callable[[Mapping[int, int]], Sequence[PlainServer]] = lambda totals: (),
    on: Collection[int] = (),
    budgets: Mapping[int, int] = {},
) -> JointPlan:
    """Plan the settings of deploy files whose stages share GPUs, beside servers of plain vLLM.

    `servers`: returns the plain servers, given the memory of each GPU. `on`: the GPUs of those
    servers. `budgets`: budgets that the user gave, by GPU. Raises: PlanError, with the sum if it
    cannot fit.
    """
    for each in files:
        _check_ours(each.deploy)
    gpus = {*on, *(gpu for each in files for s in each.deploy.stages for gpu in s.gpus)}
    totals = _totals(gpus, options.device_memory)
    beside = servers(totals)
    known = list(map(_known, files))
    speed = bandwidth_of(options.bandwidth, None, None)

    def plan_with(nbytes: int) -> tuple[list[GpuPlan], list[list[str]]]:
        demands, notes = _demands(known, beside, totals, nbytes)
        plans = shares.divide_all(demands, totals, speed.bytes_per_s, options.overhead, budgets)
        return plans, notes

    (plans, notes), choice = chunks.chosen(
        plan_with, _cost, given_chunk(options.chunk), options.isolation
    )
    parts = [_part_of(each.deploy, plans) for each in files]
    reports = [
        _report(each.deploy, part, speed, choice, options.isolation, said)
        for each, part, said in zip(files, parts, notes, strict=True)
    ]
    changes = [_changes(each.deploy, part) for each, part in zip(files, parts, strict=True)]
    return JointPlan(reports, plans, changes)


def _known(file: StageFile) -> claims.DeployFacts:
    components, config = _components(file.deploy, file.sources), _config(file.config, file.sources)
    names = [stage.name for stage in file.deploy.stages]
    rooms = pairs("--room", file.rooms, names, parse_size, "8GiB", _MOST)
    return claims.DeployFacts(file.deploy, components, rooms, config)


def _demands(
    known: Sequence[claims.DeployFacts],
    beside: Sequence[PlainServer],
    totals: Mapping[int, int],
    chunk: int,
) -> tuple[dict[int, list[Demand]], list[list[str]]]:
    wanted: dict[int, list[Demand]] = {}
    notes = []
    for each in known:
        own, said = claims.of(each, totals, chunk)
        notes.append(said)
        for gpu, listed in own.items():
            wanted.setdefault(gpu, []).extend(listed)
    for server in beside:
        for gpu in server.gpus:
            wanted.setdefault(gpu, []).append(claims.of_server(server, chunk))
    return dict(sorted(wanted.items())), notes


def _part_of(found: Deploy, plans: Sequence[GpuPlan]) -> list[GpuPlan]:
    own = {(s.name, gpu) for s in found.stages for gpu in s.gpus}
    shares = [tuple(s for s in plan.shares if (s.name, plan.gpu) in own) for plan in plans]
    parts = zip(plans, shares, strict=True)
    return [msgspec.structs.replace(plan, shares=part) for plan, part in parts if part]


# --- the parts of the plan -------------------------------------------------------------------


def _check_ours(found: Deploy) -> None:
    if any(stage.ours for stage in found.stages):
        return
    lines = ", ".join(
        f"{'worker_extension_cls' if s.kind == 'diffusion' else 'worker_cls'}: "
        f"{deploy.WORKERS[s.kind]} for {s.name}"
        for s in found.stages
    )
    raise PlanError(
        f"no stage of {found.path} uses swapd's workers, so none takes turns. In an overlay "
        f"(base_config: {found.path.name}) set {lines}; for a stage of diffusion it is "
        f"worker_extension_cls: {deploy.WORKERS['diffusion']}"
    )


def _totals(gpus: Collection[int], given: int | None) -> dict[int, int]:
    try:
        return {gpu: gpu_memory(f"cuda:{gpu}") if given is None else given for gpu in sorted(gpus)}
    except ModuleNotFoundError as exc:
        raise PlanError("the memory of a GPU is unknown: give --device-memory 80GiB") from exc


def _components(found: Deploy, sources: Sequence[str]) -> list[ModelComponent]:
    components: list[ModelComponent] = []
    named = ((stage.name, stage.offload.cpu_offload_components or ()) for stage in found.stages)
    inner = [f"{name}.{part}" for name, parts in named for part in parts if part != name]
    for source in sources:
        given = sizes.named(source)
        if given:
            claims.check(given.name, found)
            components.append(given)
        else:
            path = sizes.found(source)
            components += [_as_loaded(c, path, found) for c in sizes.of_path(path)]
            components += sizes.within(path, inner)
    sizes.check_names(components, sources)
    return components


def _as_loaded(c: ModelComponent, path: Path, found: Deploy) -> ModelComponent:
    """Return a stage's component with the size that vLLM-Omni loads: in the stage's dtype, with
    tensors of other stages that it keeps. Other components are returned unchanged."""
    stage = next((s for s in found.stages if c.name in claims.names_of(s)), None)
    if stage is None or not path.is_dir():
        return c
    item = kv.item_bytes(stage.dtype, None)
    loaded = checkpoint.nbytes_of(path, c.name, item) or c.nbytes
    if not c.blocks:
        return msgspec.structs.replace(c, nbytes=loaded)
    block = c.block_bytes * min(loaded, c.nbytes) // c.nbytes
    rest = max(0, loaded - (c.nbytes - c.rest_bytes) * min(loaded, c.nbytes) // c.nbytes)
    return msgspec.structs.replace(c, nbytes=loaded, block_bytes=block, rest_bytes=rest)


def _config(given: Path | None, sources: Sequence[str]) -> Mapping[str, Any] | None:
    if given is not None:
        return sizes.config_of(given)
    paths = [sizes.found(s) for s in sources if sizes.named(s) is None]
    files = [p if p.suffix == ".json" else p / "config.json" for p in paths]
    return next((sizes.config_of(f) for f in files if f.name == "config.json" and f.exists()), None)


def _cost(planned: tuple[Sequence[GpuPlan], object]) -> chunks.Cost:
    ours = [plan for plan in planned[0] if plan.budget_bytes]
    return chunks.Cost(
        [plan.budget_bytes for plan in ours],
        sum(plan.moved_bytes for plan in ours),
        sum(plan.request_s for plan in ours),
        sum(share.eager for plan in ours for share in plan.shares),
    )


# --- the report ------------------------------------------------------------------------------


def _report(
    found: Deploy,
    plans: Sequence[GpuPlan],
    speed: Bandwidth,
    chunk: chunks.ChunkChoice,
    isolation: Isolation,
    notes: list[str],
) -> VllmPlanReport:
    ours = [p for p in plans if p.budget_bytes]
    return VllmPlanReport(
        gpus=tuple(plans),
        bytes_per_s=speed.bytes_per_s,
        bandwidth_from=speed.source,
        host_bytes=sum(s.weights_bytes + s.cache_bytes for p in plans for s in p.shares if s.ours),
        chunk_bytes=chunk.nbytes,
        chunk_from=chunk.why,
        settings=_settings(plans),
        overlay=snippets.overlay(found, _changes(found, plans)),
        serve=tuple(
            snippets.serve(f"cuda:{p.gpu}", p.budget_bytes, chunk.nbytes, isolation) for p in ours
        ),
        notes=(*notes, *_about(found, plans)),
    )


def _settings(plans: Sequence[GpuPlan]) -> dict[int, dict[str, float]]:
    said: dict[int, dict[str, float]] = {}
    for plan in plans:
        for share in (s for s in plan.shares if s.ours):
            room = shares.utilization(share.room_bytes, plan.total_bytes)
            used = {"gpu_memory_utilization": room}
            if share.cache_bytes:
                used["kv_cache_memory_bytes"] = share.cache_bytes
            if share.max_model_len:
                used["max_model_len"] = share.max_model_len
            if share.eager:
                used["enforce_eager"] = True
            before = said.get(share.stage_id, used)
            said[share.stage_id] = {key: min(used[key], before[key]) for key in used}
    return said


def _changes(found: Deploy, plans: Sequence[GpuPlan]) -> dict[int, dict[str, Any]]:
    """Return `_settings`, with `kv: auto` for stages whose KV cache moves to the arena, and
    `resident: auto` for stages that do not fit, so that they stream."""
    changes: dict[int, dict[str, Any]] = {**_settings(plans)}
    streaming = {point.name for plan in plans for point in plan.streams}
    for stage in found.stages:
        change, ours = changes.get(stage.id, {}), {**stage.additional.get(KEY, {})}
        if stage.kv == "private" and "kv_cache_memory_bytes" in change:
            ours["kv"] = "auto"
        if stage.name in streaming and not options_of(stage.additional, stage.name).streams:
            ours["resident"] = "auto"
        if ours != stage.additional.get(KEY, {}):
            change["additional_config"] = {**stage.additional, KEY: ours}
    return changes


def _about(found: Deploy, plans: Sequence[GpuPlan]) -> list[str]:
    notes = []
    for plan in plans:
        asked, terms = _as_written(found, plan)
        if terms and asked > plan.total_bytes:
            notes.append(
                f"GPU {plan.gpu}: with the settings in {found.path.name} now ({terms}) it would "
                f"take {size(asked)} of {size(plan.total_bytes)}"
            )
        notes += _caches_said(found, plan)
        notes += without_graphs(plan)
        if plan.by_block:
            notes.append(
                f"GPU {plan.gpu}: {', '.join(plan.by_block)} comes in block by block, again at "
                "each step; the plan counts one step, and assumes that computing hides no copy"
            )
        notes += _async_chunk(found, plan)
    return notes


def without_graphs(plan: GpuPlan) -> list[str]:
    eager = ", ".join(s.name for s in plan.shares if s.eager)
    return [f"{eager}: without CUDA graphs, because {plan.instead_of}"] if plan.instead_of else []


def _async_chunk(found: Deploy, plan: GpuPlan) -> list[str]:
    if not (found.async_chunk and plan.takes_turns):
        return []
    stay = [name for name in plan.takes_turns if name in plan.stay_beside]
    change = ", ".join(name for name in plan.takes_turns if name not in stay)
    beside = f", and {', '.join(stay)} fits beside them and stays" if stay else ""
    return [
        f"async_chunk: true has the stages work on one request at the same time; {change} "
        f"change places in it, each time chunks_per_turn chunks are ready{beside}"
    ]


def _as_written(found: Deploy, plan: GpuPlan) -> tuple[int, str]:
    """Return what a GPU would need with the settings in the file, and these settings as a sum.

    A stage that states the size of its KV cache takes no more than that and its workspace.
    """
    stages = {s.id: s for s in found.stages}
    asked = plan.budget_bytes + sum(t.nbytes for t in plan.beside)
    terms = []
    for share in (s for s in plan.shares if s.ours):
        stage = stages[share.stage_id]
        if stage.kind == "diffusion":
            continue
        if stage.kv_cache_bytes is not None:
            asked += share.room_bytes
            if stage.kv != "private":
                continue  # its cache takes turns in the arena
            asked += stage.kv_cache_bytes - share.cache_bytes
            terms.append(f"a KV cache of {size(stage.kv_cache_bytes)} for {share.name}")
            continue
        stated = stage.utilization or deploy.DEFAULT_UTILIZATION
        asked += max(share.room_bytes, round(stated * plan.total_bytes) - share.cache_bytes)
        terms.append(f"gpu_memory_utilization {stated:g} of {share.name}")
    return asked, " + ".join(terms)


def _caches_said(found: Deploy, plan: GpuPlan) -> list[str]:
    said = {s.id: s.kv_cache_bytes for s in found.stages}
    return [
        f"{share.name}: {found.path.name} has a KV cache of {size(before)}; --room "
        f"{share.name}={before + share.room_bytes} would keep it"
        for share in plan.shares
        if share.ours and (before := said[share.stage_id]) and before != share.cache_bytes
    ]
