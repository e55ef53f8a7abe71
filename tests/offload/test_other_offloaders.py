"""Models that another offloader moves are refused, naming what it left on them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client, InvalidSource
from tests.offload.modules import TOKENS, Model, Pipeline, evict, seeded

CPU = torch.device("cpu")


def accelerates_cpu_offload(model: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(model.transformer, execution_device=CPU)


def accelerates_dispatch(model: Any) -> None:
    from accelerate import dispatch_model

    dispatch_model(model.text_encoder, {"": "cpu"}, force_hooks=True)


def accelerates_chain(model: Any) -> None:
    """What diffusers' `enable_model_cpu_offload` puts on each component."""
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(model.vae, CPU)


def diffusers_groups(model: Any) -> None:
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        model.transformer, onload_device=CPU, offload_device=CPU, offload_type="leaf_level"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("offload", "name", "left"),
    [
        (accelerates_cpu_offload, "transformer", "_hf_hook"),
        (accelerates_dispatch, "text_encoder", "_hf_hook"),
        (accelerates_chain, "vae", "_hf_hook"),
        (diffusers_groups, "transformer", "_diffusers_hook"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_model_that_another_offloader_moves_is_refused(
    client: Client, offload: Callable[[Any], None], name: str, left: str
) -> None:
    model = seeded(Model)
    offload(model)
    for whole in (model, Pipeline(**dict(model.named_children()))):
        with pytest.raises(InvalidSource, match=rf"'{name}.*' has `{left}`"):
            client.attach(whole)
    assert not client.status().components


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_once_they_are_removed_it_is_taken(client: Client) -> None:
    from accelerate.hooks import remove_hook_from_module

    model: Any = seeded(Model)
    expected = model(TOKENS)
    accelerates_chain(model)
    remove_hook_from_module(model, recurse=True)
    with client.attach(model):
        evict(client, "vae")
        assert torch.equal(model(TOKENS), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_refused_by_name(client: Client) -> None:
    model: Any = seeded(Model)
    model.vae = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(InvalidSource, match=r"'vae' is scripted or traced"):
        client.attach(model)


def test_hooks_of_nobody_in_particular_are_no_obstacle(client: Client) -> None:
    seen = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(type(module).__name__)

    model: Any = seeded(Model)
    model.vae.register_forward_hook(note)
    with client.attach(model):
        model.vae(torch.ones(1, 256))
    assert seen == ["Decoder"]
