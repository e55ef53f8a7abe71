"""The stages before and after a stage in the order of requests, by their names in the daemon.

Imports vllm-omni only in stages of vllm-omni.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from swapd_client.errors import InvalidArgument
from swapd_client.vllm.options import Options


class Neighbours(NamedTuple):
    """Neighbours of one stage. After the last stages come the first, with the next request."""

    after: tuple[str, ...] = ()
    #: Stages that are done with a request when this stage gets it.
    before: tuple[str, ...] = ()


ALONE = Neighbours()


def neighbours_of(options: Options, model_config: Any, name: str) -> Neighbours:
    """Raises: InvalidArgument."""
    if options.order is not None:
        return in_order(options.order, name)
    if (stage := getattr(model_config, "stage_id", None)) is None:
        return ALONE
    sources, names = _topology(model_config, stage)
    return among(sources, names, stage)


def in_order(order: Sequence[str], name: str) -> Neighbours:
    """Raises: InvalidArgument if `order` lacks `name`."""
    if not order:
        return ALONE
    if name not in order:
        raise InvalidArgument(
            f"{name}: order names {', '.join(order)}, but not this stage: name all stages of the "
            "pipeline by their names in swapd"
        )
    sources = {stage: (stage - 1,) if stage else () for stage in range(len(order))}
    return among(sources, dict(enumerate(order)), order.index(name))


def among(
    sources: Mapping[int, Collection[int]], names: Mapping[int, str], stage: int
) -> Neighbours:
    inner = {source for of in sources.values() for source in of}
    firsts = [one for one, of in sources.items() if not of]
    after = [one for one, of in sources.items() if stage in of] or firsts
    before = sources.get(stage) or sources.keys() - inner
    return Neighbours(_named(after, names, {stage}), _named(before, names, {stage, *after}))


def _named(
    stages: Iterable[int], names: Mapping[int, str], without: Collection[int]
) -> tuple[str, ...]:
    return tuple(names[one] for one in sorted(stages) if one not in without)


def _topology(config: Any, stage: int) -> tuple[dict[int, tuple[int, ...]], dict[int, str]]:
    """Return sources and names of the stages, empty if unknown, from vllm-omni's code.

    A worker process does not get the topology.
    """
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, resolve_pipeline_config

    kind = getattr(config.hf_config, "model_type", None)
    found = [resolve_pipeline_config(kind, config.hf_config)] if kind in OMNI_PIPELINES else []
    found += [one for one in OMNI_PIPELINES.values() if not callable(one)]
    for pipeline in found:
        if pipeline is not None and _has(pipeline, config, stage):
            stages = pipeline.stages
            return (
                {one.stage_id: tuple(one.input_sources) for one in stages},
                {one.stage_id: one.model_stage for one in stages},
            )
    return {}, {}


def _has(pipeline: Any, config: Any, stage: int) -> bool:
    one = pipeline.get_stage(stage)
    if one is None or one.model_stage != config.model_stage:
        return False
    arch = one.model_arch or pipeline.model_arch
    return not arch or arch == config.model_arch
