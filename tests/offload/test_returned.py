"""The output of a call belongs to the caller, even if it is a weight, or a view of one."""

import asyncio
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client, NotWhileAttached
from swapd_client.offload.attachment import Attachment
from tests.offload.modules import WIDTH, evict, seeded
from tests.offload.twins import same

Pair = namedtuple("Pair", ["x", "table"])


@dataclass
class Output:
    x: torch.Tensor
    table: torch.Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    table: torch.Tensor


class Bare:
    """Of an unknown kind."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.inner = [table]


class Closed(UserDict[str, torch.Tensor]):
    """Cannot be copied."""

    def __copy__(self) -> "Closed":
        raise TypeError("one of a kind")


class Prompt(nn.Module):
    """Like SAM's prompt encoder: without a mask it returns a weight, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH)
        self.register_buffer("steps", torch.arange(4.0))
        self.out: Callable[[torch.Tensor], Any] = lambda w: w

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.table.weight)

    def rows(self) -> torch.Tensor:
        return self.table.weight[1:]

    def each(self) -> Generator[torch.Tensor, None, torch.Tensor]:
        yield self.table.weight[0]
        yield self.table.weight[1]
        return self.table.weight[2]

    async def later(self) -> torch.Tensor:
        await asyncio.sleep(0)
        return self.table.weight[0]

    async def pieces(self) -> AsyncIterator[torch.Tensor]:
        yield self.table.weight[0]
        await asyncio.sleep(0)
        yield self.table.weight[1]


X = torch.ones(1, WIDTH)


class Lending:
    """An attached module, and its twin."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.module: Prompt = seeded(Prompt)
        self.twin: Prompt = seeded(Prompt)
        self.attachment: Attachment = client.attach({"prompt": self.module}, ".")

    def lies(self, tensor: torch.Tensor) -> bool:
        part = self.client.session.own("prompt")
        return 0 <= tensor.untyped_storage().data_ptr() - part.address < part.nbytes

    def check(self, mine: Any, its: Any) -> None:
        """The same, and still there when the component is absent."""
        evict(self.client, "prompt")
        self.check_value(mine, its)

    def check_value(self, mine: Any, its: Any) -> None:
        assert type(mine) is type(its)
        assert not self.lies(mine)
        assert same(mine.resolve_conj(), its.resolve_conj())


@pytest.fixture
def lent(client: Client) -> Any:
    lending = Lending(client)
    yield lending
    lending.attachment.detach()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda w: w,
    "expanded": lambda w: w[0].reshape(1, -1, 1, 1).expand(2, -1, 3, 3),
    "slice": lambda w: w[1:, ::2],
    "transposed": lambda w: w.t(),
    "data": lambda w: w.data,
    "bytes": lambda w: w.detach().view(torch.uint8),
    "complex": lambda w: torch.view_as_complex(w.detach().reshape(3, -1, 2)).conj(),
    "scalar": lambda w: w[0, 0],
}


@pytest.mark.parametrize("which", VIEWS)
def test_a_view_of_weights_that_is_returned_is_the_caller_s(lent: Lending, which: str) -> None:
    for module in (lent.module, lent.twin):
        module.out = VIEWS[which]
    with torch.no_grad():
        lent.check(lent.module(X), lent.twin(X))


STRUCTURES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], torch.Tensor]]] = {
    "list": (lambda w: [X, w], lambda o: o[1]),
    "tuple": (lambda w: (X, (None, w)), lambda o: o[1][1]),
    "namedtuple": (lambda w: Pair(X, w), lambda o: o.table),
    "structseq": (lambda w: torch.return_types.max((w, w)), lambda o: o.values),
    "dict": (lambda w: {"x": X, "a": {"b": w}}, lambda o: o["a"]["b"]),
    "ordered": (lambda w: OrderedDict(x=X, w=w), lambda o: o["w"]),
    "userdict": (lambda w: UserDict(w=w), lambda o: o["w"]),
    "dataclass": (lambda w: Output(X, w), lambda o: o.table),
    "frozen": (Frozen, lambda o: o.table),
    "in each other": (lambda w: [Output(X, w), {"p": Pair(X, None)}], lambda o: o[0].table),
    "any object": (Bare, lambda o: o.table),
    "set": (lambda w: {X, w}, lambda o: next(t for t in o if t is not X)),
    "frozenset": (lambda w: frozenset([w]), lambda o: next(iter(o))),
    "deque": (lambda w: deque([X, w], 2), lambda o: o[o.maxlen - 1]),
    "iterator": (lambda w: iter([X, w]), lambda o: list(o)[1]),
    "iterator of a dict": (lambda w: (X, iter({"w": w}.values())), lambda o: next(o[1])),
}


@pytest.mark.parametrize("which", STRUCTURES)
def test_also_in_structures(lent: Lending, which: str) -> None:
    make, find = STRUCTURES[which]
    for module in (lent.module, lent.twin):
        module.out = lambda w: make(w[0])
    with torch.inference_mode():
        mine, its = lent.module(X), lent.twin(X)
    lent.check(find(mine), find(its))
    assert type(mine) is type(its)


def test_also_in_an_output_of_transformers(lent: Lending) -> None:
    """Its fields are items, too."""
    from transformers.utils import ModelOutput

    @dataclass
    class Encoded(ModelOutput):  # type: ignore[misc]
        x: torch.Tensor | None = None
        states: tuple[torch.Tensor, ...] | None = None

    for module in (lent.module, lent.twin):
        module.out = lambda w: Encoded(x=X, states=(X, w))
    with torch.inference_mode():
        mine, its = lent.module(X), lent.twin(X)
    assert mine["states"] is mine.states
    assert mine.to_tuple()[0] is X
    lent.check(mine.states[1], its.states[1])


def test_what_is_there_twice_is_one(lent: Lending) -> None:
    lent.module.out = lambda w: ([w], w, {"w": w})
    with torch.no_grad():
        (first,), second, third = lent.module(X)
    assert first is second is third["w"]


def test_what_cannot_be_copied_is_refused_by_name(lent: Lending) -> None:
    lent.module.out = lambda w: Closed(w=w)
    with torch.no_grad():
        with pytest.raises(NotWhileAttached, match=r"'prompt' returned a Closed .*attachment\.use"):
            lent.module(X)
        with lent.attachment.use("prompt"):
            assert lent.module(X)["w"] is lent.module.table.weight


def test_nothing_else_is_copied(lent: Lending) -> None:
    """Buffers are private; and weights belong in a module."""
    for value in (lent.module.steps, X, (X, 1), {"x": X}, Output(X), Bare(X), lent.module.table):
        lent.module.out = partial(_instead, value)
        assert lent.module(X) is value


SPARSE = torch.eye(3).to_sparse()


def test_what_is_sparse_is_returned_as_it_is_alone_and_beside_weights(lent: Lending) -> None:
    """It has no address."""
    for value in (SPARSE, (SPARSE, X), {"x": [SPARSE]}, Bare(SPARSE)):
        lent.module.out = partial(_instead, value)
        assert lent.module(X) is value
    for module in (lent.module, lent.twin):
        module.out = lambda w: (SPARSE, w)
    with torch.no_grad():
        (sparse, mine), (_, its) = lent.module(X), lent.twin(X)
    assert sparse is SPARSE
    lent.check(mine, its)


def _instead(value: Any, weight: torch.Tensor) -> Any:
    return value


def test_what_is_held_longer_is_no_copy(lent: Lending) -> None:
    """A call inside another one, and one under `use`, returns the same as always."""
    weight = lent.module.table.weight
    inner: list[Any] = []
    lent.module.table.register_forward_hook(lambda *a: weight)
    lent.module.out = lambda w: lent.module.table(torch.tensor([0]))
    lent.module.register_forward_hook(lambda m, a, out: inner.append(out), prepend=True)
    lent.module(X)
    assert inner[0] is weight
    lent.module.out = lambda w: w
    with lent.attachment.use("prompt"):
        assert lent.module(X) is weight
        assert lent.module.rows().data_ptr() == weight[1:].data_ptr()
        assert next(lent.module.each()).data_ptr() == weight.data_ptr()
    assert lent.module(X) is not weight


def test_a_parameter_is_one_still(lent: Lending) -> None:
    """With values of its own: code that writes to it, or trains it, has a copy."""
    with torch.no_grad():
        mine = lent.module(X)
        assert isinstance(mine, nn.Parameter)
        assert not mine.requires_grad
        mine.zero_()
        assert torch.equal(lent.module(X), lent.twin(X))


def test_a_copy_can_be_written_to_in_grad_mode(lent: Lending) -> None:
    lent.module.out = VIEWS["slice"]
    mine = lent.module(X)
    mine.mul_(torch.ones((), requires_grad=True))
    assert mine.requires_grad


def test_methods_and_what_they_yield(lent: Lending) -> None:
    with torch.inference_mode():
        lent.check(lent.module.rows(), lent.twin.rows())
        values, twins = [*_all(lent.module.each())], [*_all(lent.twin.each())]
        assert len(values) == 3
        for value, twin in zip(values, twins, strict=True):
            lent.check(value, twin)


@pytest.mark.parametrize(
    "lazy", [lambda w: map(w.__getitem__, range(2)), lambda w: chain([w[0]], (w * 2).unbind())]
)
def test_what_an_iterator_computes_later_is_computed_under_the_lease(
    lent: Lending, lazy: Callable[[torch.Tensor], Any]
) -> None:
    for module in (lent.module, lent.twin):
        module.out = lazy
    with torch.inference_mode():
        values, twins = lent.module(X), lent.twin(X)
        evict(lent.client, "prompt")
        for value, twin in zip(values, twins, strict=True):
            lent.check_value(value, twin)


def _all(work: Generator[Any, None, Any]) -> Generator[Any, None, None]:
    """The values that it yields, and the one that it returns."""
    yield (yield from work)


async def test_what_is_awaited(lent: Lending) -> None:
    with torch.inference_mode():
        values = [await lent.module.later(), *[piece async for piece in lent.module.pieces()]]
        twins = [await lent.twin.later(), *[piece async for piece in lent.twin.pieces()]]
        for value, twin in zip(values, twins, strict=True):
            lent.check(value, twin)


@pytest.mark.parametrize("resident", [None, 0], ids=["whole", "streamed"])
def test_a_block_s_view_outlives_the_block(client: Client, resident: int | None) -> None:
    """Later blocks and the caller get no view into a block that has left."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1024, 1024))

        def forward(self, seen: list[torch.Tensor]) -> list[torch.Tensor]:
            return [*seen, self.weight[0]]

    class Dit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4))
            self.blocks = nn.ModuleList(Block() for _ in range(6))

        def forward(self) -> list[torch.Tensor]:
            seen: list[torch.Tensor] = [self.scale]
            for block in self.blocks:
                seen = block(seen)
            return [*seen, torch.stack(seen[1:]).sum()]

    module, twin = seeded(Dit), seeded(Dit)
    blocks = None if resident is None else ["blocks"]
    if resident is None:
        module.blocks, twin.blocks = module.blocks[:3], twin.blocks[:3]
    with (
        torch.inference_mode(),
        client.attach({"dit": module}, resident=resident, blocks=blocks) as attachment,
    ):
        names = attachment.registered
        for _ in range(2):
            mine, its = module(), twin()
            evict(client, *names)
            spans = [(p.address, p.nbytes) for p in map(client.session.own, names)]
            for one, other in zip(mine, its, strict=True):
                assert not any(0 <= one.data_ptr() - at < n for at, n in spans)
                assert same(one, other)
        if resident is not None:
            (alone,) = module.blocks[1]([])
            evict(client, *names)
            assert same(alone, twin.blocks[1]([])[0])


def test_a_view_of_a_quantised_weight(lent: Lending) -> None:
    """For a wrapper, its inner tensors are copied."""
    torchao = pytest.importorskip("torchao.quantization")
    lent.attachment.detach()
    for module in (lent.module, lent.twin):
        torch.manual_seed(0)
        linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        module.linear = linear
        torchao.quantize_(module, torchao.Int8WeightOnlyConfig())
        module.out = partial(_instead, linear.weight)
    lent.attachment = lent.client.attach({"prompt": lent.module}, ".")
    with torch.no_grad():
        mine, its = lent.module(X), lent.twin(X)
    evict(lent.client, "prompt")
    assert not lent.lies(mine.qdata)
    assert not lent.lies(mine.scale)
    assert torch.equal(mine.dequantize(), its.dequantize())


def test_under_a_transform_of_functorch(lent: Lending) -> None:
    lent.module.out = lent.twin.out = lambda w: w[0]
    with torch.no_grad():
        mine = torch.vmap(lambda x: (lent.module(x), x))(torch.ones(2, WIDTH))[0]
        its = torch.vmap(lambda x: (lent.twin(x), x))(torch.ones(2, WIDTH))[0]
    lent.check(mine.contiguous(), its.contiguous())


def test_in_what_is_compiled(lent: Lending) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return lent.module(x) + x  # type: ignore[no-any-return]

    lent.module.out = lent.twin.out = VIEWS["slice"]
    compiled = torch.compile(step, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            evict(lent.client, "prompt")
            x = torch.ones(2, WIDTH // 2)
            assert torch.equal(compiled(x), lent.twin(x) + x)
