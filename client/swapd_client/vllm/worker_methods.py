"""Uses of weights by the public methods of vLLM's and vllm-omni's workers.

Lists all methods of the supported versions, of GPU and CPU workers; a version need not have each of
them. vLLM calls workers by these names. List a new method here before vLLM can call it;
`tests/vllm/test_worker_methods.py` compares. Imports neither vLLM nor torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

_Kind = TypeVar("_Kind", bound=type)


class WorkerMethods(NamedTuple):
    """Names of methods, by their use of weights."""

    #: Connect, load or end the stage.
    life: frozenset[str]
    #: Read weights: under a lease.
    leased: frozenset[str]
    #: Write to weights, or begin, continue or end such writes: under `Stage.changing`.
    changing: frozenset[str]
    #: Not possible with swapd: raise `Unsupported`.
    refused: frozenset[str]
    #: Use no weights: vLLM's own methods.
    without: frozenset[str]

    @property
    def known(self) -> frozenset[str]:
        return self.life | self.leased | self.changing | self.refused | self.without


#: Of `worker.SwapdWorkerMixin`: workers of vLLM, and of vllm-omni's AR and generation stages.
WORKER = WorkerMethods(
    life=frozenset({"init_device", "load_model", "shutdown"}),
    leased=frozenset(
        {
            "add_lora",
            "apply_model",
            "compile_or_warm_up_model",
            "compute_weight_checksums",  # since 0.32
            "determine_available_memory",
            "execute_dummy_batch",
            "execute_model",
            "initialize_from_config",
            "pin_lora",
            "sample_tokens",
            "save_sharded_state",
            "save_tensorized_model",
        }
    ),
    changing=frozenset(
        {
            "finish_weight_update",
            "reload_weights",
            "reset_weights",  # since 0.32
            "start_draft_weight_update",
            "start_weight_update",
            "update_weights",
        }
    ),
    refused=frozenset(
        {
            "checkpoint_prepare",
            "checkpoint_restore",
            "elastic_ep_execute",
        }
    ),
    without=frozenset(
        {
            "annotate_profile",
            "check_health",
            "discard",  # since 0.31
            "encoder_loaded",  # vllm-omni's
            "get_cache_block_size_bytes",
            "get_compilation_match_table",
            "get_draft_model",
            "get_encoder_timing_stats",
            "get_kv_cache_spec",
            "get_kv_connector_handshake_metadata",
            "get_model",
            "get_model_inspection",
            "get_simple_cpu_offload_num_cpu_blocks",  # since 0.33
            "get_supported_kv_cache_layouts",
            "get_supported_tasks",
            "handle_ft_command",
            "handle_sleep_task",  # vllm-omni's
            "handle_wake_task",  # vllm-omni's
            "init_weight_transfer_engine",  # for backends that `worker` accepts
            "list_loras",
            "profile",
            "randomize_dummy_inputs",  # since 0.31
            "release_late_interaction_query_cache",  # since 0.32
            "remove_lora",
            "reset_encoder_cache",
            "reset_mm_cache",
            "set_kv_cache_layout",
            "shutdown_weight_transfer_engine",  # since 0.32
            "sleep",  # gives the lease back
            "sleep_mode_backend",
            "supports_draft_weight_updates",
            "synchronize_device",
            "take_draft_token_ids",
            "update_config",
            "update_max_model_len",
            "vocab_size",
            "wake_up",  # takes a lease, and reads nothing
        }
    ),
)

#: Of `diffusion.DiffusionExtension`: workers of vllm-omni's diffusion stages.
DIFFUSION = WorkerMethods(
    life=frozenset({"init_lora_manager", "load_model", "re_init_pipeline", "shutdown"}),
    leased=frozenset(
        {
            "add_lora",
            "determine_available_kv_memory",
            "execute_model",
            "execute_model_batch",
            "execute_stepwise",
            "submit_interaction",
        }
    ),
    changing=frozenset(),
    refused=frozenset(),
    without=frozenset(
        {
            "close_ar_diffusion_session",
            "get_kv_cache_specs",
            "handle_sleep_task",
            "handle_wake_task",
            "init_device",
            "list_loras",
            "pin_lora",
            "prepare_kv_for_forward",
            "profile",
            "remove_diffusion_kv_requests",
            "remove_lora",
            "reset_ar_diffusion_session",
            "set_kv_cache_configs",
            "sleep",
            "synchronize_device",
            "wake_up",
        }
    ),
)


def during(
    context: Callable[[Any], AbstractContextManager[object]], *names: str
) -> Callable[[_Kind], _Kind]:
    """Override these methods of a class: each runs as before, in `context(self)`."""

    def override(kind: _Kind) -> _Kind:
        for name in names:
            setattr(kind, name, _in_context(kind, name, context))
        return kind

    return override


def _in_context(
    kind: type, name: str, context: Callable[[Any], AbstractContextManager[object]]
) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with context(self):
            return getattr(super(kind, self), name)(*args, **kwargs)

    call.__name__, call.__qualname__ = name, f"{kind.__name__}.{name}"
    return call
