"""A component that can never be on the device at once is refused, or warned of, with advice."""

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client, Deadlock, TooLarge
from tests.offload.twins import same

X = torch.ones(1, 1024)


def layer(mib: int) -> nn.Module:
    with torch.device("meta"):
        made = nn.Linear(1024, mib * 256, bias=False).requires_grad_(False)
    return made.to_empty(device="cpu")


class Both(nn.Module):
    """Calls one after the other."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sum() + self.second(x).sum()  # type: ignore[no-any-return]


class Layered(nn.Module):
    """A list of blocks, and a head."""

    def __init__(self, blocks: int, mib: int, head: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(mib) for _ in range(blocks))
        self.head = layer(head)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [one(x) for one in (*self.layers, self.head)]


def attached(client: Client, model: Any, *args: Any, **options: Any) -> None:
    """Attach it; a refused attach must leave nothing."""
    try:
        with client.attach(model, *args, **options):
            pass
    finally:
        assert client.status().components == ()


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)


def test_who_streams_already_is_not_told_to_stream(client: Client) -> None:
    wrapped = nn.Sequential(nn.Sequential(layer(9), nn.Sequential(layer(9))))
    said = r"No list of blocks holds most .*: name in blocks= .*\(largest: 0.0 \(9 MiB\), 0.1"
    with pytest.raises(TooLarge, match=said) as caught:
        attached(client, {"dit": wrapped}, resident=0)
    assert "resident=" not in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"resident": 0}])
def test_what_cannot_be_in_even_by_layers_is_told_the_budget_that_it_needs(
    client: Client, options: dict[str, Any]
) -> None:
    said = "no modules that could come one by one. It needs a budget of 34 MiB$"
    with pytest.raises(TooLarge, match=said):
        attached(client, {"text_encoder": layer(1), "dit": layer(34)}, **options)
    with pytest.raises(TooLarge, match=r"'layers\.0' .* 20 MiB$"):
        attached(client, {"dit": Layered(2, 17, 1)}, **options)


@pytest.mark.parametrize("policy", ["lru", "sequential", "alternating"])
def test_what_does_not_fit_is_streamed(
    client: Client, caplog: pytest.LogCaptureFixture, policy: Any
) -> None:
    model = Layered(8, 4, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        expected = model(X)
    with client.attach({"dit": model}, policy=policy) as attachment, torch.inference_mode():
        assert "dit needs 34 MiB; the budget is 16" in warnings(caplog)
        assert "Until then it is streamed block by block" in warnings(caplog)
        assert "(33 MiB, streamed in 8 blocks)" in str(attachment)
        for _ in range(2):
            assert all(map(same, model(X), expected))


def test_what_does_not_fit_and_stays_is_refused(client: Client) -> None:
    for options in ({"stay": ["dit"]}, {"policy": "permanent"}):
        with pytest.raises(TooLarge, match=r"dit .* 34 MiB.* 16 MiB"):
            attached(client, {"dit": Layered(8, 4, 1)}, **options)


def test_what_shares_too_much_to_be_in_at_once_is_refused(client: Client) -> None:
    shared = layer(12)
    model = {"a": Both(layer(6), shared), "b": Both(layer(6), shared)}
    with pytest.raises(TooLarge, match=r"'a' .*a\+b"):
        attached(client, model)


def test_blocks_that_do_not_fit_beside_what_is_in_none_are_refused(client: Client) -> None:
    with pytest.raises(TooLarge, match=r"'dit' is streamed"):
        attached(client, {"dit": Layered(4, 4, 13)}, blocks=["layers"], resident=0)


def test_what_will_not_fit_beside_what_stays_is_a_warning(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    attached(client, {"vae": layer(9), "dit": layer(9)}, stay=["vae"])
    assert (
        "with the permanent components on the device (vae), a call of 'dit' will be refused"
        in warnings(caplog)
    )
    caplog.clear()
    attached(client, {"vae": layer(5), "dit": layer(9)}, stay=["vae"])
    assert not warnings(caplog)


def test_of_what_was_registered_before_the_policy_counts_that_it_has(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    vae, dit = layer(9), layer(9)
    client.register("a", vae)
    with client.attach({"vae": vae, "dit": dit}, stay=["vae"]), torch.inference_mode():
        assert "'vae' was registered before attach, as 'lru', and stays so" in warnings(caplog)
        assert "will be refused" not in warnings(caplog)
        for module in (vae, dit):
            module(X)
    client.unregister("a")
    caplog.clear()
    client.register("a", vae, policy="permanent")
    with client.attach({"vae": vae, "dit": dit}):
        assert "(a), a call of 'dit' will be refused" in warnings(caplog)
        assert "registered before" not in warnings(caplog)


def test_a_call_in_a_call_for_which_there_is_no_room_says_so(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    outer = Both(layer(9), layer(9))
    with client.attach({"t": outer}, ["t", "t.second"]), torch.inference_mode():
        assert "'t.second' is in 't', and a call that comes from there will be" in warnings(caplog)
        outer.second(X)
        with pytest.raises(Deadlock, match=r"'t.second' .*one component"):
            outer(X)


def test_what_grew_too_large_stays_attached_and_is_told_of(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model = Both(layer(9), layer(1))
    with client.attach({"dit": model}) as attachment, torch.inference_mode():
        model.second = layer(8)
        attachment.refresh()
        assert re.search("'dit' is made of .*dit~2.*, which it needs at once", warnings(caplog))
        with pytest.raises(TooLarge):
            model(X)
        assert {c.name for c in client.status().components} == {"dit", "dit~2"}
