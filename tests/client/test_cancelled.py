"""A call of the asyncio client, cancelled at any `await`, leaves nothing and may be repeated.

A task is cancelled while it waits, or after what it waits for has come and before it goes on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from functools import partial
from typing import Any

import pytest

import swapd_client
from swapd import spawn
from swapd.spawn import Spawned
from swapd_client import AsyncClient, Client

Call = Callable[[AsyncClient], Any]
X = {"x": bytes(5000)}


class Cancelled:
    """Awaits `call()`, and cancels its task at one of the places where it waits."""

    def __init__(self, call: Callable[[], Any], place: int, *, late: bool) -> None:
        self._call = call
        self._place = place
        self._late = late
        #: Whether it waited so often.
        self.was = False

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._call().__await__()
        step, value = steps.send, None
        try:
            while True:
                waited = step(value)
                if not self._place:
                    self.was = True
                    self._cancel(waited)
                self._place -= 1
                try:
                    step, value = steps.send, (yield waited)
                except BaseException as exc:  # noqa: BLE001 - it is for the call to handle
                    step, value = steps.throw, exc
        except StopIteration:
            return

    def _cancel(self, waited: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._late and waited is not None:
            waited.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()


async def each_cancelled(call: Callable[[], Any]) -> AsyncIterator[None]:
    """Goes on after each time that the call was cancelled, at one place after the other."""
    for late in (False, True):
        for place in range(100):
            cancelled = Cancelled(call, place, late=late)

            async def run(cancelled: Cancelled = cancelled) -> None:
                await cancelled

            (ended,) = await asyncio.gather(run(), return_exceptions=True)
            if ended is not None and not isinstance(ended, asyncio.CancelledError):
                raise ended
            if not cancelled.was:
                assert place, "the call waits for nothing"
                break
            yield


@pytest.fixture(scope="module")
def daemon() -> Iterator[Spawned]:
    with spawn.daemon(budget="16MiB", isolation="strict") as daemon:
        yield daemon


@pytest.fixture
async def client(daemon: Spawned) -> AsyncIterator[AsyncClient]:
    async with await swapd_client.connect_async(daemon.folder) as client:
        yield client


async def hold(client: AsyncClient, early: bool = False) -> None:
    async with client.acquire("a", early=early) as lease:
        await lease.wait()


async def hold_workspace(client: AsyncClient) -> None:
    async with client.acquire_workspace("1MiB"):
        await asyncio.sleep(0)


async def hold_start(client: AsyncClient) -> None:
    async with client.acquire_start():
        await asyncio.sleep(0)


async def wait_for_memory(client: AsyncClient) -> None:
    async with client.acquire_workspace("12MiB"), client.acquire("a"):
        pass


@pytest.mark.parametrize(
    "call", [hold, partial(hold, early=True), hold_workspace, hold_start, wait_for_memory]
)
async def test_a_cancelled_acquire_holds_nothing(
    client: AsyncClient, other: Client, call: Call
) -> None:
    await client.register("a", X)
    async for _ in each_cancelled(partial(call, client)):
        assert not any(component.leases for component in (await client.status()).components)
        assert not client.session.leases
        other.acquire_workspace("16MiB", timeout=30).release()
        other.acquire_start(timeout=30).release()
        await call(client)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("register", ("a", X)),
        ("register_scratch", ("a", 5000)),
        ("register_family", ("a", {"one": X, "two": {"x": b"\1" * 5000}})),
    ],
)
async def test_a_cancelled_registration_has_registered_nothing(
    client: AsyncClient, other: Client, call: str, what: tuple[Any, ...]
) -> None:
    async def register() -> None:
        await getattr(client, call)(*what)
        await unregister()

    async def unregister() -> None:
        for name in list(client.session.components):
            await client.unregister(name)

    async for _ in each_cancelled(register):
        await unregister()
        assert not other.status().components
        await register()


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.prefetch("a"),
        lambda client: client.update("a", X),
        lambda client: client.follows("b", after="a"),
        lambda client: client.resize("f", 0),
        lambda client: client.pin("f"),
        lambda client: client.unpin("f"),
        lambda client: client.evict("a"),
        lambda client: client.forget(),
        lambda client: client.forecast("a", "b"),
        lambda client: client.cheapest(["a", "b"]),
        lambda client: client.status(),
    ],
)
async def test_any_other_call_that_is_cancelled_may_be_repeated(
    client: AsyncClient, other: Client, call: Call
) -> None:
    for name in ("a", "b"):
        await client.register(name, X)
    await client.register_family("f", {"one": X})
    async for _ in each_cancelled(partial(call, client)):
        await call(client)
        async with client.acquire("a", "b") as lease:
            assert lease.held
    assert not any(component.leases for component in other.status().components)


async def test_a_cancelled_connect_or_close_leaves_no_session(
    daemon: Spawned, other: Client
) -> None:
    clients: list[AsyncClient] = []

    async def use() -> None:
        clients.append(await swapd_client.connect_async(daemon.folder))
        await clients[-1].register("a", X)
        await clients[-1].close()

    async for _ in each_cancelled(use):
        for client in clients:
            await client.close()
        while len(other.status().sessions) > 1:  # the daemon hears of the end of each
            pass
        assert not other.status().components
