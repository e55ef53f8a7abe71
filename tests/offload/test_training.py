"""Adapters are trained over weights in swapd; training of these weights is an error."""

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client, InvalidSource, NotWhileAttached
from swapd_client.offload.attachment import Attachment
from tests.offload.modules import TOKENS, WIDTH, Encoder, Model, evict, leases, seeded
from tests.offload.twins import same

LORA = ["layers.0.down", "layers.0.up", "layers.1.down", "layers.1.up"]


class Lora(nn.Linear):
    """A layer with an adapter in it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.down = nn.Parameter(torch.randn(4, WIDTH) / 16)
        self.up = nn.Parameter(torch.randn(WIDTH, 4) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


class Adapted(Encoder):
    """Frozen, except for the adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Lora() for _ in self.layers)


def adapted() -> Adapted:
    model: Adapted = seeded(Adapted)
    for layer in model.layers:
        layer.down.requires_grad_()
        layer.up.requires_grad_()
    return model


def registered(client: Client) -> set[str]:
    """All tensors in swapd, without the names of their components' parts."""
    return {name for part in client.session.components.values() for name in part.layout.names()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, list[Any]]:
    """One step; its loss and gradients."""
    optimizer.zero_grad()
    loss: torch.Tensor = model(TOKENS).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return loss.detach(), gradients


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def await_nothing_held(client: Client) -> None:
    assert not any(leases(client).values())


STREAMED: dict[str, Any] = {"blocks": ["layers"], "resident": 0}


@pytest.mark.parametrize("how", [{}, STREAMED], ids=["whole", "streamed"])
def test_adapters_are_trained_as_the_twin_s_with_everything_evicted_in_between(
    client: Client, how: dict[str, Any]
) -> None:
    model, twin = adapted(), adapted()
    attachment = client.attach({"text": model}, **how)
    mine, its = optimizer_of(model), optimizer_of(twin)
    for _ in range(3):
        evict(client, *(c.name for c in client.status().components))
        with attachment.use("text"):
            loss, gradients = step(model, mine)
        expected, wanted = step(twin, its)
        assert torch.equal(loss, expected)
        assert len(gradients) == len(wanted) == 4
        assert all(map(torch.equal, gradients, wanted))
    await_nothing_held(client)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), twin(TOKENS))
    assert same(dict(model.state_dict()), dict(twin.state_dict()))
    attachment.detach()
    assert same(dict(model.state_dict()), dict(twin.state_dict()))


def test_what_stays_private_is_what_requires_gradients_and_is_said(client: Client) -> None:
    model = adapted()
    with client.attach({"text": model}) as attachment:
        assert registered(client) == {n for n, p in model.named_parameters() if not p.requires_grad}
        assert "16 KiB of parameters that are trained stay private" in str(attachment)


def test_they_are_saved_loaded_and_copied_with_the_rest(client: Client) -> None:
    model, twin = adapted(), adapted()
    other = {name: value + 1 for name, value in twin.state_dict().items()}
    with client.attach({"text": model}) as attachment, torch.no_grad():
        evict(client, "text")
        assert same(dict(model.state_dict()), dict(twin.state_dict()))
        copied = copy.deepcopy(model)
        model.load_state_dict(other)
        evict(client, "text")
        assert same(dict(model.state_dict()), other)
        assert same(dict(copied.state_dict()), dict(twin.state_dict()))
        twin.load_state_dict(other)
        assert torch.equal(model(TOKENS), twin(TOKENS))
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        assert set(attachment.trained) == trained, "the objects they were"


def everything(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def test_a_model_that_requires_gradients_of_nearly_all_is_taken_for_one_that_runs(
    client: Client,
) -> None:
    """As built: few users call requires_grad_(False)."""
    model = seeded(Encoder).requires_grad_(True)
    with client.attach({"text": model}):
        assert registered(client) == everything(model)
    model.norm.requires_grad_(False)
    with client.attach({"text": model}) as attachment:
        assert registered(client) == everything(model)
        assert "private" not in str(attachment)


def test_quantised_weights_do_not_make_a_model_one_that_is_trained(client: Client) -> None:
    """They can have no gradients; the other parameters require them, as built."""
    model = seeded(Encoder).requires_grad_(True)
    for layer in model.layers:
        codes = torch.randint(-9, 9, (16 * WIDTH, WIDTH), dtype=torch.int8)
        layer.weight = nn.Parameter(codes, requires_grad=False)
    with client.attach({"text": model}):
        assert registered(client) == everything(model)


def test_where_no_gradients_are_made_nothing_is_trained(client: Client) -> None:
    model = adapted()
    with torch.inference_mode(), client.attach({"text": model}):
        assert registered(client) == everything(model)
        assert not registered(client) - everything(model)


@pytest.mark.parametrize(
    ("trainable", "private"),
    [
        (False, set()),
        (True, set(LORA)),
        ("text.*.up", {"layers.0.up", "layers.1.up"}),
        (["text.norm.weight"], {"norm.weight"}),
    ],
)
def test_which_stay_private_can_be_said(client: Client, trainable: Any, private: set[str]) -> None:
    model = adapted()
    with client.attach({"text": model}, trainable=trainable):
        assert everything(model) - registered(client) == private


def test_a_name_that_none_has_is_refused(client: Client) -> None:
    with pytest.raises(InvalidSource, match=r"trainable: .*'\*\.lora'.*'text\.embed\.weight'"):
        client.attach({"text": adapted()}, trainable=["*.lora"])
    assert client.status().components == ()


def test_only_the_component_that_has_adapters_has_private_ones(client: Client) -> None:
    model = seeded(Model).requires_grad_(True)
    model.text_encoder = adapted()
    with client.attach(model):
        parts = client.session.components
        assert not set(LORA) & set(parts["text_encoder"].layout.names())
        assert set(parts["vae"].layout.names()) == everything(model.vae)


def test_what_shares_bytes_with_what_is_trained_stays_with_it(client: Client) -> None:
    model = seeded(Encoder)
    model.layers[1].bias = nn.Parameter(model.layers[0].bias.detach(), requires_grad=True)
    with client.attach({"text": model}):
        assert everything(model) - registered(client) == {"layers.0.bias", "layers.1.bias"}
        assert model.layers[0].bias.data_ptr() == model.layers[1].bias.data_ptr()


def test_adapters_that_come_later_stay_private_and_are_told_of_once(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model, twin = seeded(Encoder), adapted()
    model.load_state_dict(twin.state_dict(), strict=False)
    attachment = client.attach({"text": model})
    for i, layer in enumerate(twin.layers):
        model.layers[i] = copy.deepcopy(layer)
    with torch.no_grad():
        model(TOKENS)
    assert "layers.0.down, layers.0.up" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        attachment.refresh()
    assert "16 KiB of parameters that are trained stay private" in caplog.text
    with torch.no_grad():
        attachment.refresh()  # trained parameters stay so, in any mode
    caplog.clear()
    mine, its = optimizer_of(model), optimizer_of(twin)
    for _ in range(2):
        evict(client, *(c.name for c in client.status().components))
        with attachment.use("text"):
            assert torch.equal(step(model, mine)[0], step(twin, its)[0])
    assert not caplog.records
    attachment.detach()


# --- training of weights in swapd ----------------------------------------------------------


@pytest.fixture
def attached(client: Client) -> Iterator[tuple[nn.Module, Attachment]]:
    model = seeded(Encoder).requires_grad_(True)
    with client.attach({"text": model}) as attachment:
        yield model, attachment


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_that_would_write_to_weights_in_swapd_is_refused_in_words(
    client: Client, attached: tuple[nn.Module, Attachment], kind: type[torch.optim.Optimizer]
) -> None:
    model, attachment = attached
    before = dict(model.state_dict())
    optimizer: Any = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    with attachment.use("text"):
        model(TOKENS).sum().backward()
        with pytest.raises(NotWhileAttached, match=rf"{kind.__name__}\.step.*'text'.*trainable="):
            optimizer.step()
    assert same(dict(model.state_dict()), before)
    attachment.detach()
    optimizer.step()
    assert not same(dict(model.state_dict()), before)


def test_weights_that_are_mutable_may_be_trained(client: Client) -> None:
    model, twin = (seeded(Encoder).requires_grad_(True) for _ in range(2))
    client.register("text", model, mutable=True)
    with client.attach({"text": model}) as attachment:
        mine, its = optimizer_of(model), optimizer_of(twin)
        for _ in range(2):
            evict(client, "text")
            with attachment.use("text"):
                assert torch.equal(step(model, mine)[0], step(twin, its)[0])
    client.unregister("text")
    assert same(dict(model.state_dict()), dict(twin.state_dict()))
