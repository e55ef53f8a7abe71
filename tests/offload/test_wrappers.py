"""Parameters that wrap other tensors: the inner ones move, and the wrapper stays."""

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from swapd_client import Client, InvalidSource, NotWhileAttached
from swapd_client.memory.movable import inner_names, is_wrapper
from swapd_client.memory.tensors import TensorLayout
from tests.guarantees.harness import Daemon
from tests.offload.nursery import Nursery
from tests.offload.twins import Lent, same

#: Has no types.
_aliased: Any = return_and_correct_aliasing


class Scaled(torch.Tensor):
    """A tensor as bytes and a scale, which may be wrappers themselves."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> "Scaled":
        made: Scaled = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, _: Any, size: Any, stride: Any) -> "Scaled":
        return cls(inner["codes"], inner["scale"])

    def whole(self) -> torch.Tensor:
        scale = self.scale.whole() if isinstance(self.scale, Scaled) else self.scale
        return self.codes.float() * scale

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Scaled({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            inner = func is not aten._to_copy.default and func
            made = cls(*((inner or torch.clone)(getattr(args[0], n)) for n in ("codes", "scale")))
            return _aliased(func, args, kwargs, made)
        if func is aten.copy_.default:
            for name in ("codes", "scale"):
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        plain = [a.whole() if isinstance(a, Scaled) else a for a in args]
        return func(*plain, **kwargs)


def scaled(rows: int, columns: int, *, deep: bool = False) -> Scaled:
    codes = torch.randint(-127, 127, (rows, columns), dtype=torch.int8)
    scale = torch.rand(rows, 1)
    if deep:
        return Scaled(codes, Scaled(torch.ones(rows, 1, dtype=torch.int8), scale))
    return Scaled(codes, scale)


class Own(nn.Module):
    """A linear layer whose weight is a wrapper."""

    def __init__(self, *, deep: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(scaled(8, 16, deep=deep), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def deep() -> nn.Module:
    return Own(deep=True)


def torchao_int8() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
    return module


MAKERS = [Own, deep, torchao_int8]
every_kind = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def inner(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if is_wrapper(tensor):
        for name in inner_names(tensor):
            yield from inner(getattr(tensor, name))
    else:
        yield tensor


def given(make: Any) -> torch.Tensor:
    return torch.randn(3, 64 if make is torchao_int8 else 16)


@every_kind
def test_the_inner_tensors_are_moved_and_the_outer_object_stays(client: Client, make: Any) -> None:
    lent = Lent(client, make)
    low, high = lent.component.address, lent.component.address + lent.component.nbytes
    plain = 0
    for mine, its in zip(lent.module.parameters(), lent.twin.parameters(), strict=True):
        assert type(mine) is type(its)
        assert (mine.shape, mine.dtype) == (its.shape, its.dtype)
        for tensor, twin in zip(inner(mine), inner(its), strict=True):
            assert low <= tensor.data_ptr() < high
            assert tensor.dtype is twin.dtype
            plain += twin.nbytes
    assert plain <= lent.component.nbytes < plain + 256 * 12


@every_kind
def test_it_computes_what_its_twin_computes(client: Client, make: Any) -> None:
    lent = Lent(client, make)
    parameters = list(lent.module.parameters())
    insides = [id(t) for p in parameters for t in inner(p)]
    x = given(make)
    for _ in range(3):
        assert torch.equal(lent.run(x), lent.twin(x))
    assert all(a is b for a, b in zip(lent.module.parameters(), parameters, strict=True))
    assert [id(t) for p in parameters for t in inner(p)] == insides


@every_kind
def test_state_dict_deepcopy_and_save_while_it_is_out(client: Client, make: Any) -> None:
    lent = Lent(client, make)
    x = given(make)
    expected = lent.twin(x)
    state = lent.module.state_dict()
    assert list(state) == list(lent.twin.state_dict())
    for mine, its in zip(state.values(), lent.twin.state_dict().values(), strict=True):
        assert type(mine) is type(its)
        assert all(same(a, b) for a, b in zip(inner(mine), inner(its), strict=True))
    made = copy.deepcopy(lent.module)
    assert torch.equal(made(x), expected)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    made.load_state_dict(again)
    assert torch.equal(made(x), expected)
    assert lent.is_out()


@every_kind
def test_moves_and_casts(client: Client, make: Any) -> None:
    lent = Lent(client, make)
    x = given(make)
    lent.module.to("cpu")
    lent.module.float()
    assert torch.equal(lent.run(x), lent.twin(x))
    with pytest.raises(NotWhileAttached):
        lent.module.half()


@every_kind
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("mutable", [False, True])
def test_what_is_loaded_goes_into_the_inner_tensors(
    client: Client, make: Any, mutable: bool, assign: bool
) -> None:
    lent = Lent(client, make, mutable=mutable)
    insides = [id(t) for p in lent.module.parameters() for t in inner(p)]
    torch.manual_seed(5)
    other = make()
    lent.module.load_state_dict(other.state_dict(), assign=assign)
    assert [id(t) for p in lent.module.parameters() for t in inner(p)] == insides
    x = given(make)
    assert torch.equal(lent.run(x), other(x))
    assert not torch.equal(lent.twin(x), other(x))


@every_kind
def test_unregistered_they_are_private_and_the_same(client: Client, make: Any) -> None:
    lent = Lent(client, make)
    lent.end()
    x = given(make)
    assert torch.equal(lent.module(x), lent.twin(x))


def test_two_that_wrap_the_same_tensor_are_moved_as_one(client: Client) -> None:
    codes, scale = torch.ones(8, 8, dtype=torch.int8), torch.ones(8, 1)
    module = nn.Module()
    module.a = nn.Parameter(Scaled(codes, scale), requires_grad=False)
    module.b = nn.Parameter(Scaled(codes, scale), requires_grad=False)
    part = client.register("m", module)
    assert part.nbytes == 256 + 32
    a, b = (list(inner(one)) for one in module.parameters())
    assert a[0].data_ptr() == b[0].data_ptr() == part.address


def test_what_is_wrong_inside_is_named(client: Client) -> None:
    bad = Scaled(torch.ones(2, 2, dtype=torch.int8), torch.eye(2).to_sparse())
    with pytest.raises(InvalidSource, match=r"'w\.scale' is not dense"):
        client.register("m", {"w": bad})


class Unknown(torch.Tensor):
    """Does not name its inner tensors."""


def test_an_unknown_subclass_is_refused_by_name(client: Client) -> None:
    odd = torch.ones(3).as_subclass(Unknown)
    with pytest.raises(InvalidSource, match=r"'a' .* Unknown"):
        client.register("m", {"a": odd})
    client.register("m", {"a": odd.as_subclass(torch.Tensor)})


def test_one_on_another_device_than_the_daemon_s_is_refused() -> None:
    with pytest.raises(InvalidSource, match=r"'w' .* Scaled on cpu.*\.to\('cuda:0'\) first"):
        TensorLayout({"w": scaled(2, 2)}, gpu=0)


PROGRAM = Path(__file__).parent / "programs" / "wrappers.py"


def test_tensor_parallel_weights_are_lent_and_loaded(daemon: Daemon, nursery: Nursery) -> None:
    """DTensors also name a mesh as a part, which is no tensor."""
    assert nursery.run(PROGRAM, "tensor_parallel", daemon.folder) == (0, "held\n")


def test_what_fsdp_shards_is_refused_by_name(daemon: Daemon, nursery: Nursery) -> None:
    status, said = nursery.run(PROGRAM, "fsdp", daemon.folder)
    assert status == 0
    assert "'dit' is sharded by FSDP, which gathers its weights" in said
