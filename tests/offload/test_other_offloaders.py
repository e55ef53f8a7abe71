"""A model that another offloader moves is refused, with a remedy, and stays unchanged."""

from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

from swapd_client import Client, InvalidSource
from tests.offload.modules import Model, seeded

CPU = torch.device("cpu")


def offload(model: Any) -> None:
    accelerate.cpu_offload(model.transformer, execution_device=CPU)


def offload_with_hook(model: Any) -> None:
    model.transformer, _ = accelerate.cpu_offload_with_hook(model.transformer, execution_device=CPU)


def dispatch(model: Any) -> None:
    accelerate.dispatch_model(model.transformer, {"": "cpu"}, main_device=CPU, force_hooks=True)


@pytest.mark.parametrize("how", [offload, offload_with_hook, dispatch])
def test_accelerates_hooks_are_refused_by_name(client: Client, how: Callable[[Any], None]) -> None:
    model = seeded(Model)
    how(model)
    hooked = {name for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    with pytest.raises(InvalidSource, match=r"transformer.* has `_hf_hook`, a .*remove_hook_from"):
        client.attach(model)
    assert not client.status().components
    assert {n for n, module in model.named_modules() if hasattr(module, "_hf_hook")} == hooked
    accelerate.hooks.remove_hook_from_module(model.transformer)
    model.transformer = seeded(Model).transformer
    client.attach(model).detach()


def test_hooks_of_diffusers_that_move_weights_are_refused(client: Client) -> None:
    # imported here: it takes seconds, which every test process would spend at collection
    from diffusers import AutoencoderTiny
    from diffusers.hooks import apply_group_offloading, apply_layerwise_casting

    vae: nn.Module = AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    apply_group_offloading(vae, onload_device=CPU, offload_type="leaf_level")
    with pytest.raises(InvalidSource, match=r"has `_diffusers_hook` with '.*offloading'"):
        client.attach({"vae": vae})
    model = seeded(Model)
    apply_layerwise_casting(
        model.transformer, storage_dtype=torch.float16, compute_dtype=torch.float32
    )
    with pytest.raises(InvalidSource, match=r"has `_diffusers_hook` with '.*casting'"):
        client.attach(model)
