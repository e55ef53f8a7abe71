"""A checkpoint as transformers writes it: several files, an index, a tie; into a bare module."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights

from swapd_client import Client

IDS = torch.tensor([[1, 2, 3]])


def llama() -> Any:
    # imported here: it takes a second, which every test process would spend at collection
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def expected(tmp_path: Path) -> torch.Tensor:
    """The output of the model saved in `tmp_path`."""
    torch.manual_seed(0)
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS).logits
    return logits


def bare() -> Any:
    with init_empty_weights(include_buffers=False):
        model = llama()
    model.tie_weights()
    return model


def test_a_folder_becomes_a_component_or_a_family_and_is_attached_as_it_is(
    client: Client, tmp_path: Path, expected: torch.Tensor
) -> None:
    blocks = {f"model.layers.{i}": [f"model.layers.{i}"] for i in range(4)}
    part, family = bare(), bare()
    nbytes = client.load("llm", tmp_path, part).nbytes
    assert client.status().host_copy_bytes == nbytes
    client.load_family("parts", tmp_path, {"rest": [], **blocks}, family)
    for name, model in (("llm", part), ("parts", family)):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        with client.acquire(name), torch.inference_mode():
            assert torch.equal(model(IDS).logits, expected)
    client.attach(part)
    with torch.inference_mode():
        assert torch.equal(part(IDS).logits, expected)
