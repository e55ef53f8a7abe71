"""A checkpoint as transformers writes it: several files, an index, a tie; into a bare module."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights

import swapd_client
from swapd import spawn
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
def client() -> Iterator[Client]:
    torch.set_num_threads(1)
    with (
        spawn.daemon(budget="64MiB", isolation="strict") as daemon,
        swapd_client.connect(daemon.folder) as client,
    ):
        yield client


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


def test_a_folder_becomes_a_component(
    client: Client, tmp_path: Path, expected: torch.Tensor
) -> None:
    model = bare()
    part = client.load("llm", tmp_path, model)
    with client.acquire("llm"), torch.inference_mode():
        assert torch.equal(model(IDS).logits, expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert client.status().host_copy_bytes == part.nbytes


def test_a_folder_becomes_a_family_of_blocks(
    client: Client, tmp_path: Path, expected: torch.Tensor
) -> None:
    model = bare()
    blocks = {f"model.layers.{i}": [f"model.layers.{i}"] for i in range(4)}
    client.load_family("llm", tmp_path, {"rest": [], **blocks}, model)
    with client.acquire("llm"), torch.inference_mode():
        assert torch.equal(model(IDS).logits, expected)


def test_a_loaded_module_is_attached_as_it_is(
    client: Client, tmp_path: Path, expected: torch.Tensor
) -> None:
    model = bare()
    part = client.load("llm", tmp_path, model)
    client.attach(model)
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, expected)
    assert client.status().host_copy_bytes == part.nbytes
