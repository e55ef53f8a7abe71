"""An attached model, used like any other: saved, loaded, copied, cast, changed, forked."""

import copy
import io
import os
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client, ClientClosed, NotWhileAttached
from tests.offload.modules import TOKENS, WIDTH, Model, evict, seeded
from tests.offload.test_copied_modules import is_plain
from tests.offload.test_load_state_dict import others
from tests.offload.test_streaming import Dit, X
from tests.offload.twins import same

ALL = ("text_encoder", "transformer", "vae")


def absent(client: Client, *names: str) -> bool:
    return all(c.state == "absent" for c in client.status().components if c.name in names)


def test_a_whole_model_is_saved_and_loaded_while_it_is_out(client: Client) -> None:
    model, twin = seeded(Model), seeded(Model)
    with client.attach(model):
        evict(client, *ALL)
        assert same(model.state_dict(), twin.state_dict())
        new = others(twin)
        model.load_state_dict(new)
        assert absent(client, *ALL)
        twin.load_state_dict(new)
        assert same(dict(model.state_dict()), new)
        assert torch.equal(model(TOKENS), twin(TOKENS))
        one = others(twin.vae)
        model.vae.load_state_dict(one, assign=True)
        twin.vae.load_state_dict(one)
        assert torch.equal(model(TOKENS), twin(TOKENS))
    assert torch.equal(model(TOKENS), twin(TOKENS))
    assert same(model.state_dict(), twin.state_dict())


def test_one_that_never_fits_is_saved_loaded_and_copied_all_the_same(client: Client) -> None:
    """It is streamed, and none of these operations needs room on the device."""
    model, twin = seeded(Dit), seeded(Dit)
    with client.attach({"dit": model}, enable_layerwise_offload=True):
        loads = client.status().loads
        assert same(model.state_dict(), twin.state_dict())
        made = copy.deepcopy(model)
        assert is_plain(made)
        assert torch.equal(made(X), twin(X))
        new = others(twin)
        for module in (model, twin):
            module.load_state_dict(new)
        assert client.status().loads == loads
        assert same(dict(model.state_dict()), new)
        with torch.inference_mode():
            assert torch.equal(model(X), twin(X))
        with pytest.raises(NotWhileAttached, match="part of 'dit'"):
            model.half()
    assert torch.equal(model(X), twin(X))


@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_a_copy_of_a_model_needs_no_client(client: Client, way: str) -> None:
    model, twin = seeded(Model), seeded(Model)
    with client.attach(model):
        evict(client, *ALL)
        if way == "deepcopy":
            made = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            made = torch.load(file, weights_only=False)
        assert absent(client, *ALL)
        assert is_plain(made)
        assert torch.equal(made(TOKENS), twin(TOKENS))
        made.half()
        for parameter in made.parameters():
            parameter.zero_()
        evict(client, *ALL)
        assert torch.equal(model(TOKENS), twin(TOKENS))
    assert [list(vars(m)) for m in made.modules()] == [list(vars(m)) for m in twin.modules()]


def test_a_cast_of_the_whole_changes_nothing_of_it(client: Client) -> None:
    """Not even of tensors in no component, which a plain cast would change first."""
    model, twin = seeded(Model), seeded(Model)
    model.register_buffer("early", torch.ones(3))
    twin.register_buffer("early", torch.ones(3))
    with client.attach(model):
        evict(client, *ALL)
        for change in (model.half, model.double, model.share_memory):
            with pytest.raises(NotWhileAttached, match=r"'text_encoder\.embed\.weight' cannot"):
                change()
        assert model.to("cpu") is model
        assert model.float() is model
        assert same(model.state_dict(), twin.state_dict())
        assert not model.head.weight.is_shared()
        assert absent(client, *ALL)
    assert model.half().vae.out.weight.dtype is torch.float16


class Tied(nn.Module):
    """Two components that share a weight, and a third module that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = nn.Embedding(100, WIDTH)
        self.vae = nn.Linear(WIDTH, 100, bias=False)
        self.vae.weight = self.text_encoder.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.vae(self.text_encoder(x))


def test_what_components_share_is_one_in_what_is_saved_and_copied(client: Client) -> None:
    model, twin = seeded(Tied), seeded(Tied)
    with client.attach(model):
        state = model.state_dict()
        assert state["vae.weight"].data_ptr() == state["text_encoder.weight"].data_ptr()
        file = io.BytesIO()
        torch.save(model, file)
        assert len(file.getvalue()) < 1.1 * twin.vae.weight.nbytes
        file.seek(0)
        for made in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert made.vae.weight is made.text_encoder.weight
            assert torch.equal(made(TOKENS), twin(TOKENS))
        new = others(twin)
        model.load_state_dict(new)
        twin.load_state_dict(new)
        assert torch.equal(model(TOKENS), twin(TOKENS))


def quantise(layer: nn.Linear) -> None:
    """As a loader does after loading: two tensors replace the weight."""
    weight = layer.weight
    scale = weight.detach().abs().amax() / 127
    del layer.weight
    layer.register_parameter(
        "packed", nn.Parameter((weight / scale).round().to(torch.int8).T, requires_grad=False)
    )
    layer.register_parameter("scale", nn.Parameter(scale, requires_grad=False))


class Quantised(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "packed" in self._parameters:
            packed, scale = self.get_parameter("packed"), self.get_parameter("scale")
            return x @ (packed.float() * scale) + self.bias
        return super().forward(x)


def test_weights_that_are_replaced_later_are_taken_in_by_refresh(client: Client) -> None:
    model = nn.ModuleDict({"dit": seeded(Quantised, 16, 16), "vae": seeded(Quantised, 16, 16)})
    twin = copy.deepcopy(model)
    with client.attach(model) as attachment:
        with attachment.use("dit"):
            quantise(model["dit"])  # type: ignore[arg-type]
        quantise(twin["dit"])  # type: ignore[arg-type]
        attachment.refresh()
        x = torch.randn(2, 16)
        for _ in range(2):
            evict(client, *(c.name for c in client.status().components))
            assert torch.equal(model["dit"](x), twin["dit"](x))
            assert same(model.state_dict(), twin.state_dict())
    assert torch.equal(model["dit"](x), twin["dit"](x))


def test_a_forked_child_that_calls_it_is_told_why_it_cannot(client: Client) -> None:
    model = seeded(Model)
    with client.attach(model):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                model(TOKENS)
            except ClientClosed:
                os.write(writing, b"refused")
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.read() == b"refused"
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
