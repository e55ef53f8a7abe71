"""Tensors move once, storage by storage: the same objects, bit for bit, still tied.

No daemon: the test fills a layout into memory of this process, and binds its tensors there.
"""

import ctypes
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from swapd.shared import vm
from swapd_client.errors import InvalidSource
from swapd_client.memory import dlpack
from swapd_client.memory.layout import ALIGN_BYTES
from swapd_client.memory.movable import Source
from swapd_client.memory.tensors import Buffers, TensorLayout
from tests.client.filled import fill

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    *(
        getattr(torch, name)
        for name in ("float8_e8m0fnu", "float4_e2m1fn_x2", "int4", "uint4", "int1", "bits8")
        if hasattr(torch, name)  # newer than the oldest supported torch
    ),
]


class Moved:
    """A source moved to `address`, as by a registration."""

    def __init__(self, source: Source) -> None:
        layout = TensorLayout(source)
        self.nbytes = layout.nbytes
        self.span = vm.round_up(layout.nbytes + 1)
        self.address = vm.map_anonymous(self.span)
        fill(layout, self.address)
        layout.bind(self.address)

    def holds(self, tensor: torch.Tensor) -> bool:
        start = tensor.data_ptr()
        return self.address <= start and start + tensor.nbytes <= self.address + self.nbytes

    def free(self) -> None:
        vm.free(self.address, self.span)


@pytest.fixture
def move() -> Iterator[Callable[[Source], Moved]]:
    made: list[Moved] = []

    def move(source: Source) -> Moved:
        made.append(Moved(source))
        return made[-1]

    yield move
    for moved in made:
        moved.free()


Move = Callable[[Source], Moved]


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of every element: equal NaNs are equal, and -0.0 is not 0.0."""
    item = tensor.element_size()
    base = torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * item,
        (*tensor.shape, item),
        (*(s * item for s in tensor.stride()), 1),
    )
    return bytes(base.flatten().tolist())


def kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad


# --- any strides, offsets and types ------------------------------------------------------


@st.composite
def storages(draw: st.DrawFn) -> list[torch.Tensor]:
    """Up to three views of one storage: any type, shape, strides (0 too) and offset."""
    views = []
    for _ in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        stride = [draw(st.integers(0, 9)) for _ in shape]
        views.append((dtype, draw(st.integers(0, 300)), shape, stride))
    ends = [
        (offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n) + 1)
        * torch.empty(0, dtype=dtype).element_size()
        for dtype, offset, shape, stride in views
    ]
    rng = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    content = torch.randint(0, 256, (max(ends),), generator=rng, dtype=torch.uint8)
    return [
        torch.empty(0, dtype=dtype).set_(content.untyped_storage(), offset, shape, stride)
        for dtype, offset, shape, stride in views
    ]


@settings(deadline=None, max_examples=150)
@given(st.lists(storages(), min_size=1, max_size=3))
def test_every_tensor_comes_back_bit_for_bit(groups: list[list[torch.Tensor]]) -> None:
    named = {f"{g}.{v}": t for g, views in enumerate(groups) for v, t in enumerate(views)}
    before = {name: (kind(t), raw(t)) for name, t in named.items()}
    starts = [[t.data_ptr() - t.untyped_storage().data_ptr() for t in views] for views in groups]
    moved = Moved(named)
    try:
        assert {name: (kind(t), raw(t)) for name, t in named.items()} == before
        for views, offsets in zip(groups, starts, strict=True):
            shifts = set()
            for tensor, offset in zip(views, offsets, strict=True):
                if tensor.numel():
                    assert tensor.data_ptr() >= moved.address
                    assert tensor.data_ptr() % ALIGN_BYTES == offset % ALIGN_BYTES
                    shifts.add(tensor.data_ptr() - offset)
            assert len(shifts) <= 1, "views of one storage keep their distances"
    finally:
        moved.free()


# --- aliasing ----------------------------------------------------------------------------


def test_one_parameter_under_two_names_is_moved_once_and_stays_one(move: Move) -> None:
    a, b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    module = nn.ModuleDict({"a": a, "b": b})
    b.weight = a.weight
    before = a.weight.detach().clone()
    moved = move(module)
    assert b.weight is a.weight
    assert moved.nbytes == before.nbytes
    assert moved.holds(a.weight)
    assert torch.equal(a.weight, before)


def test_empty_tensors_are_strangers_though_all_begin_at_address_0(move: Move) -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.empty(0, 3))
    module.b = nn.Parameter(torch.empty(5, 0, dtype=torch.float64))
    module.c = nn.Parameter(torch.ones(3))
    moved = move(module)
    assert moved.nbytes == 12
    assert (module.a.shape, module.b.shape) == ((0, 3), (5, 0))
    assert module.b.dtype is torch.float64
    assert torch.equal(module.c, torch.ones(3))


# --- modules afterwards ------------------------------------------------------------------


class Small(nn.Module):
    """Parameters, and buffers that its forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.last(self.norm(self.first(x)).relu())
        assert isinstance(out, torch.Tensor)
        return out


def test_the_old_memory_is_let_go(move: Move) -> None:
    module = nn.Linear(4, 4, bias=False)
    kept = module.weight.detach()
    move(module)
    module.weight.data[0] = 7
    assert not torch.equal(kept, module.weight), "who kept the old storage keeps old bytes"


# --- refused -----------------------------------------------------------------------------


class Odd(torch.Tensor):
    pass


class OddParameter(nn.Parameter):
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return NotImplemented


class TaggedParameter(nn.Parameter):
    """As vLLM's: a parameter with its own loader."""

    def __new__(cls, data: torch.Tensor, tag: str) -> "TaggedParameter":
        made: TaggedParameter = super().__new__(cls, data, requires_grad=False)
        return made

    def __init__(self, data: torch.Tensor, tag: str) -> None:
        self.tag = tag


def test_a_parameter_of_another_class_with_bytes_of_its_own_is_moved_as_it_is(move: Move) -> None:
    module = nn.Linear(2, 2)
    module.weight = parameter = TaggedParameter(torch.arange(4.0).view(2, 2), "rows")
    before = parameter.data_ptr()
    move(module)
    assert module.weight is parameter
    assert type(parameter) is TaggedParameter
    assert parameter.tag == "rows"
    assert parameter.data_ptr() != before
    assert torch.equal(parameter.data, torch.arange(4.0).view(2, 2))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.empty(3, device="meta"), "on the meta device and has no bytes"),
    "subclass": (lambda: torch.ones(3).as_subclass(Odd), "is a Odd, which does not say"),
    "parameter subclass": (lambda: OddParameter(torch.ones(3)), "is a OddParameter"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"is not dense \(torch.sparse_coo"),
    "compressed": (lambda: torch.eye(3).to_sparse_csr(), r"is not dense \(torch.sparse_csr"),
    "nested": (lambda: torch._nested_tensor_from_tensor_list([torch.ones(2)]), "is nested"),
    "computed": (lambda: torch.ones(3, requires_grad=True) * 2, "detach\\(\\) it first"),
    "conjugate": (lambda: torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj"),
    "negative": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "resolve_neg"),
    "zero": (lambda: torch._efficientzerotensor((3,)), "a zero"),
    "freed": (lambda: freed(), "has lost its storage"),
    "no tensor": (lambda: b"bytes", "is a bytes, not a tensor"),
}


def freed() -> torch.Tensor:
    """As sharding wrappers leave their parameters: a shape, and no bytes."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(4)
    return tensor


@pytest.mark.parametrize("which", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls some of these prototypes
def test_what_cannot_be_moved_is_refused_by_name_and_nothing_is_touched(which: str) -> None:
    make, why = REFUSED[which]
    good = torch.arange(3.0)
    address = good.data_ptr()
    with pytest.raises(InvalidSource, match=why) as refused:
        TensorLayout({"good": good, "the.bad.one": make(), "also good": torch.ones(1)})
    assert "'the.bad.one'" in str(refused.value)
    assert good.data_ptr() == address
    assert torch.equal(good, torch.arange(3.0))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)), "1.weight"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "1.weight"),
    ],
    ids=["lazy", "meta"],
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_module_that_is_not_all_there_is_refused_by_the_parameter_s_name(
    make: Callable[[], nn.Sequential], name: str
) -> None:
    module = make()
    weight = module.get_parameter("0.weight")
    address, value = weight.data_ptr(), weight.detach().clone()
    with pytest.raises(InvalidSource, match=f"'{name}'"):
        TensorLayout(module)
    assert weight.data_ptr() == address
    assert torch.equal(weight, value)


# --- the hash ----------------------------------------------------------------------------


def test_the_hash_tells_layouts_apart_and_not_their_values() -> None:
    torch.manual_seed(1)
    other = nn.Linear(4, 4)
    assert TensorLayout(nn.Linear(4, 4)).digest() == TensorLayout(other).digest()
    digests = [
        TensorLayout(source).digest()
        for source in (
            nn.Linear(4, 4),
            nn.Linear(4, 4, bias=False),
            nn.Linear(4, 4).half(),
            nn.Sequential(nn.Linear(4, 4)),
            {"weight": torch.ones(4, 4), "bias": torch.ones(2, 2)},
            {"weight": torch.ones(4, 4).T, "bias": torch.ones(4)},
            {"weight": torch.ones(4, 5)[:, :4], "bias": torch.ones(4)},
        )
    ]
    assert len(set(digests)) == len(digests)


# --- for a GPU ---------------------------------------------------------------------------


def on_gpu(device: str) -> torch.Tensor:
    """A tensor that claims to be on a GPU, without memory."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(4, device=device)


def test_the_bytes_are_of_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def capsule(address: int, name: bytes, _: None) -> torch.Tensor:
        managed = dlpack._ManagedTensor.from_address(address)
        seen.append((managed.device_type, managed.device_id))
        return torch.empty(0)

    monkeypatch.setattr(dlpack, "_new_capsule", capsule)
    monkeypatch.setattr(dlpack, "from_dlpack", lambda tensor: tensor)
    dlpack.bytes_at(4096, 1, dlpack.HOST)
    dlpack.bytes_at(4096, 1, dlpack.gpu(3))
    assert seen == [(1, 0), (2, 3)]
    assert str(dlpack.gpu(3).device) == "cuda:3"


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t) for name in [*"abcdefg", "in_use", "free", "releasable"]
    )


def test_a_tensor_over_an_address_leaves_no_memory_behind() -> None:
    there = torch.ones(8, dtype=torch.uint8)
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo

    def make(many: int) -> None:
        for _ in range(many):
            assert dlpack.bytes_at(there.data_ptr(), 8, dlpack.HOST)[1:].sum() == 7

    make(100)
    tracemalloc.start()
    of_c, of_python = libc.mallinfo2().in_use, tracemalloc.get_traced_memory()[0]
    make(2000)
    grown = libc.mallinfo2().in_use - of_c, tracemalloc.get_traced_memory()[0] - of_python
    tracemalloc.stop()
    assert max(grown) < 2000 * 16, grown


def test_tensors_may_lie_over_bytes_that_are_not_there() -> None:
    address = vm.reserve(1 << 20)
    tensor = dlpack.bytes_at(address, 1 << 20, dlpack.HOST)
    assert tensor.data_ptr() == address
    vm.map_anonymous(1 << 20, at=address)
    tensor.fill_(7)
    assert vm.view(address, 1 << 20)[12345] == 7
    vm.revoke(address, 1 << 20)


def test_what_is_on_another_device_is_refused_by_name() -> None:
    with pytest.raises(InvalidSource, match=r"'weight' is on cuda:1.*is cuda:0.*\.to\('cuda:0'\)"):
        TensorLayout({"weight": on_gpu("cuda:1")}, gpu=0)
    module = nn.Module()
    module.inner = nn.BatchNorm1d(4)
    module.inner.running_mean = on_gpu("cuda:1")
    with pytest.raises(InvalidSource, match=r"'inner\.running_mean' is on cuda:1"):
        TensorLayout(module, gpu=0)
    with pytest.raises(InvalidSource, match=r"'weight' is on cuda:1.* CPU"):
        TensorLayout({"weight": on_gpu("cuda:1")})


def test_the_same_source_has_the_same_digest_on_either_device() -> None:
    tensors = {"a": torch.arange(10), "b": torch.zeros(3)}
    assert TensorLayout(tensors).digest() == TensorLayout(tensors, gpu=0).digest()


def test_buffers_are_copied_once_and_stay_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the meta device, which exists everywhere, since there is no GPU."""
    monkeypatch.setattr(dlpack.Target, "device", property(lambda _: torch.device("meta")))
    module = nn.Module()
    module.a, module.b = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    module.b.running_mean = module.a.running_mean
    module.a.register_buffer("nothing", None)
    moved = Buffers(module, dlpack.gpu(0))
    before = module.a.running_mean
    moved.copy()
    assert module.a.running_mean is before, "until it is certain"
    moved.replace()
    assert module.a.running_mean is module.b.running_mean
    moved_too = module.a.running_var, module.a.num_batches_tracked
    assert {t.device.type for t in moved_too if t is not None} == {"meta"}
    assert module.a.nothing is None
    assert module.a.weight.device.type == "cpu", "a parameter"
