"""After any number of swaps a module equals its twin, which was never lent.

Aliasing, tensors outside of `parameters()`, representation: README.md has the list.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from swapd.shared import vm
from swapd_client import Client
from tests.offload.modules import evict
from tests.offload.twins import Lent, same


class Fused(nn.Module):
    """Three projections that are views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        fused = torch.randn(48, 16)
        self.q, self.k, self.v = (nn.Parameter(fused[at : at + 16]) for at in (0, 16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.q.T) @ (x @ self.k.T).T @ (x @ self.v.T)


class Rotary(nn.Module):
    """A cache that is in no state dict, and is read in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)
        self.register_buffer("cache", torch.arange(8.0).cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        assert isinstance(self.cache, torch.Tensor)
        return self.out(x * self.cache)


class Workspace(nn.Module):
    """Scratch memory whose address a kernel may keep, and which it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)
        self.scratch = torch.zeros(8)

    def forward(self, x: torch.Tensor) -> Any:
        self.scratch += 1
        return self.out(x) + self.scratch


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made: nn.Module = torch.nn.utils.weight_norm(nn.Conv1d(4, 6, 3))
    return made


def new_weight_norm() -> nn.Module:
    made: nn.Module = parametrizations.weight_norm(nn.Conv1d(4, 6, 3))
    return made


def test_views_of_a_fused_storage_are_one_storage_of_its_size(client: Client) -> None:
    lent = Lent(client, Fused)
    assert lent.component.nbytes == 48 * 16 * 4
    x = torch.randn(4, 16)
    for _ in range(3):
        assert torch.equal(lent.run(x), lent.twin(x))
    q, k, v = lent.module.parameters()
    assert {t.untyped_storage().data_ptr() for t in (q, k, v)} == {q.data_ptr()}
    assert q.untyped_storage().nbytes() == lent.component.nbytes
    assert (k.data_ptr() - q.data_ptr(), v.data_ptr() - q.data_ptr()) == (1024, 2048)


def test_who_asks_which_tensors_share_a_storage_is_told_the_same_as_before(
    client: Client,
) -> None:
    """Else code that saves modules, or registers them again, takes all for tied."""
    lent = Lent(client, lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    for _ in range(2):
        storages = [p.untyped_storage() for p in lent.module.parameters()]
        assert [s.nbytes() for s in storages] == [64, 16, 64, 16, 64, 16]
        assert len({s.data_ptr() for s in storages}) == len(storages)
        if "m" in client.session.components:
            lent.end()
    middle = lent.module.get_submodule("1")
    assert client.register("middle", middle).nbytes == 256 + 16


@pytest.mark.parametrize(
    "make",
    [Rotary, Workspace, old_weight_norm, new_weight_norm],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_it_computes_what_its_twin_computes(client: Client, make: Callable[[], nn.Module]) -> None:
    lent = Lent(client, lambda: make().requires_grad_(False))
    x = torch.randn(2, 4, 8)
    for _ in range(4):
        assert torch.equal(lent.run(x), lent.twin(x))
    assert same(lent.module.state_dict(), lent.twin.state_dict())


def test_what_is_no_parameter_stays_where_it_is(client: Client) -> None:
    module = Workspace()
    scratch, address = module.scratch, module.scratch.data_ptr()
    component = client.register("m", module)
    with client.acquire("m"):
        module(torch.ones(8))
    assert module.scratch is scratch
    assert scratch.data_ptr() == address
    assert component.nbytes == 256 + 8 * 4


def train(module: nn.Module, x: torch.Tensor) -> None:
    """One step: statistics, gradients, new weights."""
    module.train()
    module(x).square().sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.01 * parameter.grad)
            parameter.grad = None


@pytest.mark.parametrize("make", [old_weight_norm, new_weight_norm], ids=["old", "new"])
def test_normed_weights_are_trained_as_the_twin_s(
    client: Client, make: Callable[[], nn.Module]
) -> None:
    lent = Lent(client, make, mutable=True)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(2, 4, 9)
        evict(client, "m")
        with client.acquire("m"):
            train(lent.module, x)
        train(lent.twin, x)
    assert same(lent.module.state_dict(), lent.twin.state_dict())


def test_statistics_that_forward_writes_are_not_lost(client: Client) -> None:
    """Of a clean component: its buffers are private, and swaps do not touch them."""
    lent = Lent(client, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 8)
        with torch.no_grad():
            assert torch.equal(lent.run(x), lent.twin(x))
    assert lent.module.get_buffer("1.num_batches_tracked") == 3
    assert same(lent.module.state_dict(), lent.twin.state_dict())


def test_parameters_stay_the_objects_they_were_and_keep_what_is_set_on_them(
    client: Client,
) -> None:
    module = nn.Linear(4, 4)
    vars(module.weight)["quant_state"] = state = {"scale": 3}
    module.bias.requires_grad_(False)
    module.weight.grad = grad = torch.ones(4, 4)
    before = [id(p) for p in module.parameters()]
    client.register("m", module)
    for _ in range(3):
        evict(client, "m")
        client.acquire("m").release()
        assert [id(p) for p in module.parameters()] == before
        assert vars(module.weight)["quant_state"] is state
        assert module.weight.grad is grad
        assert [p.requires_grad for p in module.parameters()] == [True, False]
        assert all(type(p) is nn.Parameter and p.is_leaf for p in module.parameters())


def test_registered_under_inference_mode_it_is_no_inference_tensor(client: Client) -> None:
    module, twin = nn.Linear(4, 4), nn.Linear(4, 4)
    twin.load_state_dict(module.state_dict())
    with torch.inference_mode():
        client.register("m", module)
        evict(client, "m")
        with client.acquire("m"):
            module(torch.ones(4))
    assert not any(p.is_inference() for p in module.parameters())
    with client.acquire("m"):
        module(torch.ones(4)).sum().backward()
    twin(torch.ones(4)).sum().backward()
    for mine, its in zip(module.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)


def test_a_module_made_under_inference_mode_is_one_still(client: Client) -> None:
    with torch.inference_mode():
        lent = Lent(client, lambda: nn.Linear(4, 4))
        x = torch.randn(2, 4)
    assert all(p.is_inference() for p in lent.module.parameters())
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert torch.equal(lent.run(x), lent.twin(x))
    assert same(lent.module.state_dict(), lent.twin.state_dict())


class Prepacked(nn.Module):
    """Replaces its weight after loading, as quantisation does: transposed, of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def process(self) -> None:
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 127
        packed = (self.weight.detach() / scale).round().to(torch.int8).T
        del self.weight
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(scale.T, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.packed.float()) * self.scale


def test_registered_after_quantisation_it_is_what_that_left(client: Client) -> None:
    def make() -> nn.Module:
        module = Prepacked()
        module.process()
        return module

    lent = Lent(client, make)
    assert lent.component.nbytes == 256 + 24
    x = torch.randn(2, 8)
    for _ in range(3):
        assert torch.equal(lent.run(x), lent.twin(x))
    assert lent.module.get_parameter("packed").stride() == (1, 8)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_registration_that_fails_at_any_tensor_leaves_all_as_it_was(
    client: Client, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in module.named_parameters()}
    copies = iter(range(n + 1))

    write = vm.write

    def failing(fd: int, offset: int, source: int, nbytes: int) -> None:
        if next(copies) == n:
            raise OSError("injected")
        write(fd, offset, source, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(vm, "write", failing)
        with pytest.raises(OSError, match="injected"):
            client.register("m", module)
    assert not client.status().components
    while client.status().host_copy_bytes:
        pass  # those of earlier models may still be released
    for name, parameter in module.named_parameters():
        address, value = before[name]
        assert parameter.data_ptr() == address
        assert torch.equal(parameter, value)
    client.register("m", module)
    with client.acquire("m"):
        assert all(torch.equal(p, before[name][1]) for name, p in module.named_parameters())


def test_the_ledger_is_the_same_before_and_after_a_hundred_swaps(client: Client) -> None:
    client.register("m", nn.Linear(256, 256))
    client.register("all", {"bytes": bytes(client.status().budget_bytes)})
    client.acquire("m").release()
    client.acquire("all").release()
    before = client.status()
    for _ in range(100):
        client.acquire("m").release()
        client.acquire("all").release()
    after = client.status()
    for name in (
        "budget_bytes",
        "used_bytes",
        "quarantined_bytes",
        "host_copy_bytes",
        "chunk_bytes",
    ):
        assert getattr(after, name) == getattr(before, name), name
    assert after.loads == before.loads + 200
    assert after.bytes_out == before.bytes_out
