"""`state_dict` gives tensors of its own, with present and with absent weights."""

import gc
import io
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from swapd_client import Client
from swapd_client.offload.guards import guard
from swapd_client.offload.weights import ComponentWeights
from tests.offload.modules import evict
from tests.offload.twins import Lent, same
from tests.threads import started


class Block(nn.Module):
    """Weights, a persistent buffer and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, 16, bias=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.norm(self.first(x)).relu())


class Tied(nn.Module):
    """One parameter under two names, in two modules, and three views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        fused = torch.randn(6, 4)
        self.q, self.k = nn.Parameter(fused[:2]), nn.Parameter(fused[2:4])
        self.inner = nn.Module()
        self.inner.v = nn.Parameter(fused[4:])


def saved(state: dict[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.mark.parametrize("mutable", [False, True])
def test_it_is_that_of_a_module_that_was_never_lent(client: Client, mutable: bool) -> None:
    lent = Lent(client, Block, mutable=mutable)
    for _ in range(3):
        state = lent.module.state_dict()
        assert same(dict(state), dict(lent.twin.state_dict()))
        assert state._metadata == lent.twin.state_dict()._metadata  # type: ignore[attr-defined]
        evict(client, "m")
        client.acquire("m").release()


def test_clean_weights_are_read_without_a_lease(client: Client) -> None:
    lent = Lent(client, Block)
    loads = client.status().loads
    lent.module.state_dict()
    assert lent.is_out()
    assert client.status().loads == loads


def test_mutable_weights_are_those_of_the_last_lease(client: Client) -> None:
    lent = Lent(client, Block, mutable=True)
    with torch.no_grad(), client.acquire("m"):
        lent.module.get_parameter("last.weight").fill_(3)
        inside = lent.module.state_dict()
    assert same(lent.module.state_dict(), inside)
    assert inside["last.weight"].eq(3).all()


def test_what_is_tied_is_tied_in_it_too(client: Client) -> None:
    lent = Lent(client, Tied)
    state = lent.module.state_dict()
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    fused = [state[name].untyped_storage() for name in ("q", "k", "inner.v")]
    assert len({s._cdata for s in fused}) == 1
    assert fused[0].nbytes() == 6 * 4 * 4
    assert same(dict(state), dict(lent.twin.state_dict()))
    assert len(saved(state)) < len(saved(lent.twin.state_dict())) + 512


def test_a_destination_a_prefix_and_keep_vars_mean_what_they_do(client: Client) -> None:
    lent = Lent(client, Tied)
    into: dict[str, Any] = {}
    lent.module.state_dict(destination=into, prefix="a.")
    expected: dict[str, Any] = {}
    lent.twin.state_dict(destination=expected, prefix="a.")
    assert same(into, expected)
    kept = lent.module.state_dict(keep_vars=True)
    assert all(kept[name] is p for name, p in lent.module.named_parameters())


def test_put_into_the_same_dict_again_it_is_as_of_now(client: Client) -> None:
    lent = Lent(client, lambda: nn.Linear(4, 4), mutable=True)
    into: OrderedDict[str, Any] = OrderedDict()
    lent.module.state_dict(destination=into)
    with torch.no_grad(), client.acquire("m"):
        lent.module.get_parameter("weight").fill_(3)
    lent.module.state_dict(destination=into)
    assert into["weight"].eq(3).all()


def test_while_others_update_it_it_is_of_one_or_the_other(client: Client) -> None:
    lent = Lent(client, lambda: nn.Linear(64, 64, bias=False))
    done = threading.Event()
    torn = []

    def save() -> None:
        while not done.is_set():
            weight = lent.module.state_dict()["weight"]
            if not weight.eq(weight[0, 0]).all():
                torn.append(weight)

    client.update("m", {"weight": torch.zeros(64, 64)})
    saving = started(save)
    for i in range(50):
        client.update("m", {"weight": torch.full((64, 64), float(i))})
    done.set()
    saving.join()
    assert not torn


def test_hooks_that_were_there_see_bytes_that_can_be_read(client: Client) -> None:
    def double(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 2

    def make() -> nn.Module:
        module = nn.Linear(4, 4)
        module.register_state_dict_post_hook(double)  # type: ignore[no-untyped-call]
        return module

    lent = Lent(client, make)
    assert same(lent.module.state_dict(), lent.twin.state_dict())


def test_it_outlives_the_client(client: Client) -> None:
    lent = Lent(client, Block)
    state = lent.module.state_dict()
    client.close()
    assert same(state, lent.twin.state_dict())
    assert same(lent.module.state_dict(), lent.twin.state_dict())


def test_its_memory_is_given_back_with_it(client: Client) -> None:
    def maps() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    lent = Lent(client, lambda: nn.Linear(512, 512))
    lent.module.state_dict()
    gc.collect()  # collect the garbage of earlier tests now, not while the test counts
    before = maps()
    states = [lent.module.state_dict() for _ in range(50)]
    assert maps() >= before + 25
    del states
    assert maps() <= before + 10


def test_saved_by_torch_it_is_the_same_in_and_out(client: Client, tmp_path: Path) -> None:
    lent = Lent(client, lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))))
    lent.twin.state_dict()
    out = saved(lent.module.state_dict())
    with client.acquire("m"):
        inside = saved(lent.module.state_dict())
    assert out == inside == saved(lent.twin.state_dict())
    nbytes = sum(p.nbytes for p in lent.twin.parameters())
    assert nbytes < len(out) < nbytes + 8192
    assert same(torch.load(io.BytesIO(out)), lent.twin.state_dict())


def test_saved_by_safetensors_it_is_the_same_in_and_out(client: Client, tmp_path: Path) -> None:
    lent = Lent(client, lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))))
    save_file(lent.module.state_dict(), tmp_path / "out")
    with client.acquire("m"):
        save_file(lent.module.state_dict(), tmp_path / "in")
    save_file(lent.twin.state_dict(), tmp_path / "twin")
    files = [(tmp_path / name).read_bytes() for name in ("out", "in", "twin")]
    assert files[0] == files[1] == files[2]
    nbytes = sum(p.nbytes for p in lent.twin.parameters())
    assert nbytes < os.path.getsize(tmp_path / "out") < nbytes + 4096
    assert same(load_file(tmp_path / "out"), dict(sorted(lent.twin.state_dict().items())))


def test_a_part_of_a_large_tensor_is_saved_as_that_part(client: Client) -> None:
    whole = torch.randn(1 << 18)
    part = whole[1000:1016]
    module = nn.Module()
    module.part = nn.Parameter(part)
    client.register("small", module)
    weights = ComponentWeights(client, "small", [client.session.own("small")])
    guard(module, weights, lambda undo: None)
    assert len(saved(module.state_dict())) < 4096


def test_undone_nothing_is_left(client: Client) -> None:
    lent = Lent(client, Block)
    lent.end()
    for mine, its in zip(lent.module.modules(), lent.twin.modules(), strict=True):
        assert list(vars(mine)) == list(vars(its))
        assert not mine._state_dict_hooks
        assert not mine._load_state_dict_post_hooks
    assert same(lent.module.state_dict(), lent.twin.state_dict())
