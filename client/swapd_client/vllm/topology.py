"""The stages before and after a stage, from its settings (`order`), or else from vllm-omni.

Reads vllm-omni only if there is a configuration of vllm-omni.
"""

from typing import Any

from swapd_client.vllm.options import Options
from swapd_client.vllm.order import ALONE, Neighbours, among, in_order


def neighbours_of(options: Options, model_config: Any, name: str) -> Neighbours:
    """Neighbours of the stage that is called `name` in the daemon.

    `model_config`: vLLM's; vllm-omni's also has the stage and the pipeline. Raises:
    InvalidSettings.
    """
    if options.order is not None:
        return in_order(options.order, name)
    if (stage := getattr(model_config, "stage_id", None)) is None:
        return ALONE
    sources, names = _topology(model_config, stage)
    return among(sources, names, stage)


def _topology(config: Any, stage: int) -> tuple[dict[int, tuple[int, ...]], dict[int, str]]:
    """Sources and names of the stages of the pipeline, from vllm-omni; empty if it is unknown.

    A worker process does not get the topology: it is in vllm-omni's code.
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
