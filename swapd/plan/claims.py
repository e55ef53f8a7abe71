"""What each stage of a deploy file wants of each GPU, by the file and the sizes of weights."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from swapd.plan.advise import SLOTS, Component, PlanError, grouped, in_chunks
from swapd.plan.deploy import Deploy, Stage
from swapd.plan.shares import LEAST_ROOM, Claim, Part
from swapd.plan.sizes import COMPONENTS, DITS, STAGES

#: Stages that checkpoints call otherwise.
_ALSO = {"code2wav": "token2wav", "token2wav": "code2wav"}
#: How a pipeline says that it comes and goes as one.
_WHOLE = "."
#: Activations of a stage that says how large its KV cache is.
_ACTIVATIONS = LEAST_ROOM["generation"]


def of(
    deploy: Deploy,
    components: Sequence[Component],
    rooms: Mapping[str, int],
    totals: Mapping[int, int],
) -> tuple[dict[int, list[Claim]], list[str]]:
    """The claims on each GPU, by its number, and notes about what was assumed.

    `components` are stages, parts of them (`thinker.visual`), or what a diffusion stage is made
    of; `rooms` is what was said of KV cache and activations, by stage. Raises: PlanError.
    """
    found = {c.name: c for c in components}
    sizes = {stage.name: _weights(stage, deploy, found) for stage in deploy.stages}
    notes: list[str] = []
    by_gpu: dict[int, list[Claim]] = {gpu: [] for s in deploy.stages for gpu in s.gpus}
    for stage in deploy.stages:
        parts = _parts(stage, sizes[stage.name], found, notes)
        for gpu in stage.gpus:
            by_gpu[gpu].append(_claim(deploy, stage, parts, rooms, totals[gpu]))
        if stage.ours and stage.name not in rooms:
            notes.append(_assumed(stage))
    return dict(sorted(by_gpu.items())), notes


def _claim(
    deploy: Deploy, stage: Stage, parts: tuple[Part, ...], rooms: Mapping[str, int], total: int
) -> Claim:
    said = rooms.get(stage.name)
    return Claim(
        name=stage.name,
        stage_id=stage.id,
        kind=stage.kind,
        ours=stage.ours,
        parts=parts,
        at_once=_as_whole(stage),
        room=said or (_room(stage) if stage.ours else _by_itself(deploy, stage, parts, total)),
        said=said is not None or stage.kv_cache_bytes is not None,
        graphs=stage.graphs and stage.kind != "diffusion",
    )


def _room(stage: Stage) -> int:
    if stage.kv_cache_bytes is not None:
        return stage.kv_cache_bytes + _ACTIVATIONS
    return LEAST_ROOM[stage.kind]


def _by_itself(deploy: Deploy, stage: Stage, parts: Sequence[Part], total: int) -> int:
    """What a stage without swapd takes, weights included."""
    if stage.kind == "diffusion" and parts:  # a utilisation does not limit it
        return sum(p.nbytes for p in parts) + LEAST_ROOM["diffusion"]
    if stage.utilization is None:
        raise PlanError(
            f"{deploy.path}: stage {stage.id} ({stage.name}) has not swapd's worker, and does not "
            f"say what it takes: give it a gpu_memory_utilization, or say --room {stage.name}=SIZE"
        )
    return round(stage.utilization * total)


def _assumed(stage: Stage) -> str:
    least = LEAST_ROOM[stage.kind] >> 30
    if stage.kv_cache_bytes is not None:
        return f"{stage.name}: its kv_cache_memory_bytes, and {_ACTIVATIONS >> 30} GiB activations"
    what = "activations" if stage.kind == "diffusion" else "KV cache and activations"
    return f"{stage.name}: taken to need {least} GiB for {what}; say --room {stage.name}=SIZE"


# --- sizes ---------------------------------------------------------------------------------


def check(name: str, deploy: Deploy) -> None:
    """That a size given by hand is of something in the file. Raises: PlanError."""
    stages = {n for s in deploy.stages for n in (s.name, str(s.id), _ALSO.get(s.name))}
    pipeline = any(s.kind == "diffusion" for s in deploy.stages) and name in COMPONENTS
    if name.partition(".")[0] in stages or pipeline:
        return
    names = [s.name for s in deploy.stages]
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"its stages are: {', '.join(names)}"
    raise PlanError(f"{deploy.path} has no stage {name!r}; {hint}")


def _weights(stage: Stage, deploy: Deploy, found: Mapping[str, Component]) -> list[Component]:
    """The whole of a stage's weights: one component, or what a diffusion stage is made of."""
    for name in (stage.name, str(stage.id), _ALSO.get(stage.name, "")):
        if name in found:
            return [found[name]]
    if stage.kind == "diffusion":
        taken = {s.name for s in deploy.stages}
        made_of = [c for n, c in found.items() if n in COMPONENTS and n not in (*taken, *STAGES)]
        if made_of:
            return made_of
    if len(deploy.stages) == 1 and len(found) == 1:
        return list(found.values())
    if not stage.ours:
        return []
    raise PlanError(
        f"{deploy.path}: how large are the weights of stage {stage.id} ({stage.name})? Say "
        f"{stage.name}=SIZE, as in {stage.name}=17GiB, or name the folder of the model. "
        f"Known so far: {', '.join(found) or 'nothing'}"
    )


def _parts(
    stage: Stage, weights: Sequence[Component], found: Mapping[str, Component], notes: list[str]
) -> tuple[Part, ...]:
    """What of a stage comes and goes by itself, on one of its GPUs."""
    if stage.kind == "diffusion":
        return tuple(_of_pipeline(stage, c) for c in weights)
    if not weights:
        return ()
    whole = weights[0].nbytes // stage.shards
    named = stage.offload.cpu_offload_components if stage.offload.cpu_offload_enabled else None
    if named is None:
        return (Part(stage.name, whole, whole, stays=stage.stays),)
    inner = {n: found.get(f"{stage.name}.{n}") for n in named if n != stage.name}
    for name, component in inner.items():
        if component is None:
            notes.append(
                f"{stage.name}.{name}: its size is not known, so it is taken to stay like the "
                f"rest; say {stage.name}.{name}=SIZE"
            )
    parts = [
        Part(f"{stage.name}.{n}", c.nbytes // stage.shards, c.nbytes // stage.shards)
        for n, c in inner.items()
        if c is not None
    ]
    rest = whole - sum(p.nbytes for p in parts)
    if rest < 0:
        raise PlanError(f"{stage.name} is smaller than its parts together; check their sizes")
    return (Part(stage.name, rest, rest, stays=stage.name not in named), *parts)


def _as_whole(stage: Stage) -> bool:
    """Whether a step needs all of the stage: any stage but a pipeline that is used by parts."""
    if stage.kind != "diffusion":
        return True
    # on several GPUs it comes and goes as one, however it is divided among them
    return len(stage.gpus) > 1 or stage.offload.cpu_offload_components == (_WHOLE,)


def _of_pipeline(stage: Stage, c: Component) -> Part:
    """A component of a diffusion stage: those in use come in one after the other."""
    nbytes, stays = c.nbytes // stage.shards, stage.stays
    if _as_whole(stage):
        return Part(c.name, nbytes, nbytes, stays)
    named, mode = stage.offload.cpu_offload_components, stage.offload.mode
    stays |= named is not None and not any(fnmatchcase(c.name, one) for one in named)
    stays |= mode in ("model", "layerwise") and "vae" in c.name
    if c.name in DITS and c.blocks > SLOTS and mode in ("layerwise", "partial"):
        return _streamed(stage, grouped(c), stays)
    return Part(c.name, nbytes, nbytes, stays)


def _streamed(stage: Stage, c: Component, stays: bool) -> Part:
    """One that comes in by blocks: some of them are kept, and two pass through."""
    block, rest = in_chunks(c.block_bytes), in_chunks(c.rest_bytes)
    kept = 0
    if stage.offload.mode == "partial":
        kept = max(0, c.nbytes - stage.offload.offloaded_bytes - c.rest_bytes) // c.block_bytes
    most = rest + c.blocks * block
    return Part(c.name, c.nbytes, min(most, rest + (kept + SLOTS) * block), stays, most)
