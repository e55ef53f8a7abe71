"""`state_dict` gives tensors of its own, with present and with absent weights."""

import gc
import io
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
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


# --- the files of transformers and diffusers ------------------------------------------------


def llm() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    made: nn.Module = LlamaForCausalLM(config).eval()
    return made


def dit() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    made: nn.Module = SD3Transformer2DModel(
        sample_size=8,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
    ).eval()
    return made


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", [llm, dit], ids=["transformers", "diffusers"])
def test_the_same_files_in_and_out(client: Client, make: Any, tmp_path: Path) -> None:
    lent = Lent(client, make)
    mine: Any = lent.module
    its: Any = lent.twin
    its.save_pretrained(tmp_path / "twin")
    mine.save_pretrained(tmp_path / "out")
    assert lent.is_out()
    with client.acquire("m"):
        mine.save_pretrained(tmp_path / "in")
    found = [files(tmp_path / name) for name in ("twin", "out", "in")]
    assert any(name.endswith(".safetensors") for name in found[0])
    assert found[0] == found[1] == found[2]
    again = type(mine).from_pretrained(tmp_path / "out")
    for loaded, original in zip(again.parameters(), its.parameters(), strict=True):
        assert torch.equal(loaded, original)
