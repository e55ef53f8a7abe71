"""The models of the overlays, as plain numbers: sizes and shapes, no weights.

`QWEN3` has the fields of the public config.json of Qwen3-Omni-30B-A3B-Instruct that describe a
decoder, `QWEN2_5` those of Qwen2.5-Omni-7B, and `QWEN2_5_3B` of the 3B. The defaults of
transformers' classes belong to other models (Qwen3OmniMoeTextConfig has 28 layers, the thinker 48),
so they are not used. `..._BYTES` are the bytes of the parameters that transformers makes of these
configurations, in bfloat16, and for Qwen2.5-Omni's token2wav in float32, as it is stored.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.plan import test_sizes

_QWEN3_THINKER = {
    "model_type": "qwen3_omni_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 768,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 65536,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000,
        "mrope_section": [24, 20, 20],
    },
}
_QWEN3_TALKER = {
    **_QWEN3_THINKER,
    "model_type": "qwen3_omni_moe_talker_text",
    "hidden_size": 1024,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 2048,
    "moe_intermediate_size": 384,
    "num_experts_per_tok": 6,
    "shared_expert_intermediate_size": 768,
    "vocab_size": 3072,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "model_type": "qwen3_omni_moe",
    "dtype": "bfloat16",
    "thinker_config": {
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": _QWEN3_THINKER,
        "vision_config": {
            "image_size": 768,
            "out_hidden_size": 2048,
            "apply_vit_abs_pos_embed": True,
        },
        "audio_config": {"output_dim": 2048},
    },
    "talker_config": {
        "text_config": _QWEN3_TALKER,
        "code_predictor_config": {"num_hidden_layers": 5, "num_key_value_heads": 8},
        "num_code_groups": 16,
        "thinker_hidden_size": 2048,
        "spatial_merge_size": 2,
    },
    "code2wav_config": {"num_hidden_layers": 8, "num_attention_heads": 16, "sliding_window": 72},
}
QWEN3_BYTES: dict[str, int] = {
    **{f"thinker.model.layers.{n}.w": 1246241280 for n in range(48)},
    "thinker.visual.w": 1077262816,
    "thinker.audio_tower.w": 1295854336,
    "thinker.w": 1245712384,
    **{f"talker.model.layers.{n}.w": 316414464 for n in range(20)},
    "talker.w": 320903680,
    "code2wav.w": 432033154,
}

QWEN2_5: dict[str, Any] = {
    "architectures": ["Qwen2_5OmniModel"],
    "model_type": "qwen2_5_omni",
    "thinker_config": {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": {
            "model_type": "qwen2_5_omni_text",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 32768,
            "use_sliding_window": False,
        },
    },
    "talker_config": {
        "model_type": "qwen2_5_omni_talker",
        "hidden_size": 896,
        "head_dim": 128,
        "intermediate_size": 18944,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
}
QWEN2_5_BYTES: dict[str, int] = {
    "thinker.model.embed_tokens.weight": 1089994752,
    **{f"thinker.model.layers.{n}.w": 466115584 for n in range(28)},
    "thinker.w": 3722396672,
    **{f"talker.model.layers.{n}.w": 109191680 for n in range(24)},
    "talker.w": 82120192,
    "token2wav.w": 1796205056,
}
QWEN2_5_3B: dict[str, Any] = {
    **QWEN2_5,
    "thinker_config": {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": {
            **QWEN2_5["thinker_config"]["text_config"],
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
        },
    },
    "talker_config": {
        **QWEN2_5["talker_config"],
        "head_dim": 64,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}
QWEN2_5_3B_BYTES: dict[str, int] = {
    "thinker.model.embed_tokens.weight": 622329856,
    **{f"thinker.model.layers.{n}.w": 154153984 for n in range(36)},
    "thinker.w": 3235055616,
    **{f"talker.model.layers.{n}.w": 29824768 for n in range(24)},
    "talker.w": 53415424,
    "token2wav.w": 1796205056,
}


def write(folder: Path, config: dict[str, Any], sizes: dict[str, int]) -> Path:
    """A folder like that of a model: its configuration, and headers of files without weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    kinds = {name: "F32" if name.startswith("token2wav") else "BF16" for name in sizes}
    tensors = {name: (kinds[name], nbytes) for name, nbytes in sizes.items()}
    test_sizes.write(folder / "model.safetensors", tensors)
    return folder


def qwen3(folder: Path) -> Path:
    """A folder like Qwen3-Omni's."""
    return write(folder, QWEN3, QWEN3_BYTES)


_FACTORY = """
import json
import sys
from pathlib import Path
from vllm_omni.config.pipeline_registry import OMNI_PIPELINES

print("vLLM-Omni logs to stdout")

class StageConfigFactory:
    @staticmethod
    def try_infer_model_type(model, trust_remote_code):
        path = Path(model, "config.json")
        return json.loads(path.read_text()).get("model_type") if path.exists() else None

    @classmethod
    def get_pipeline_config(cls, model, trust_remote_code):
        entry = OMNI_PIPELINES.get(cls.try_infer_model_type(model, trust_remote_code))
        return entry(None) if callable(entry) else entry
"""
_REGISTRY = """
from enum import Enum
from types import SimpleNamespace as Config

class Kind(Enum):
    AR, GENERATION, DIFFUSION = "llm_ar", "llm_generation", "diffusion"

def stages(*named):
    return [
        Config(stage_id=number, model_stage=name, execution_type=kind)
        for number, (name, kind) in enumerate(named)
    ]

QWEN3 = Config(
    model_type="qwen3_omni_moe", default_deploy_config_name="qwen3.yaml",
    stages=stages(("thinker", Kind.AR), ("talker", Kind.AR)),
)
TINY = Config(
    model_type="tiny", default_deploy_config_name="tiny.yaml",
    stages=stages(("thinker", Kind.AR), ("code2wav", Kind.GENERATION), ("dit", Kind.DIFFUSION)),
)
QWEN2_5 = Config(
    model_type="qwen2_5_omni", default_deploy_config_name="qwen2_5.yaml",
    stages=stages(("thinker", Kind.AR), ("talker", Kind.AR), ("code2wav", Kind.GENERATION)),
)
BARE = Config(
    model_type="bare", default_deploy_config_name=None, stages=stages(("painter", Kind.DIFFUSION))
)
OMNI_PIPELINES = {"qwen3_omni_moe": lambda config: QWEN3, "tiny": TINY, "bare": BARE,
                  "qwen2_5_omni": QWEN2_5}
"""
#: As vLLM-Omni's own, with all stages on one GPU.
_DEPLOY = """
async_chunk: false
stages:
  - {stage_id: 0, devices: "0", enforce_eager: true, max_num_seqs: 1, enable_prefix_caching: false}
  - {stage_id: 1, devices: "0", enforce_eager: true, max_num_seqs: 1, enable_prefix_caching: false}
  - {stage_id: 2, devices: "0", enforce_eager: true, max_num_seqs: 1, enable_prefix_caching: false}
"""


def installed(site: Path, qwen3: Path, *, works: bool = True) -> Path:
    """A command whose Python has a vLLM-Omni in `site`, with `qwen3` as a deploy file.

    It imports only if it `works`. Its transformers are a mapping alone: the real ones import for
    seconds of every answer, and `tests/vllm/test_deploy.py` asks a vLLM-Omni that has them.
    """
    (site / "transformers").mkdir(parents=True, exist_ok=True)
    (site / "transformers" / "__init__.py").write_text(
        'CONFIG_MAPPING = {"qwen3_omni_moe": object}\n'
    )
    package = site / "vllm_omni"
    for name, text in (
        ("__init__.py", "" if works else "raise OSError('no libcuda')"),
        ("config/__init__.py", ""),
        ("config/config_factory.py", _FACTORY),
        ("config/pipeline_registry.py", _REGISTRY),
        ("deploy/qwen3.yaml", qwen3.read_text()),
        ("deploy/qwen2_5.yaml", _DEPLOY),
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    (python := site / "python").write_text(
        f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n'
    )
    (command := site / "vllm-omni").write_text(f"#!{python}\nimport sys\nprint(*sys.argv[1:])\n")
    for made in (python, command):
        made.chmod(0o755)
    return command
