"""Code around an attached module that cannot work raises an error before it reads a weight."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, fx, nn
from torch.nn.parallel import DistributedDataParallel

from swapd_client import Client, NotWhileAttached
from tests.offload.modules import WIDTH, Decoder, Model, computed, evict, leases, seeded
from tests.offload.twins import same

X = torch.ones(2, WIDTH)


@pytest.fixture
def group() -> Iterator[None]:
    store = torch._C._distributed_c10d.HashStore()
    distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    distributed.destroy_process_group()


# --- torch.fx ----------------------------------------------------------------------------


class Reads(nn.Module):
    """One layer that it calls, one whose weight it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table.weight.T


@pytest.mark.parametrize("kind", [Decoder, Reads])
def test_a_trace_by_fx_is_refused_until_it_is_detached(
    client: Client, kind: type[nn.Module]
) -> None:
    model, expected = computed(X, kind)
    with client.attach({"vae": model}) as attachment:
        evict(client, "vae")
        with pytest.raises(NotWhileAttached, match=r"'vae' is attached.*fx.*detach\(\)"):
            fx.symbolic_trace(model)
        with torch.inference_mode():
            assert torch.equal(model(X), expected)
        attachment.detach()
        assert torch.equal(fx.symbolic_trace(model)(X), expected)


def test_a_trace_of_what_is_in_no_component_is_none_of_its(client: Client) -> None:
    model = seeded(Model)
    with client.attach(model, ["vae"]):
        x = torch.ones(1, 8)
        traced = fx.symbolic_trace(nn.Sequential(model.head))
        assert torch.equal(traced(x), model.head(x))
        with pytest.raises(NotWhileAttached, match=re.escape("'vae'")):
            fx.symbolic_trace(model.vae)


# --- wrappers ----------------------------------------------------------------------------


@pytest.mark.usefixtures("group")
def test_a_wrapper_that_broadcasts_all_weights_is_refused_before_it_does(client: Client) -> None:
    model = seeded(Decoder).requires_grad_(True)
    around = nn.Sequential(model)
    expected = dict(model.state_dict())
    with client.attach({"vae": model}) as attachment:
        evict(client, "vae")
        for one in (model, around):
            with pytest.raises(
                NotWhileAttached, match=r"'vae'.*DistributedDataParallel .*detach\(\)"
            ):
                DistributedDataParallel(one)
        assert same(dict(model.state_dict()), expected)
        attachment.detach()
    DistributedDataParallel(model)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("inside", [False, True])
def test_a_wrapper_that_was_there_before_is_trained_through(client: Client, inside: bool) -> None:
    outputs = []
    for is_attached in (False, True):
        model = seeded(Decoder)
        model.out.requires_grad_(True)
        wrapper: Any = DistributedDataParallel(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        if is_attached:
            attachment = client.attach({"vae": model if inside else wrapper})
        for _ in range(2):
            optimizer.zero_grad()
            if is_attached:
                evict(client, "vae")
                with attachment.use("vae"):
                    wrapper(X).square().sum().backward()
            else:
                wrapper(X).square().sum().backward()
            optimizer.step()
        outputs.append(dict(model.state_dict()))
    assert same(*outputs)
    assert not sum(leases(client).values())
