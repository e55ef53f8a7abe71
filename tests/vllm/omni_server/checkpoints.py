"""Tiny checkpoints of Qwen2.5-Omni and Qwen3-Omni with random weights, which vllm-omni serves.

They have the structure, the special tokens and the files of the real ones; a tokenizer of bytes.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.vllm.pipelines import write_qwen_image

WIDTH = 128
VOCABULARY = 152064
#: Tokens of both models.
PAD, BEGIN, END = 151643, 151644, 151645
SPECIAL = {PAD: "<|endoftext|>", BEGIN: "<|im_start|>", END: "<|im_end|>"}
#: Words that vllm-omni's talkers find in a prompt by their numbers.
ROLES = {872: "user", 8948: "system", 77091: "assistant"}

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
AUDIO = {
    "num_mel_bins": 128,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH,
    "output_dim": WIDTH,
}
VISION = {
    "depth": 1,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_heads": 4,
    "out_hidden_size": WIDTH,
}
CHAT = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{% if m['content'] is string %}"
    "{{m['content']}}{% else %}{% for c in m['content'] %}{{c['text']}}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_qwen2_5(folder: Path) -> None:
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    special = {
        151646: "<|AUDIO|>",
        151647: "<|audio_bos|>",
        151648: "<|audio_eos|>",
        151652: "<|vision_bos|>",
        151653: "<|vision_eos|>",
        151655: "<|IMAGE|>",
        151656: "<|VIDEO|>",
    }
    marks = {
        "audio_token_index": 151646,
        "audio_start_token_id": 151647,
        "audio_end_token_id": 151648,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "image_token_index": 151655,
        "video_token_index": 151656,
    }
    text = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "max_position_embeddings": 4096,
        **HEADS,
        **_rope([4, 6, 6]),
    }
    thinker = {
        "audio_config": AUDIO,
        "vision_config": {**VISION, "fullatt_block_indexes": [0]},
        "text_config": {
            **text,
            "vocab_size": VOCABULARY,
            "num_hidden_layers": 6,
            "pad_token_id": PAD,
        },
        "user_token_id": 872,
        "vision_token_id": 151654,
        **marks,
    }
    talker = {
        **text,
        "vocab_size": 8448,
        "embedding_size": WIDTH,
        "num_hidden_layers": 12,
        "head_dim": WIDTH // 4,
        "tts_text_start_token_id": 151860,
        "tts_text_end_token_id": 151861,
        "tts_text_pad_token_id": 151859,
        "tts_codec_pad_token_id": 8292,
        "tts_codec_start_token_id": 8293,
        "tts_codec_end_token_id": 8294,
        "tts_codec_mask_token_id": 8296,
        **marks,
    }
    dit = {
        "hidden_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "head_dim": 64,
        "emb_dim": 192,
        "num_embeds": 8193,
        "mel_dim": 80,
        "look_ahead_layers": [4],
        "look_backward_layers": [0, 7],
        "enc_emb_dim": 64,
        "enc_dim": 64,
        "enc_channels": [128, 128, 128, 128, 384],
    }
    sound = {"dit_config": dit, "bigvgan_config": {"mel_dim": 80, "upsample_initial_channel": 256}}
    config = Qwen2_5OmniConfig(thinker_config=thinker, talker_config=talker, token2wav_config=sound)
    model = Qwen2_5OmniForConditionalGeneration._from_config(config)
    _draw(model)
    with torch.no_grad():
        for parameter in model.token2wav.code2wav_bigvgan_model.parameters():
            parameter.mul_(0.7)  # else its sound is clipped
    for part in (model.thinker, model.talker):  # code2wav computes in float32
        part.to(torch.bfloat16)
    _save(folder, model, config)
    generator = torch.Generator().manual_seed(0)
    voice = {
        "cond": torch.randn(1, 64, generator=generator),
        "ref_mel": torch.randn(1, 100, 80, generator=generator),
        "bos_token": 151872,
    }
    torch.save({"Chelsie": voice, "Ethan": voice}, folder / "spk_dict.pt")
    modalities = dict(zip(("image", "audio", "video"), (151655, 151646, 151656), strict=True))
    _write_tokenizer(folder, special, modalities, "bos", "eos")
    _write_processors(folder, "Qwen2_5OmniProcessor", 14)


def write_qwen3(folder: Path) -> None:
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    special = {
        151652: "<|vision_start|>",
        151653: "<|vision_end|>",
        151655: "<|image_pad|>",
        151656: "<|video_pad|>",
        151669: "<|audio_start|>",
        151670: "<|audio_end|>",
        151671: "<tts_pad>",
        151672: "<tts_text_bos>",
        151673: "<tts_text_eod>",
        151674: "<tts_text_bos_single>",
        151675: "<|audio_pad|>",
    }
    marks = {
        "audio_token_id": 151675,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "audio_start_token_id": 151669,
    }
    text = {
        "hidden_size": WIDTH,
        "num_experts_per_tok": 2,
        "head_dim": WIDTH // 4,
        "max_position_embeddings": 4096,
        **HEADS,
        **_rope([6, 5, 5], interleaved=True),
    }
    vision = {
        **VISION,
        "num_position_embeddings": 64,
        "image_size": 128,
        "apply_vit_abs_pos_embed": True,
        "deepstack_visual_indexes": [0],
    }
    thinker = {
        "audio_config": {**AUDIO, "downsample_hidden_size": 32},
        "vision_config": vision,
        "text_config": {
            **text,
            "vocab_size": VOCABULARY,
            "intermediate_size": 2 * WIDTH,
            "moe_intermediate_size": WIDTH,
            "num_experts": 8,
            "num_hidden_layers": 6,
            "pad_token_id": PAD,
        },
        "audio_end_token_id": 151670,
        "user_token_id": 872,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        **marks,
    }
    predictor = {
        "vocab_size": 2048,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "head_dim": WIDTH // 4,
        "num_code_groups": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        **HEADS,
    }
    talker = {
        "spatial_merge_size": 2,
        "code_predictor_config": predictor,
        "text_config": {
            **text,
            "vocab_size": 3072,
            "intermediate_size": 4 * WIDTH,
            "moe_intermediate_size": 4 * WIDTH,  # so large that swapd divides it by layers
            "shared_expert_intermediate_size": 2 * WIDTH,
            "num_experts": 16,
            "num_hidden_layers": 12,
        },
        "num_code_groups": 16,
        "thinker_hidden_size": WIDTH,
        "accept_hidden_layer": 3,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
        **marks,
    }
    sound = {
        "codebook_size": 2048,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_quantizers": 16,
        "decoder_dim": 192,
        "sliding_window": 72,
        "layer_scale_initial_scale": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = Qwen3OmniMoeConfig(thinker_config=thinker, talker_config=talker, code2wav_config=sound)
    model = Qwen3OmniMoeForConditionalGeneration._from_config(config)
    _draw(model)
    _save(folder, model.to(torch.bfloat16), config)
    modalities = dict(zip(("image", "audio", "video"), (151655, 151675, 151656), strict=True))
    _write_tokenizer(folder, special, modalities, "start", "end")
    _write_processors(folder, "Qwen3OmniMoeProcessor", 16)


#: A DiT as large as a stage.
DIT_LAYERS = 24

WRITES: Mapping[str, Callable[[Path], None]] = {
    "qwen2_5_omni": write_qwen2_5,
    "qwen3_omni_moe": write_qwen3,
    "qwen_image": partial(write_qwen_image, layers=DIT_LAYERS),
}


def write_all(folder: str) -> None:
    for name, write in WRITES.items():
        torch.manual_seed(0)
        (made := Path(folder, name)).mkdir(parents=True)
        write(made)


# --- weights -----------------------------------------------------------------------------


def _rope(section: list[int], **more: object) -> dict[str, object]:
    kind = {"rope_type": "default", "mrope_section": section, **more}
    return {"rope_parameters": {**kind, "rope_theta": 1e6}, "rope_scaling": kind}


def _draw(model: torch.nn.Module) -> None:
    """Draw every parameter so that signals keep their size."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, _spread(module, name, parameter), generator)
            elif name == "weight":
                torch.nn.init.normal_(parameter, 1.0, 0.1, generator)
            elif name != "scale":  # of code2wav's layers: its config says it
                torch.nn.init.normal_(parameter, 0.0, 0.05, generator)


def _spread(module: torch.nn.Module, name: str, weight: torch.Tensor) -> float:
    if isinstance(module, torch.nn.Embedding):
        return 1.0
    if isinstance(module, torch.nn.ConvTranspose1d):
        return 1 / math.sqrt(module.in_channels * module.kernel_size[0] / module.stride[0])
    experts = name in ("gate_up_proj", "down_proj")  # of all experts, in one parameter
    return 1 / math.sqrt(weight.shape[-1] if experts else weight[0].numel())


def _save(folder: Path, model: Any, config: Any) -> None:
    model.save_pretrained(folder)
    config.architectures = [type(model).__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    said = {"eos_token_id": END, "pad_token_id": PAD}
    (folder / "generation_config.json").write_text(json.dumps(said))


# --- tokenizer and processors --------------------------------------------------------------


def _write_tokenizer(
    folder: Path, more: Mapping[int, str], modalities: Mapping[str, int], first: str, last: str
) -> None:
    """Bytes are tokens. `first`, `last`: how the marks around an input are called."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {**SPECIAL, **more}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    named = {**dict(enumerate(letters)), **special, **ROLES}
    words = {named.get(number, f"w{number}"): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(word, special=False, normalized=False) for word in ROLES.values()]
    )
    marks = {f"{kind}_token": special[number] for kind, number in modalities.items()}
    for kind in ("vision", "audio"):
        marks[f"{kind}_bos_token"] = f"<|{kind}_{first}|>"
        marks[f"{kind}_eos_token"] = f"<|{kind}_{last}|>"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special[END],
        pad_token=special[PAD],
        additional_special_tokens=list(special.values()),
        **marks,
    )
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT}))


def _write_processors(folder: Path, name: str, patch: int) -> None:
    patches = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": name,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "min_pixels": 3136,
        "max_pixels": 802816,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "return_attention_mask": True,
        **patches,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    video = {"video_processor_type": "Qwen2VLVideoProcessor", **patches}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
