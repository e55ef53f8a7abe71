"""Parameters added after `attach` are reported once, and registered by `refresh`."""

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torchs
from torch.optim.optimizer import _global_optimizer_pre_hooks

from swapd_client import Client, InUse, finalizers
from tests.offload.modules import TOKENS, WIDTH, Encoder, Model, assert_comes_back, evict, seeded

X = torch.ones(2, WIDTH)


class Lora(nn.Module):
    """An adapter around a layer, as peft puts it there."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def test_an_adapter_is_told_of_once_and_registered_by_refresh(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(Model)
    with client.attach(model) as attachment, torch.inference_mode():
        model.transformer(X)
        assert "stay private" not in caplog.text
        model.transformer[1] = Lora(model.transformer[1])
        with attachment.use("transformer"):
            expected = model.transformer(X)
        for _ in range(2):
            assert torch.equal(model.transformer(X), expected)
        (line,) = [r.getMessage() for r in caplog.records if "refresh()" in r.getMessage()]
        assert "'transformer'" in line
        assert "1.down" in line
        before = {c.name for c in client.status().components}
        attachment.refresh()
        now = {c.name for c in client.status().components}
        assert now - before == {"transformer~2"}
        assert_comes_back(client, model.transformer, X, expected, "transformer", "transformer~2")
        caplog.clear()
        model.transformer(X)
        assert not caplog.records
    assert torch.equal(model.transformer(X), expected)


def test_a_module_outside_that_is_tied_to_a_weight_after_attach_is_told_of(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(Model)
    model.head = nn.Linear(WIDTH, 100, bias=False)
    told = "a Linear outside of 'text_encoder'"
    with client.attach(model) as attachment, torch.inference_mode():
        model.text_encoder.layers[0].weight = model.text_encoder.layers[1].weight
        assert told not in caplog.text
        for _ in range(2):
            model.head.weight = model.text_encoder.embed.weight
        assert caplog.text.count(told) == 1
        with attachment.use("text_encoder"):
            expected = model.head(X)
        attachment.refresh()
        assert_comes_back(client, model.head, X, expected, "text_encoder")


def test_a_replaced_child_and_a_replaced_component_are_taken_in(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(Model)
    with client.attach(model) as attachment, torch.inference_mode():
        model.vae.out = nn.Linear(WIDTH, 8).requires_grad_(False)
        model.vae.decode(X)
        assert "weight" in caplog.text
        model.transformer = seeded(nn.Linear, WIDTH, WIDTH)
        expected = model.transformer(X), model.vae.decode(X)
        attachment.refresh()
        evict(client, "transformer~2", "vae", "vae~2")
        assert torch.equal(model.transformer(X), expected[0])
        assert torch.equal(model.vae.decode(X), expected[1])


class Around(nn.Module):
    """Blocks of a model that hold the model, as Cache-DiT's do."""

    def __init__(self, model: nn.Module, blocks: nn.Module) -> None:
        super().__init__()
        self.model, self.blocks = model, blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(x)
        return out


def test_a_model_whose_blocks_are_exchanged_at_each_call_does_not_grow(client: Client) -> None:
    """As by Cache-DiT: with twice the work at each call, these would never end."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).eval()
    blocks, x = model[1], torch.randn(4, WIDTH)
    with torch.no_grad(), client.attach({"dit": model}):
        expected = model(x)
        around = Around(model, blocks)
        for _ in range(60):
            with mock.patch.object(model, "1", around):
                assert torch.equal(model(x), expected)
        evict(client, "dit")
        assert torch.equal(model(x), expected)


def test_a_module_that_was_replaced_is_nobodys(client: Client) -> None:
    """A head for each request, say, would stay until detach."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)).eval()
    with client.attach({"dit": model}):
        model[1] = nn.Linear(WIDTH, 4)
        replaced = weakref.ref(model[1])
        model[1] = nn.Linear(WIDTH, 4)
        gc.collect()
        assert replaced() is None


def test_what_a_model_has_lost_is_private_and_may_be_called(client: Client) -> None:
    model = seeded(Model)
    with client.attach(model) as attachment, torch.inference_mode():
        for _ in range(3):
            lost, expected = model.transformer, model.transformer(X)
            model.transformer = nn.Sequential(nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
            attachment.refresh()
            evict(client)
            assert torch.equal(lost(X), expected)
            (last,) = {c.name for c in client.status().components} - {"text_encoder", "vae"}
            assert last.startswith("transformer")
        with client.acquire(last):
            model.transformer = lost
            attachment.refresh()
        assert len(client.status().components) == 4, "one in use becomes private later"
        attachment.refresh()
        assert len(client.status().components) == 3


def test_a_refresh_within_a_call_of_a_component_is_refused(client: Client) -> None:
    model = seeded(Model)
    model.text_encoder = seeded(Encoder, 80)  # streamed
    with client.attach(model) as attachment, torch.inference_mode():
        for within in (model.text_encoder.layers[1], model.vae.out):
            expected = model(TOKENS)
            hook = within.register_forward_pre_hook(lambda *_: attachment.refresh())
            with pytest.raises(InUse, match=r"refresh\(\) within a call"):
                model(TOKENS)
            hook.remove()
            evict(client)
            assert torch.equal(model(TOKENS), expected)


def test_what_was_unregistered_by_hand_is_taken_in_again(client: Client) -> None:
    model = seeded(Model)
    with client.attach(model) as attachment, torch.inference_mode():
        client.unregister("transformer")
        attachment.refresh()
        expected = model.transformer(X)
        assert_comes_back(client, model.transformer, X, expected, "transformer~2")
        attachment.refresh()


def test_what_was_streamed_is_not_streamed_for_the_module_in_its_place(client: Client) -> None:
    model = seeded(Model)
    model.text_encoder = seeded(Encoder, 80)  # more than the device has
    with client.attach(model, ["text_encoder"]) as attachment, torch.inference_mode():
        assert "streamed in" in str(attachment)
        model.text_encoder = seeded(Encoder)
        expected = model(TOKENS)
        attachment.refresh()
        assert "streamed" not in str(attachment)
        (only,) = client.status().components
        assert_comes_back(client, model, TOKENS, expected, only.name)


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({"cpu_offload_enabled": True}, "lru"),  # out of the group
        ({"policy": "sequential"}, "sequential"),
        ({"stay": ["transformer"]}, "permanent"),
    ],
)
def test_what_a_component_got_shares_the_device_as_it_does(
    client: Client, given: dict[str, Any], policy: str
) -> None:
    model = seeded(Model)
    with client.attach(model, **given) as attachment:
        model.transformer[1] = Lora(model.transformer[1]).requires_grad_(False)
        attachment.refresh()
        model.transformer(X)
        new = {c.name: c for c in client.status().components}["transformer~2"]
        assert (new.policy, new.group) == (policy, None)


def test_new_weights_in_one_storage_or_of_another_model_are_nobodys_news(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(Model)
    with client.attach(model):
        nn.Linear(3, 3)
        model.head.weight = nn.Parameter(torch.ones(4, 8), requires_grad=False)
        model.vae.decode(X)
        assert "private memory" not in caplog.text


def test_nothing_watches_when_nothing_is_attached(client: Client) -> None:
    def watching() -> tuple[int, int]:
        return len(torchs._global_parameter_registration_hooks), len(_global_optimizer_pre_hooks)

    gc.collect()
    finalizers.settle()  # models of earlier tests
    assert watching() == (0, 0)
    first, second = client.attach(seeded(Model)), client.attach(seeded(Model), prefix="b")
    first.refresh()
    assert watching() == (1, 1)
    first.detach()
    assert watching() == (1, 1)
    second.detach()
    assert watching() == (0, 0)
