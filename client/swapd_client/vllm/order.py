"""Which stages the requests of a stage go on to, and which they come from.

As a stage's settings say (`order`), or else vllm-omni's topology. Names are those that the stages
have in the daemon. vllm-omni is looked at only where its own configuration is given.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from swapd_client.errors import InvalidSettings
from swapd_client.vllm.options import Options


class Neighbours(NamedTuple):
    """Of one stage. After the last stages come the first again: the next request starts there."""

    after: tuple[str, ...] = ()
    #: Those that have done with a request when this stage has it.
    before: tuple[str, ...] = ()


#: Of a stage that no other is known to come after.
ALONE = Neighbours()


def neighbours_of(options: Options, model_config: Any, name: str) -> Neighbours:
    """Those of the stage that is called `name` in the daemon.

    `model_config`: vLLM's; vllm-omni's says which stage of which pipeline it is. Raises:
    InvalidSettings.
    """
    if options.order is not None:
        return in_order(options.order, name)
    if (stage := getattr(model_config, "stage_id", None)) is None:
        return ALONE
    sources, names = _topology(model_config, stage)
    return among(sources, names, stage)


def in_order(order: Sequence[str], name: str) -> Neighbours:
    """Of stages that follow each other. Raises: InvalidSettings if `name` is none of them."""
    if not order:
        return ALONE
    if name not in order:
        raise InvalidSettings(
            f"{name}: order names {', '.join(order)}, and not this stage: name all stages of the "
            "pipeline, as they are called in swapd"
        )
    stages = range(len(order))
    sources = {stage: (stage - 1,) if stage else () for stage in stages}
    return among(sources, dict(zip(stages, order, strict=True)), order.index(name))


def among(sources: Mapping[int, Iterable[int]], names: Mapping[int, str], stage: int) -> Neighbours:
    """By number, which stages each gets its requests from, and what it is called."""
    inner = {source for of in sources.values() for source in of}
    firsts = [one for one, of in sources.items() if not tuple(of)]
    lasts = [one for one in sources if one not in inner]
    after = [one for one, of in sources.items() if stage in of] or firsts
    before = list(sources.get(stage, ())) or lasts
    return Neighbours(
        tuple(names[one] for one in after if one != stage),
        tuple(names[one] for one in before if one != stage and one not in after),
    )


def _topology(config: Any, stage: int) -> tuple[dict[int, tuple[int, ...]], dict[int, str]]:
    """What vllm-omni has registered for the pipeline that a stage is of; nothing if it is unknown.

    The topology is code of vllm-omni's, and no part of what a worker process is given.
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
