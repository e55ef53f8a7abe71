"""Settings of vLLM and vllm-omni that are not possible with swapd, and what to set instead."""

from collections.abc import Callable, Iterable
from typing import Any

from swapd_client.errors import SwapdError


class Unsupported(SwapdError, RuntimeError):
    """This stage's configuration is not possible with swapd; the message tells the change."""


#: Whether a configuration has a setting, and why that is refused.
Refusal = tuple[Callable[[Any], object], str]

_SLEEP_MODE = (
    "enable_sleep_mode would allocate the weights in a pool of vLLM's, but swapd has them. Leave "
    "it out: sleep and wake_up work without it, and a stage that sleeps leaves the device"
)
CHECKPOINT = (
    "a checkpoint of this process would lack its weights, which are in swapd's memory: "
    "end the stage, and start it again"
)
ELASTIC = (
    "elastic expert parallelism moves weights to other ranks while they are in use: set "
    "enable_elastic_ep: false"
)
#: Weight transfer backends that look up the weights' current addresses. Others may write to the
#: addresses in swapd, which are read-only.
_TRANSFERS = ("nccl", "ipc", "sparse_nccl", "sharded_rdt")

#: For AR and generation stages, by vLLM's configuration.
WORKER: tuple[Refusal, ...] = (
    (lambda c: getattr(c.model_config, "enable_sleep_mode", False), _SLEEP_MODE),
    (
        lambda c: c.parallel_config.enable_eplb,
        "EPLB moves weights while they are in use: set enable_eplb: false",
    ),
    (
        lambda c: (
            c.parallel_config.pipeline_parallel_size > 1
            and c.parallel_config.distributed_executor_backend != "mp"
        ),
        "the ranks of its pipeline may hear of a step one after the other, and their leases have "
        "another order: set distributed_executor_backend: mp",
    ),
    (
        lambda c: c.parallel_config.prefill_context_parallel_size > 1,
        "its ranks are not in the order of leases: set prefill_context_parallel_size: 1",
    ),
    (
        lambda c: c.parallel_config.data_parallel_size > 1 and c.model_config.is_moe,
        "replicas of a model with experts wait for each other in every step, unknown to the "
        "daemons: set data_parallel_size: 1, or use more tensor_parallel_size",
    ),
    (
        lambda c: (
            c.weight_transfer_config is not None
            and c.weight_transfer_config.backend not in _TRANSFERS
        ),
        "this weight transfer may write to the weights' first addresses: "
        f"set the backend of weight_transfer_config to one of {', '.join(_TRANSFERS)}",
    ),
)


#: For diffusion stages, by vllm-omni's configuration.
DIFFUSION: tuple[Refusal, ...] = (
    (lambda c: c.enable_sleep_mode, _SLEEP_MODE),
    (
        lambda c: c.enable_distributed_layerwise_offload,
        "vllm-omni's own offloading moves weights too: set enable_layerwise_offload instead of "
        "enable_distributed_layerwise_offload, for swapd takes over that one",
    ),
    (
        lambda c: c.parallel_config.use_hsdp,
        "HSDP keeps parts of the weights on other GPUs: set use_hsdp: false",
    ),
)


def refuse(refusals: Iterable[Refusal], config: Any, where: str) -> None:
    for has, why in refusals:
        if has(config):
            raise Unsupported(f"{where}: {why}")


def refuse_type(worker: Any, stage: str) -> None:
    """Refuse a worker of other stages than `_of_type`, vllm-omni's `worker_type`; "": vLLM's own.
    A class without it is for any.
    """
    given = getattr(worker.model_config, "worker_type", None)
    if given and getattr(worker, "_of_type", given) != given:
        right = "ARWorker" if given == "ar" else "GenerationWorker"
        raise Unsupported(
            f"stage {stage!r} of vllm-omni computes nothing right with {type(worker).__name__}: "
            f"set worker_cls: swapd_client.vllm.omni.{right}"
        )
