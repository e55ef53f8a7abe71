"""Tensors with several names, of several components, in odd places, or without bytes."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from swapd_client import Client, InvalidSource
from swapd_client.offload import ownership
from tests.contents import bytes_of
from tests.offload.modules import (
    TOKENS,
    WIDTH,
    Encoder,
    Model,
    assert_comes_back,
    computed,
    evict,
    leases,
    seeded,
)


def parts(client: Client) -> dict[str, int]:
    return {c.name: c.nbytes for c in client.status().components}


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


NBYTES = WIDTH * WIDTH * 4
X = torch.arange(2.0 * WIDTH).reshape(2, WIDTH) / WIDTH


class Tied(nn.Module):
    """One parameter, two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class OneStorage(nn.Module):
    """Two parameters, one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.second.weight = nn.Parameter(self.first.weight.detach().view(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Tied, OneStorage])
def test_what_has_two_names_is_counted_once_and_stays_one(
    client: Client, kind: type[Tied | OneStorage]
) -> None:
    model, expected = computed(X, kind)
    one = model.first.weight is model.second.weight
    with client.attach(model, ".") as attachment:
        assert parts(client) == {kind.__name__: NBYTES}
        for _ in range(3):
            assert_comes_back(client, model, X, expected, kind.__name__)
        assert (model.first.weight is model.second.weight) is one
        assert model.first.weight.data_ptr() == model.second.weight.data_ptr()
        assert attachment.components[kind.__name__].nbytes == NBYTES
    model.first.weight[0, 0] = 7.0
    assert model.second.weight[0, 0] == 7.0


class Shared(nn.Module):
    """Two components with a weight in common, a third module with it, and a module in both."""

    def __init__(self) -> None:
        super().__init__()
        first, common, head = linear(), linear(), linear()
        self.a = nn.Sequential(first, common)
        self.b = nn.Sequential(linear(), linear())
        self.b[1].weight = common.weight
        head.weight = first.weight
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(x)))  # type: ignore[no-any-return]


def test_what_two_components_share_is_one_of_its_own_and_in_with_either(client: Client) -> None:
    model, expected = computed(X, Shared)
    of_the_head = model.head(X)
    with client.attach(model, ["a", "b"]) as attachment:
        assert parts(client) == {"a+head": NBYTES, "b": NBYTES, "a+b": NBYTES}
        with attachment.use("a"):
            assert leases(client) == {"a+head": 1, "b": 0, "a+b": 1}
            with attachment.use("b"):
                assert leases(client) == {"a+head": 1, "b": 1, "a+b": 2}
        with attachment.use("b"):
            assert leases(client) == {"a+head": 0, "b": 1, "a+b": 1}
        evict(client, "a+head", "b", "a+b")
        assert torch.equal(model(X), expected)  # the head loads the tensors under its own name
        evict(client, "a+head")
        assert torch.equal(model.head(X), of_the_head)
        assert model.b[1].weight is model.a[1].weight


def test_what_dozens_of_components_share_has_a_name_of_its_own(client: Client) -> None:
    first, second = linear().weight.requires_grad_(False), linear().weight.requires_grad_(False)
    model = nn.ModuleList(linear().requires_grad_(False) for _ in range(40))
    for layer in model:
        layer.weight = first
    for layer in model[:-1]:
        layer.second = second
    expected = model[7](X)
    with client.attach({"model": model}) as attachment:
        assert len(attachment.components) == 40
        assert len(parts(client)) == 2
        assert_comes_back(client, model[7], X, expected, *parts(client))


def test_evicting_one_of_two_that_share_leaves_the_other_whole(client: Client) -> None:
    model = seeded(Shared)
    expected = model.b(X)
    with client.attach(model, ["a", "b"]) as attachment, attachment.use("b"):
        model.a(X)
        client.register("filler", {"x": bytes(6 << 20)})
        client.acquire("filler").release()
        filling = client.register("more", {"x": bytes_of("more", 6 << 20)})
        with client.acquire("filler", "more"):
            assert leases(client)["a+b"] == 1
            assert {c.name: c.state for c in client.status().components}["a+head"] == "absent"
            assert torch.equal(model.b(X), expected)
        assert filling.nbytes


def test_shared_weights_of_rivals_exclude_nobody(client: Client) -> None:
    model, expected = computed(X, Shared)
    with client.attach(model, ["a", "b"], cpu_offload_enabled=True):
        groups = {c.name: c.group for c in client.status().components}
        assert groups["b"] is not None
        assert groups["a+b"] is None
        assert torch.equal(model(X), expected)


class Twice(nn.Module):
    """One submodule under two names, in one component and in two."""

    def __init__(self) -> None:
        super().__init__()
        self.a: Any = nn.Sequential(linear(), nn.ReLU())
        self.a.again = self.a[0]
        self.b = nn.Sequential(linear(), self.a[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a.again(self.b(self.a(x)))  # type: ignore[no-any-return]


def test_a_submodule_under_two_names_is_entered_and_left_as_often(client: Client) -> None:
    model, expected = computed(X, Twice)
    with client.attach(model, ["a", "b"]):
        assert parts(client) == {"a+b": NBYTES, "b": NBYTES}
        assert_comes_back(client, model, X, expected, "a+b", "b")
        assert leases(client) == {"a+b": 0, "b": 0}
        assert torch.equal(model.a[0](X), model.b[1](X))
        assert leases(client) == {"a+b": 0, "b": 0}
    assert model.a[0] is model.b[1] is model.a.again


class Fused(nn.Module):
    """Three projections that are views of one storage, in two components."""

    def __init__(self) -> None:
        super().__init__()
        fused: Any = torch.randn(3 * WIDTH, WIDTH)
        self.q, self.k, self.v = linear(), linear(), linear()
        for module, rows in zip((self.q, self.k, self.v), fused.split(WIDTH), strict=True):
            module.weight = nn.Parameter(rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) + self.k(x) + self.v(x)  # type: ignore[no-any-return]


def test_views_of_a_fused_storage_take_the_bytes_of_one(client: Client) -> None:
    model, expected = computed(X, Fused)
    with client.attach(model, "."):
        assert parts(client) == {"Fused": 3 * NBYTES}
        assert_comes_back(client, model, X, expected, "Fused")
    with client.attach(model, ["q", "v"]):  # tensors that they do not share belong to one each
        assert set(parts(client)) == {"q", "v"}
        assert torch.equal(model(X), expected)


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a: Any = nn.Module()
        self.a.nothing = nn.Parameter(torch.empty(0, 3))
        self.b: Any = nn.Module()
        self.b.nothing = nn.Parameter(torch.empty(4, 0))
        self.b.something = nn.Parameter(torch.ones(4))


def test_empty_tensors_are_strangers_to_each_other(client: Client) -> None:
    model = seeded(Empty)
    with client.attach(model, ["a", "b"]):
        assert not any("+" in name for name in parts(client))
        assert model.a.nothing.shape == (0, 3)
        assert model.b.nothing.shape == (4, 0)


def test_a_component_on_two_devices_is_refused(client: Client) -> None:
    model = seeded(Tied)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.second.weight = nn.Parameter(torch.empty(2, 2, device="cuda:1"))
        group = ownership.TensorGroup("dit", dict(model.named_parameters()))
        with pytest.raises(InvalidSource, match=r"'first.weight' on cpu and 'second.weight' on cu"):
            ownership._check(group, "")


def test_parameters_without_bytes_are_refused_by_name_and_told_of_load(client: Client) -> None:
    model = seeded(Tied)
    model.second = nn.Linear(2, 2, device="meta")
    with pytest.raises(InvalidSource, match=r"'second.weight' .* meta .*client.load"):
        client.attach(model, ".")
    with pytest.raises(InvalidSource, match=r"'dit.second.weight' .* meta"):
        client.attach({"dit": model})
    model.second = nn.LazyLinear(2)
    with pytest.raises(InvalidSource, match=r"'second.weight' .*client.load"):
        client.attach(model, ".")
    assert parts(client) == {}


@pytest.mark.filterwarnings("ignore:Sparse CSR|The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (r"not dense \(torch.sparse_coo", lambda: torch.eye(4).to_sparse()),
        (r"not dense \(torch.sparse_csr", lambda: torch.eye(4).to_sparse_csr()),
        ("nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ],
)
def test_parameters_that_are_not_dense_are_refused_by_name_and_buffers_stay(
    client: Client, tmp_path: Path, kind: str, make: Callable[[], torch.Tensor]
) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    save_file({**model.state_dict(), "odd": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    model.odd = nn.Parameter(make(), requires_grad=False)
    for take in (
        lambda: client.attach({"dit": model}),
        lambda: client.attach({"dit": model}, resident=0, blocks=["0"]),
        lambda: client.register("dit", model),
        lambda: client.load("dit", tmp_path, model),
    ):
        with pytest.raises(InvalidSource, match=rf"'odd' is {kind}.*As a buffer"):
            take()
    odd = model.odd.data
    del model.odd
    model.register_buffer("odd", odd)
    with client.attach({"dit": model}), torch.inference_mode():
        evict(client, "dit")
        model(torch.ones(1, 4))
        assert model.odd is odd


def test_an_inner_component_owns_its_weights_and_the_outer_one_the_rest(client: Client) -> None:
    model, expected = computed(TOKENS, Encoder)
    total = sum(p.nbytes for p in model.parameters())
    for order in (["model", "model.embed"], ["model.embed", "model"]):
        with client.attach({"model": model}, order) as attachment:
            sizes = parts(client)
            assert sizes["model.embed"] == model.embed.weight.nbytes
            assert sum(sizes.values()) == pytest.approx(total, rel=0.01)
            assert_comes_back(client, model, TOKENS, expected, *sizes)
            with attachment.use(model.norm):
                assert leases(client) == {"model": 1, "model.embed": 0}
            with attachment.use(model.embed):
                assert leases(client) == {"model": 0, "model.embed": 1}
            with attachment.use(model):
                assert leases(client) == {"model": 1, "model.embed": 1}


def test_what_is_registered_already_gets_hooks_only(client: Client) -> None:
    model, expected = computed(TOKENS, Encoder)
    client.register("mine", model)
    with client.attach({"text": model}, ["text"]) as attachment:
        assert list(parts(client)) == ["mine"]
        assert_comes_back(client, model, TOKENS, expected, "mine")
        assert attachment.components["text"].nbytes == parts(client)["mine"]
    assert list(parts(client)) == ["mine"]
    client.unregister("mine")


@pytest.mark.parametrize("by_parts", [False, True])
def test_what_was_registered_with_components_is_loaded_for_modules_beside_them(
    client: Client, by_parts: bool
) -> None:
    model, expected = computed(TOKENS, Model)
    if by_parts:
        rest = nn.ModuleList([model.vae, model.head])
        parts = {"text": model.text_encoder, "dit": model.transformer, "rest": rest}
        client.register_family("mine", parts)
    else:
        client.register("mine", model)
    with client.attach({"model": model}) as attachment:
        assert len(attachment.components) == 3
        evict(client)
        assert torch.equal(model(TOKENS), expected)
        inner = model.vae.decode(model.transformer(model.text_encoder(TOKENS)))
        evict(client)
        assert torch.equal(model.head(inner), expected)
    client.unregister("mine")


class Odd(nn.Module):
    """Tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        dit: Any = nn.Module()
        dit.weight = nn.Parameter(torch.ones(4))
        dit.register_buffer("statistics", torch.zeros(4), persistent=False)
        dit.table = torch.arange(4.0)
        dit.cache = {"rope": [torch.ones(2), "text"]}
        dit.hidden = [nn.Linear(2, 2, bias=False)]
        self.dit = dit


def test_plain_tensors_are_named_with_their_bytes_and_can_be_taken_in(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(Odd)
    with caplog.at_level(logging.WARNING, "swapd_client"), client.attach(model):
        (line,) = [r.getMessage() for r in caplog.records]
        assert "dit.table (16 B), dit.cache.rope.0 (8 B), dit.hidden.0.weight (16 B)" in line
        assert "statistics" not in line
        assert "extra_tensors=" in line
        assert parts(client) == {"dit": 16}
    caplog.clear()
    with client.attach(model, extra_tensors=["dit.*"]) as attachment:
        assert not [r for r in caplog.records if r.levelno == logging.WARNING]
        assert parts(client)["dit"] > 256
        evict(client, "dit")
        with attachment.use("dit"):
            assert model.dit.table.tolist() == [0, 1, 2, 3]
            assert model.dit.cache["rope"][0].tolist() == [1, 1]
            assert (model.dit.statistics + 1).tolist() == [1] * 4
    with pytest.raises(InvalidSource, match=r"'dit.missing'.* dit.tabl"):
        client.attach(model, extra_tensors=["dit.missing"])
