"""Generators and coroutines hold their component from the first step to any kind of end."""

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client
from swapd_client.finalizers import give_back_later
from tests.guarantees.harness import Daemon
from tests.offload.modules import WIDTH, evict, leases, seeded

X = torch.ones(1, WIDTH)


class Chunked(nn.Module):
    """Gives its result piece by piece, in each possible way."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(3):
            x = nn.functional.linear(x, self.out.weight)
            yield x

    def stream(self, x: torch.Tensor) -> Generator[torch.Tensor, float, str]:
        for _ in range(3):
            try:
                scale = yield nn.functional.linear(x, self.out.weight)
            except LookupError:
                scale = 0.0
            x = x * (1.0 if scale is None else scale)
        return "done"

    async def whole(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            await asyncio.sleep(0)
            x = nn.functional.linear(x, self.out.weight)
        return x

    async def pieces(self, x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
        for _ in range(3):
            await asyncio.sleep(0)
            x = nn.functional.linear(x, self.out.weight)
            yield x


@pytest.fixture
def model(client: Client) -> Iterator[Chunked]:
    with client.attach({"talker": seeded(Chunked)}, ".") as attachment:
        yield attachment.components["talker"].module  # type: ignore[misc]


def held(client: Client) -> int:
    return leases(client)["talker"]


@pytest.mark.parametrize("method", ["__call__", "stream"])
def test_a_generator_holds_from_the_first_step_to_exhaustion(
    client: Client, model: Chunked, method: str
) -> None:
    work: Any = getattr(model, method)(X)
    assert held(client) == 0
    evict(client, "talker")
    seen = []
    for piece in work:
        assert held(client) == 1
        seen.append(piece)
    assert len(seen) == 3
    assert held(client) == 0
    assert list(work) == []
    assert held(client) == 0


def test_a_generator_that_is_never_started_holds_nothing(client: Client, model: Chunked) -> None:
    work = model(X)
    assert held(client) == 0
    work.close()
    del work
    model.stream(X)
    gc.collect()
    assert held(client) == 0


def test_a_generator_that_is_closed_gives_back_at_once(client: Client, model: Chunked) -> None:
    work = model.stream(X)
    next(work)
    assert held(client) == 1
    work.close()
    assert held(client) == 0


def test_a_generator_that_is_abandoned_gives_back_when_it_is_collected(
    client: Client, model: Chunked, daemon: Daemon
) -> None:
    work = model.stream(X)
    next(work)
    lease = max(record.id for record in client.session.leases)
    del work
    gc.collect()
    daemon.await_record("Release", session=client.session.welcome.session, lease=lease)
    assert held(client) == 0


def test_a_generator_passes_on_what_it_is_sent_and_what_is_thrown_in(
    client: Client, model: Chunked
) -> None:
    work = model.stream(X)
    first = next(work)
    assert torch.equal(work.send(2.0), first * 2)
    assert not work.throw(LookupError()).any()
    with pytest.raises(StopIteration) as stop:
        next(work)
    assert stop.value.value == "done"
    work = model.stream(X)
    next(work)
    with pytest.raises(ZeroDivisionError):
        work.throw(ZeroDivisionError)
    assert held(client) == 0


def test_calls_inside_a_generator_are_nested_in_its_lease(client: Client, model: Chunked) -> None:
    seen = []

    class Calls(Chunked):
        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            for _ in range(2):
                x = self.out(x)
                seen.append(len(client.session.leases))
                yield x

    calls = seeded(Calls)
    with client.attach({"calls": calls}, "."):
        list(calls(X))
        assert seen == [1, 1]


def test_two_generators_in_turn_each_hold_their_own(client: Client, model: Chunked) -> None:
    first, second = model.stream(X), model.stream(X)
    next(first)
    next(second)
    assert held(client) == 2
    first.close()
    assert held(client) == 1
    assert len(list(second)) == 2
    assert held(client) == 0


async def test_a_coroutine_holds_while_it_is_awaited(client: Client, model: Chunked) -> None:
    with torch.no_grad():
        expected = X
        with client.acquire("talker"):
            for _ in range(3):
                expected = nn.functional.linear(expected, model.out.weight)
        work = model.whole(X)
        assert inspect.isawaitable(work)
        assert held(client) == 0
        evict(client, "talker")
        assert torch.equal(await work, expected)
        assert held(client) == 0
        tasks = [asyncio.get_running_loop().create_task(model.whole(X), name="t") for _ in range(2)]
        await asyncio.sleep(0)
        assert held(client) == 2
        for result in await asyncio.gather(*tasks):
            assert torch.equal(result, expected)
        assert held(client) == 0


async def test_a_cancelled_coroutine_gives_back(client: Client, model: Chunked) -> None:
    task = asyncio.get_running_loop().create_task(model.whole(X), name="cancelled")
    await asyncio.sleep(0)
    assert held(client) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held(client) == 0
    model.whole(X).close()


async def test_an_async_generator_holds_from_its_first_value_to_its_last(
    client: Client, model: Chunked
) -> None:
    evict(client, "talker")
    count = 0
    async for piece in model.pieces(X):
        assert held(client) == 1
        assert piece.shape == X.shape
        count += 1
    assert count == 3
    assert held(client) == 0
    work: Any = model.pieces(X)
    assert held(client) == 0
    await anext(work)
    assert held(client) == 1
    await work.aclose()
    assert held(client) == 0
    work = model.pieces(X)
    await anext(work)
    with pytest.raises(LookupError):
        await work.athrow(LookupError("in"))
    assert held(client) == 0


def test_what_was_dropped_just_before_it_is_detached_is_not_in_use(client: Client) -> None:
    def ask() -> None:
        client.status()

    attachment = client.attach({"talker": seeded(Chunked)}, ".")
    for _ in range(50):  # others were dropped as well, and each takes its time
        give_back_later(ask)
    work = attachment.components["talker"].module(X)
    next(work)
    del work
    attachment.detach()
