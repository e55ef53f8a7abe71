"""Ways to run one model on several GPUs that do not go with swapd."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tests.vllm.engines import Nursery


def refusals(asked: Sequence[tuple[bool, Mapping[str, object]]]) -> list[str]:
    """The plugin's refusal of each, in a process that has vLLM."""
    from swapd_client.vllm.refusals import WORKER, Unsupported, refuse

    nothing: Any = SimpleNamespace(cpu_offload_gb=0, offload_group_size=0)

    def said(experts: bool, sizes: Mapping[str, object]) -> str:
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(enable_sleep_mode=False, is_moe=experts),
            parallel_config=SimpleNamespace(enable_eplb=False, **sizes),
            offload_config=SimpleNamespace(uva=nothing, prefetch=nothing),
            weight_transfer_config=None,
        )
        try:
            refuse(WORKER, config, "stage 'thinker'")
        except Unsupported as exc:
            return str(exc)
        return ""

    return [said(*one) for one in asked]


ONE_EACH: Mapping[str, object] = {
    "distributed_executor_backend": "mp",
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "data_parallel_size": 1,
}
EXPERTS, DENSE = True, False

CASES: Sequence[tuple[str, bool, dict[str, object]]] = (
    (
        "distributed_executor_backend: mp",
        DENSE,
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
    ),
    ("prefill_context_parallel_size: 1", DENSE, {"prefill_context_parallel_size": 2}),
    ("data_parallel_size: 1", EXPERTS, {"data_parallel_size": 2}),
    ("", DENSE, {"data_parallel_size": 2}),  # these replicas do not wait for each other
    ("", DENSE, {"pipeline_parallel_size": 2}),
)


def test_ranks_outside_the_order_are_refused_with_what_to_set_and_replicas_are_not(
    nursery: Nursery,
) -> None:
    """Configurations with only the fields that the plugin reads."""
    asked = [(experts, {**ONE_EACH, **sizes}) for _, experts, sizes in CASES]
    answers = nursery.call(f"{__name__}:{refusals.__name__}", asked)
    for (what, *_), said in zip(CASES, answers, strict=True):
        assert said.startswith("stage 'thinker': ") if what else not said
        assert (f"set {what}" in said) == bool(what)
