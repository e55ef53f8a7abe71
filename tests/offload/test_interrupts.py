"""An interrupt at any place of an attached model's code leaves no lease, and a model that runs."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

from swapd_client import Client
from swapd_client.offload.attachment import Attachment
from swapd_client.offload.hooks import hook_of
from tests.interrupts import interrupt, interrupts, places
from tests.offload.modules import (
    TOKENS,
    WIDTH,
    Encoder,
    await_none_leased,
    seeded,
)

#: Places of one call.
MOST = 40
NAMES = ["text_encoder", "transformer"]


class Model(nn.Module):
    """Two components."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = Encoder(1)
        self.transformer = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transformer(self.text_encoder(x))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # the wait for an answer that was read, and lost in the interrupt
    monkeypatch.setattr("swapd_client.session.channel.GRACE_S", 0.2)
    with interrupts(), torch.inference_mode():
        yield


def assert_good(client: Client, model: nn.Module) -> None:
    """It computes what it should, and holds nothing afterwards."""
    assert torch.equal(model(TOKENS), seeded(Model)(TOKENS))
    await_none_leased(client)


def assert_private(client: Client, model: nn.Module) -> None:
    assert client.status().components == ()
    assert not client.session.components
    assert not any(map(hook_of, model.modules()))


def test_an_interrupted_attach_has_attached_nothing(client: Client) -> None:
    def attach(model: nn.Module) -> Attachment:
        return client.attach(model, NAMES)

    attach(seeded(Model)).detach()
    first: list[Attachment] = []
    found = places(lambda: first.append(attach(seeded(Model))), MOST)
    first.pop().detach()
    for place in found:
        model = seeded(Model)
        attachment = interrupt(partial(attach, model), place)
        if attachment is None:
            assert_private(client, model)
            assert_good(client, model)
            attachment = attach(model)
        assert_good(client, model)
        attachment.detach()
        assert_good(client, model)


def call(attachment: Attachment, model: Model) -> None:
    model(TOKENS)


def use(attachment: Attachment, model: Model) -> None:
    with attachment.use(*NAMES):
        model.transformer[0](torch.ones(1, WIDTH))
    with attachment.use(model.transformer[1]):
        pass


@pytest.mark.parametrize("do", [call, use])
def test_an_interrupted_call_or_use_holds_nothing(
    client: Client, do: Callable[[Attachment, Model], None]
) -> None:
    model = seeded(Model)
    with client.attach(model, NAMES) as attachment:
        for _ in range(2):
            do(attachment, model)
        for place in places(partial(do, attachment, model), 2 * MOST):
            interrupt(partial(do, attachment, model), place)
            await_none_leased(client)
            assert_good(client, model)


def test_an_interrupted_detach_leaves_a_model_that_runs_and_can_be_detached(
    client: Client,
) -> None:
    first = client.attach(seeded(Model), NAMES)
    for place in places(first.detach, MOST):
        model = seeded(Model)
        attachment = client.attach(model, NAMES)
        interrupt(attachment.detach, place)
        assert_good(client, model)
        attachment.detach()
        assert_private(client, model)
        assert_good(client, model)
