"""Ctrl-C that ends a loop's `run_until_complete`, as in a notebook: the next call is answered."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

import swapd_client
from swapd import spawn
from swapd.spawn import Spawned
from swapd_client import AsyncClient
from tests.interrupts import interrupt, interrupts, places

T = TypeVar("T")

#: Places of one call.
MOST = 200
PATIENCE_S = 60.0
X = {"x": bytes(4096)}

#: Calls without the threads of the loop, in which no interrupt arrives.
CALLS: dict[str, Callable[[AsyncClient], Coroutine[Any, Any, object]]] = {
    "status": lambda client: client.status(),
    "acquire": lambda client: acquired(client),
}


async def acquired(client: AsyncClient) -> None:
    async with client.acquire("a"):
        pass


@pytest.fixture(scope="module")
def daemon() -> Iterator[Spawned]:
    with spawn.daemon(budget="16MiB") as daemon:
        yield daemon


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    for task in asyncio.all_tasks(loop):  # whose wakeup asyncio itself lost
        task.cancel()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def within(loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, T]) -> T:
    return loop.run_until_complete(asyncio.wait_for(call, PATIENCE_S))


@pytest.mark.parametrize("name", CALLS)
def test_after_an_interrupt_at_any_place_the_next_call_is_answered(
    daemon: Spawned, loop: asyncio.AbstractEventLoop, name: str
) -> None:
    client = within(loop, swapd_client.connect_async(daemon.folder))
    within(loop, client.register("a", X))

    def call() -> None:
        loop.run_until_complete(CALLS[name](client))

    call()
    with interrupts():
        for place in places(call, MOST):
            interrupt(call, place)
            loop.call_soon(loop.stop)  # as an end of `call` may, that asyncio had put on its list
            loop.run_forever()
            within(loop, CALLS[name](client))
    within(loop, client.close())
