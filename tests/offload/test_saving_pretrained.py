"""transformers and diffusers save the same files of models with absent weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client
from tests.offload.twins import Lent


def llm() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    made: nn.Module = LlamaForCausalLM(config).eval()
    return made


def dit() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    made: nn.Module = SD3Transformer2DModel(
        sample_size=8,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
    ).eval()
    return made


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", [llm, dit], ids=["transformers", "diffusers"])
def test_the_same_files_in_and_out(client: Client, make: Any, tmp_path: Path) -> None:
    lent = Lent(client, make)
    mine: Any = lent.module
    its: Any = lent.twin
    its.save_pretrained(tmp_path / "twin")
    mine.save_pretrained(tmp_path / "out")
    assert lent.is_out()
    with client.acquire("m"):
        mine.save_pretrained(tmp_path / "in")
    found = [files(tmp_path / name) for name in ("twin", "out", "in")]
    assert any(name.endswith(".safetensors") for name in found[0])
    assert found[0] == found[1] == found[2]
    again = type(mine).from_pretrained(tmp_path / "out")
    for loaded, original in zip(again.parameters(), its.parameters(), strict=True):
        assert torch.equal(loaded, original)
