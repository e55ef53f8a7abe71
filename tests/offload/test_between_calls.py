"""Within a request, the lease of a call stays for the calls after it, up to a bound."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import swapd_client
from swapd_client import Client
from swapd_client.offload.scope import here, kept_between_calls
from tests import served
from tests.offload.modules import Model, leases, seeded


@pytest.fixture
def busy() -> Iterator[tuple[Client, Client]]:
    """Two clients of a daemon without quanta: a holder hears of a waiter at once."""
    with served.pair(budget=4 << 20, isolation="strict", residency_factor=0) as (_, one, other):
        yield one, other


def test_a_component_is_held_from_call_to_call_until_another_is_needed(client: Client) -> None:
    model = seeded(Model)
    hidden = torch.zeros(1, 256)
    with client.attach(model):
        with kept_between_calls(client, 10.0):
            model.transformer(hidden)
            assert leases(client) == {"text_encoder": 0, "transformer": 1, "vae": 0}
            with kept_between_calls(client, 10.0):  # the same
                model.transformer(hidden)
            assert leases(client)["transformer"] == 1
            model.vae.decode(hidden)
            assert leases(client) == {"text_encoder": 0, "transformer": 0, "vae": 1}
            request = here().request  # a reference to it, as a traceback has, keeps no lease
        assert set(leases(client).values()) == {0}
        assert here().request is None is not request


def test_weights_edited_while_the_request_holds_them_are_read_from_then_on(client: Client) -> None:
    model = seeded(Model)
    hidden = torch.ones(1, 256)
    with client.attach(model) as attachment, kept_between_calls(client, 10.0), torch.no_grad():
        with attachment.use("transformer"):
            model.transformer(hidden)
            with attachment.edit("transformer"):
                for weight in model.transformer.parameters():
                    weight.zero_()
            assert torch.all(model.transformer(hidden) == 0)
        assert torch.all(model.transformer(hidden) == 0)


def test_a_turn_that_fails_gives_all_back(client: Client) -> None:
    model = seeded(Model)

    def request() -> None:
        with kept_between_calls(client, 10.0):
            model.transformer(torch.zeros(1, 256))
            model.transformer(torch.zeros(1, 3))

    with client.attach(model):
        with pytest.raises(RuntimeError, match="shapes"):
            request()
        assert set(leases(client).values()) == {0}


class Chunks(nn.Module):
    """A VAE that yields decoded pieces one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for row in x:
            yield self.out(row)


def test_what_runs_later_is_held_beside_nothing_that_is_kept(client: Client) -> None:
    model = seeded(nn.ModuleDict, {"transformer": nn.Linear(256, 256), "vae": Chunks()})
    with client.attach(model), kept_between_calls(client, 10.0):
        chunks = model["vae"](torch.zeros(2, 256))
        model["transformer"](torch.zeros(1, 256))
        next(chunks)
        assert leases(client) == {"transformer": 0, "vae": 1}
        assert len(list(chunks)) == 1


def test_what_is_wanted_is_kept_until_the_request_ends(busy: tuple[Client, Client]) -> None:
    one, other = busy
    model = seeded(nn.ModuleDict, {"transformer": nn.Linear(700, 700)})
    other.register("filler", {"x": bytes(4 << 20)})
    asked = threading.Thread(target=lambda: other.acquire("filler").release())
    told = threading.Event()
    one.session.told.when_wanted(told.set)
    with one.attach(model):
        with kept_between_calls(one, 1000.0):
            model["transformer"](torch.zeros(1, 700))
            asked.start()
            assert told.wait(20)
            model["transformer"](torch.zeros(1, 700))
            assert leases(one)["transformer"] == 1
        asked.join(20)
        assert not asked.is_alive()


def test_what_is_wanted_is_not_kept_beyond_the_bound(
    busy: tuple[Client, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = busy
    model = seeded(nn.ModuleDict, {"dit": nn.Linear(256, 256)})
    now = 100.0
    monkeypatch.setattr("swapd_client.offload.scope.time.monotonic", lambda: now)

    def held_after_a_call() -> bool:
        model["dit"](torch.zeros(1, 256))
        return bool(leases(one)["dit"])

    with one.attach(model), torch.inference_mode(), kept_between_calls(one, 10.0):
        assert held_after_a_call()
        one.session.told.wanted.add("dit")
        assert held_after_a_call()
        now = 109.0
        assert held_after_a_call()
        now = 110.0
        assert not held_after_a_call()
        assert held_after_a_call()  # wanted again, or still: the bound starts again
        one.session.told.wanted.discard("dit")
    assert not leases(one)


def test_what_each_call_under_a_kept_lease_worked_on_is_waited_for(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the call records its stream: by the release it may be destroyed."""
    rested: list[int] = []
    monkeypatch.setattr(swapd_client.Lease, "rests", lambda lease: rested.append(id(lease)))
    model = seeded(nn.ModuleDict, {"dit": nn.Linear(256, 256)})
    with client.attach(model), torch.inference_mode():
        with kept_between_calls(client, 10.0):
            for calls in range(1, 4):
                model["dit"](torch.zeros(1, 256))
                assert len(rested) == calls
            assert leases(client) == {"dit": 1}
        assert len(set(rested)) == 1
