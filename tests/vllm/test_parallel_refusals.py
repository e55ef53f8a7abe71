"""Ways to run one model on several GPUs that do not go with swapd, and flags of vLLM that do not go
with its options."""

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


def taken_over(cases: Sequence[tuple[Mapping[str, float], object]]) -> list[object]:
    """Of flags of vLLM and options of swapd: the options that result, or why there are none."""
    from swapd_client import InvalidArgument
    from swapd_client.vllm.worker_start import WorkerStart

    def after(flags: Mapping[str, float], options: object) -> object:
        all_flags: Any = {"cpu_offload_gb": 0, "offload_group_size": 0, "offload_num_in_group": 1}
        said: Any = SimpleNamespace(
            **all_flags | flags, cpu_offload_params=(), offload_params=(), model="thinker"
        )
        worker: Any = WorkerStart()
        worker.model_config = said
        worker.parallel_config = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
        worker.vllm_config = SimpleNamespace(
            additional_config={"swapd": options},
            offload_config=SimpleNamespace(offload_backend="auto", uva=said, prefetch=said),
        )
        try:
            worker._take_over_offloading()
        except InvalidArgument as exc:
            return str(exc)
        return worker.vllm_config.additional_config["swapd"]

    return [after(*one) for one in cases]


def test_flags_of_vllm_and_options_that_say_otherwise_are_refused(nursery: Nursery) -> None:
    gb, groups = {"cpu_offload_gb": 8}, {"offload_group_size": 8, "offload_num_in_group": 2}
    cases: Sequence[tuple[Mapping[str, float], object]] = (
        (gb, {"kv": "auto"}),
        (gb, {"cpu_offload_gb": None}),
        (groups, {"offload_group_size": 8}),
        (gb, {"cpu_offload_gb": 4}),
        (groups, {"offload_num_in_group": 1}),
        (gb, "auto"),
    )
    *fit, more, other, none = nursery.call(f"{__name__}:{taken_over.__name__}", cases)
    assert fit == [{"kv": "auto", **gb}, gb, groups]
    assert "swapd.cpu_offload_gb: 4 contradicts vLLM's own flags (cpu_offload_gb: 8)" in more
    assert "swapd.offload_num_in_group: 1 contradicts" in other
    assert "must have keys" in none


def test_ranks_outside_the_order_are_refused_with_what_to_set_and_replicas_are_not(
    nursery: Nursery,
) -> None:
    """Configurations with only the fields that the plugin reads."""
    asked = [(experts, {**ONE_EACH, **sizes}) for _, experts, sizes in CASES]
    answers = nursery.call(f"{__name__}:{refusals.__name__}", asked)
    for (what, *_), said in zip(CASES, answers, strict=True):
        assert said.startswith("stage 'thinker': ") if what else not said
        assert (f"set {what}" in said) == bool(what)
