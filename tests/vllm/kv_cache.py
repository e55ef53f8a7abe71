"""vLLM's own figures of the KV cache of a model: its layers without weights, and its arithmetic.

Models are built on torch's meta device, by the classes that serve them, from a config.json alone.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm_omni.engine.arg_utils import OmniEngineArgs

#: Arguments of every engine, without the features that do not matter here.
ARGUMENTS = {"skip_tokenizer_init": True, "load_format": "dummy", "enforce_eager": True}
#: One layer after the other, each by blocks. An engine asks its backends; sizes are the same.
LAYOUT = "LBNHC"
#: The number of processes that KV heads are divided among.
SHARDS = (1, 2, 4, 8, 16)


def figures(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each case: `config` (a config.json), `arguments` (an engine's), `memory` (bytes, several).

    Returns bytes of one request, of a block of the pool, and, for each `memory`, the tokens of the
    cache that vLLM would allocate there, or the reason why it would not start.
    """
    said = []
    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        for number, case in enumerate(cases):
            model = Path(folder, str(number))
            model.mkdir()
            (model / "config.json").write_text(json.dumps(case["config"]))
            said.append(_figures(model, case["arguments"], case["memory"]))
    return said


def _figures(model: Path, arguments: Mapping[str, Any], memory: Sequence[int]) -> dict[str, Any]:
    kind = OmniEngineArgs if "model_stage" in arguments else EngineArgs
    config = kind(model=str(model), **ARGUMENTS, **arguments).create_engine_config()
    config.cache_config.kv_cache_layout = LAYOUT
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"), set_default_torch_dtype(torch.bfloat16):
            initialize_model(vllm_config=config)
        specs = _specs(config)
        groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs))
        return {
            "max_model_len": config.model_config.max_model_len,
            "layers": len(specs),
            "heads": [
                config.model_config.get_num_kv_heads(SimpleNamespace(tensor_parallel_size=shards))
                for shards in SHARDS
            ],
            "request": kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups),
            "sum": kv_cache_utils.max_memory_usage_bytes(config, specs.values()),
            "block": kv_cache_utils._pool_bytes_per_block(groups) if groups else 0,
            "caches": [_cache(config, specs, nbytes) for nbytes in memory],
        }


def _specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """The cache of each layer, as a model runner asks for it."""
    layers = config.compilation_config.static_forward_context
    asked = {name: getattr(layer, "get_kv_cache_spec", None) for name, layer in layers.items()}
    found = {name: spec(config) for name, spec in asked.items() if spec is not None}
    return {name: spec for name, spec in found.items() if spec is not None}


def _cache(config: VllmConfig, specs: dict[str, KVCacheSpec], nbytes: int) -> int | str:
    try:
        (made,) = kv_cache_utils.get_kv_cache_configs(config, [dict(specs)], [nbytes])
    except ValueError as exc:
        return str(exc)
    return int(made.num_blocks * config.cache_config.block_size)
