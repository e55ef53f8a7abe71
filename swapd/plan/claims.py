"""Computes what each stage of a deploy file needs on each GPU, from the file and the weights."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from msgspec.structs import replace

from swapd.plan import kv
from swapd.plan.advice import CHUNK_BYTES, SLOTS, ModelComponent, PlanError, grouped
from swapd.plan.demands import Demand, WeightGroup
from swapd.plan.deploy import Deploy, DeployStage
from swapd.plan.shares import USUAL_CACHE
from swapd.plan.sizes import COMPONENTS, DITS, STAGES
from swapd.shared.text import meant
from swapd.shared.units import size
from swapd.shared.vm import round_up
from swapd_client.vllm.options import PART_CHUNKS, options_of

#: Other names in checkpoints.
_ALSO = {"code2wav": "token2wav", "token2wav": "code2wav"}
#: The setting with which a pipeline loads and leaves as one.
_WHOLE = "."


class DeployFacts(NamedTuple):
    deploy: Deploy
    #: Stages, parts of stages (`thinker.visual`), or the components of a diffusion stage.
    components: Sequence[ModelComponent]
    #: Given bytes of KV cache and workspace together, by stage.
    rooms: Mapping[str, int] = {}
    config: Mapping[str, Any] | None = None


class Needs(NamedTuple):
    workspace: int
    #: Smallest possible KV cache, 0 without one; largest useful one, if known.
    least_cache: int = 0
    most_cache: int | None = None
    cache: kv.KvCache | None = None
    #: Decoder layers, which can leave one by one; 0 if unknown.
    layers: int = 0
    said: bool = False
    notes: tuple[str, ...] = ()


def of(
    known: DeployFacts, totals: Mapping[int, int], chunk: int = CHUNK_BYTES
) -> tuple[dict[int, list[Demand]], list[str]]:
    """Return the demands on each GPU, by its number, and notes about the assumptions. `chunk`: the
    daemons' chunk size. Raises: PlanError."""
    claims = _Claims(known, chunk)
    by_gpu: dict[int, list[Demand]] = {}
    for stage in known.deploy.stages:
        for gpu, demand in claims.of_stage(stage, totals):
            by_gpu.setdefault(gpu, []).append(demand)
    return dict(sorted(by_gpu.items())), claims.notes


class _Claims:
    def __init__(self, known: DeployFacts, chunk: int) -> None:
        self._known, self._chunk = known, chunk
        self._found = {c.name: c for c in known.components}
        self._weights = {stage.name: self._weights_of(stage) for stage in known.deploy.stages}
        #: About the assumptions.
        self.notes: list[str] = []

    def of_stage(
        self, stage: DeployStage, totals: Mapping[int, int]
    ) -> Iterator[tuple[int, Demand]]:
        """Yield the demand on each of its GPUs."""
        room, config = self._known.rooms.get(stage.name), self._known.config
        needs = needs_of(stage, room, config, self._chunk) if stage.ours else None
        parts = self._parts(stage, -(-needs.layers // stage.pipeline) if needs else 0)
        self.notes += needs.notes if needs else ()
        for gpu in stage.gpus:
            on = needs or Needs(self._by_itself(stage, parts, totals[gpu]), said=True)
            yield gpu, _claim(stage, parts, on)

    def _by_itself(self, stage: DeployStage, parts: Sequence[WeightGroup], total: int) -> int:
        if stage.name in self._known.rooms:
            return self._known.rooms[stage.name]
        if stage.kind == "diffusion" and parts:  # a utilisation does not limit it
            return sum(p.nbytes for p in parts) + kv.USUAL_BYTES["diffusion"]
        if stage.utilization is None:
            raise PlanError(
                f"{self._known.deploy.path}: stage {stage.id} ({stage.name}) has neither swapd's "
                "worker nor a size: give it a gpu_memory_utilization, or give --room "
                f"{stage.name}=SIZE"
            )
        return round(stage.utilization * total)

    def _weights_of(self, stage: DeployStage) -> list[ModelComponent]:
        deploy, found = self._known.deploy, self._found
        if name := next((name for name in names_of(stage) if name in found), None):
            return [found[name]]
        if stage.kind == "diffusion" and (made_of := self._pipeline()):
            return made_of
        if len(deploy.stages) == 1 and len(found) == 1:
            return list(found.values())
        if not stage.ours:
            return []
        raise PlanError(
            f"{deploy.path}: the size of stage {stage.id}'s weights ({stage.name}) is unknown. "
            f"Give {stage.name}=SIZE, as in {stage.name}=17GiB, or name the folder of the model. "
            f"Known so far: {', '.join(found) or 'nothing'}"
        )

    def _pipeline(self) -> list[ModelComponent]:
        taken = {*STAGES, *(stage.name for stage in self._known.deploy.stages)}
        return [c for name, c in self._found.items() if name in COMPONENTS and name not in taken]

    def _parts(self, stage: DeployStage, layers: int) -> tuple[WeightGroup, ...]:
        weights, chunk = self._weights[stage.name], self._chunk
        if stage.kind == "diffusion" or not weights:
            return tuple(_of_pipeline(stage, c, chunk) for c in weights)
        whole = weights[0].share(stage.shards, stage.pipeline)
        named = stage.offload.cpu_offload_components
        if named is None or not stage.offload.cpu_offload_enabled:
            return (_by_layer(stage, weights[0], whole, layers, chunk, stays=stage.stays),)
        parts = list(self._inner(stage, named))
        rest = whole - sum(p.nbytes for p in parts)
        if rest < 0:
            raise PlanError(f"{stage.name} is smaller than its parts together; check their sizes")
        stays = stage.name not in named
        return (_by_layer(stage, weights[0], rest, layers, chunk, stays=stays), *parts)

    def _inner(self, stage: DeployStage, named: Sequence[str]) -> Iterator[WeightGroup]:
        for name in [f"{stage.name}.{part}" for part in named if part != stage.name]:
            if (component := self._found.get(name)) is not None:
                yield _part(name, component.share(stage.shards, stage.pipeline), self._chunk)
                continue
            self.notes.append(
                f"{name}: its size is unknown, so it is taken to stay like the rest; give "
                f"{name}=SIZE"
            )


class PlainServer(NamedTuple):
    """A `vllm serve` with swapd's worker, whose weights alone take turns."""

    name: str
    #: The GPU of each process; the most bytes of weights of a process.
    gpus: tuple[int, ...]
    weights: int
    #: Bytes outside the arena on each GPU: its KV cache, activations and buffers.
    room: int
    graphs: bool


def of_server(server: PlainServer, chunk: int = CHUNK_BYTES) -> Demand:
    return Demand(
        name=server.name,
        stage_id=0,
        kind="ar",
        ours=True,
        parts=(_part(server.name, server.weights, chunk),),
        room=server.room,
        graphs=server.graphs,
    )


def _claim(stage: DeployStage, parts: tuple[WeightGroup, ...], needs: Needs) -> Demand:
    streamed = any(part.streamed for part in parts)
    return Demand(
        name=stage.name,
        stage_id=stage.id,
        kind=stage.kind,
        ours=stage.ours,
        parts=parts,
        at_once=_as_whole(stage),
        room=needs.workspace,
        least_cache=needs.least_cache,
        most_cache=needs.most_cache,
        cache=needs.cache,
        said=needs.said,
        graphs=stage.graphs and stage.kind != "diffusion" and not streamed,
        eager=stage.graphs and streamed,
    )


# --- workspace and KV cache ------------------------------------------------------------------


def needs_of(
    stage: DeployStage, room: int | None, config: Mapping[str, Any] | None, chunk: int = CHUNK_BYTES
) -> Needs:
    """Return what a process of `stage` needs besides its weights, as far as its model is known.

    `room`: a given size of KV cache and workspace together, in bytes. Raises: PlanError.
    """
    if stage.kind != "ar":
        return _without_cache(stage, room)
    own, layout = kv.USUAL_BYTES["ar"], None
    try:
        if config:
            layout = kv.layout_of(config, stage.name)
            own = kv.workspace_of(config, stage.name, stage.step_tokens or kv.STEP_TOKENS)
    except kv.UncountedCache:
        if stage.kv_cache_bytes is None and room is None:
            raise
        layout = None
    if layout is None:
        return _uncounted(stage, room, own, chunk)
    cache = _cache(stage, layout)
    said = None if room is None else _left_of(stage, room, own, cache, chunk)
    return Needs(
        workspace=own,
        least_cache=kv.least_bytes(cache) if said is None else said,
        most_cache=_most(stage, cache),
        cache=cache,
        layers=layout.layers,
        said=said is not None,
        notes=tuple(_notes(stage, own, windows=layout.windows)),
    )


def _uncounted(stage: DeployStage, room: int | None, own: int, chunk: int) -> Needs:
    """Use the given or the usual size: the model is unknown. For a countable cache, the size in the
    file would be from an earlier plan."""
    said = stage.kv_cache_bytes if room is None else _left_of(stage, room, own, None, chunk)
    least = USUAL_CACHE if said is None else said
    notes = tuple(_notes(stage, own, unknown=said is None))
    return Needs(own, least, said=said is not None, notes=notes)


def _without_cache(stage: DeployStage, room: int | None) -> Needs:
    usual = kv.USUAL_BYTES[stage.kind]
    note = (
        f"{stage.name}: taken to need {usual >> 30} GiB of workspace; give --room {stage.name}=SIZE"
    )
    said = stage.kv_cache_bytes or 0
    return Needs(room or usual, said, said=True, notes=() if room else (note,))


def _most(stage: DeployStage, cache: kv.KvCache) -> int | None:
    if stage.max_requests is None or stage.caches_prefixes:
        return None
    return kv.least_bytes(cache, stage.max_requests)


def _left_of(stage: DeployStage, room: int, own: int, cache: kv.KvCache | None, chunk: int) -> int:
    left = max(0, room - own) // chunk * chunk
    least = round_up(kv.least_bytes(cache), chunk) if cache else chunk
    if left >= least:
        return left
    need, shorter = f"a KV cache takes {size(least)}", "a smaller max_num_batched_tokens"
    if cache:
        each = size(kv.token_bytes(cache))
        of = f"one request of its max_model_len, {cache.max_model_len} tokens of {each}"
        need = f"a KV cache for {of}, takes {size(least)}"
    if cache and (holds := kv.tokens_in(cache, left)):
        shorter = f"max_model_len: {holds} or less"
    raise PlanError(
        f"--room {stage.name}={size(room)} is too small: the workspace of {stage.name} alone takes "
        f"{size(own)}, and {need}. Give {given_room(stage.name, own + least)}, or set {shorter}"
    )


def given_room(name: str, nbytes: int) -> str:
    return f"--room {name}={-(-nbytes >> 20)}MiB"


def _cache(stage: DeployStage, layout: kv.KvLayout) -> kv.KvCache:
    length = stage.max_model_len or layout.longest
    if length is None:
        raise kv.UncountedCache(
            f"{stage.name}: neither it nor its model has a longest request; set max_model_len"
        )
    return kv.cache_of(
        layout,
        max_model_len=length,
        block_tokens=stage.block_tokens or kv.BLOCK_TOKENS,
        item_bytes=kv.item_bytes(stage.dtype, stage.kv_cache_dtype),
        shards=stage.shards,
        pipeline=stage.pipeline,
    )


def _notes(
    stage: DeployStage, own: int, *, unknown: bool = False, windows: bool = False
) -> Iterator[str]:
    name = stage.name
    yield f"{name}: taken to need {size(own)} of workspace, which vLLM measures when it starts"
    if unknown:
        yield (
            f"{name}: taken to have a KV cache of {size(USUAL_CACHE)}, since its model's "
            f"config.json is unknown: name its folder, or give --config FILE"
        )
    if windows:
        yield (
            f"{name}: its model has layers with a sliding window, which are counted as layers "
            f"without: vLLM may hold longer requests"
        )
    if stage.drafts:
        yield (f"{name}: the cache of its draft model is not counted; add it by --room {name}=SIZE")


# --- sizes ---------------------------------------------------------------------------------


def check(name: str, deploy: Deploy) -> None:
    stages = {n for s in deploy.stages for n in names_of(s)}
    pipeline = any(s.kind == "diffusion" for s in deploy.stages) and name in COMPONENTS
    if name.partition(".")[0] in stages or pipeline:
        return
    hint = meant(name, [s.name for s in deploy.stages], "its stages are")
    raise PlanError(f"{deploy.path} has no stage {name!r}; {hint}")


def names_of(stage: DeployStage) -> tuple[str, ...]:
    return tuple(filter(None, (stage.name, str(stage.id), _ALSO.get(stage.name))))


def _part(name: str, nbytes: int, chunk: int, *, stays: bool = False) -> WeightGroup:
    return WeightGroup(name, nbytes, nbytes, stays, chunk=chunk)


def _by_layer(
    stage: DeployStage, c: ModelComponent, nbytes: int, layers: int, chunk: int, *, stays: bool
) -> WeightGroup:
    """Return the stage's own weights, `nbytes`. They leave in groups of decoder layers, of the
    plugin's size, if the layers are known.

    In a component with blocks, the largest blocks are the decoder's layers.
    """
    whole = _part(stage.name, nbytes, chunk, stays=stays)
    if not layers or nbytes < layers:
        return whole
    layer = min(c.block_bytes // stage.shards or nbytes, nbytes // layers)
    whole = replace(whole, each=layers, each_bytes=layer)
    options = options_of(stage.additional, stage.name)
    if options.streams and options.resident != "auto":  # "auto" streams only where it does not fit
        return whole.streaming(options, nbytes)
    together = max(-(-PART_CHUNKS * chunk // layer), 1)
    if layers // together < 2:
        return whole
    return replace(whole, layers=layers // together, layer_bytes=together * layer)


def _as_whole(stage: DeployStage) -> bool:
    """Tell whether a step needs all parts. Only a diffusion pipeline may use them one by one."""
    if stage.kind != "diffusion":
        return True
    # a stage on several GPUs loads and leaves as one, however they divide it
    return len(stage.gpus) > 1 or stage.offload.cpu_offload_components == (_WHOLE,)


def _of_pipeline(stage: DeployStage, c: ModelComponent, chunk: int) -> WeightGroup:
    nbytes, stays = c.nbytes // stage.shards, stage.stays
    if _as_whole(stage):
        return _part(c.name, nbytes, chunk, stays=stays)
    named, mode = stage.offload.cpu_offload_components, stage.offload.mode
    stays |= named is not None and not any(fnmatchcase(c.name, one) for one in named)
    stays |= mode in ("model", "layerwise") and "vae" in c.name
    if c.name in DITS and c.blocks > SLOTS and mode in ("layerwise", "partial"):
        return _streamed(stage, grouped(c, chunk), stays, chunk)
    return _part(c.name, nbytes, chunk, stays=stays)


def _streamed(stage: DeployStage, c: ModelComponent, stays: bool, chunk: int) -> WeightGroup:
    block, rest = round_up(c.block_bytes, chunk), round_up(c.rest_bytes, chunk)
    kept = 0
    if stage.offload.mode == "partial":
        kept = max(0, c.nbytes - stage.offload.offloaded_bytes - c.rest_bytes) // c.block_bytes
    most = rest + c.blocks * block
    least = min(most, rest + (kept + SLOTS) * block)
    return WeightGroup(c.name, c.nbytes, least, stays, most, chunk=chunk)
