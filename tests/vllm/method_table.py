"""Uses of weights by the public methods of vLLM's and vllm-omni's workers.

All methods of the supported versions, of GPU and CPU workers; a version need not have each of them.
vLLM calls workers by these names. Neither vLLM nor torch is imported.
"""

from typing import NamedTuple


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
