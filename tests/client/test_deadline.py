"""`acquire(deadline=)` against a real daemon: who is wanted sooner goes first."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

import swapd_client
from swapd import spawn
from swapd_client import AsyncClient, Client
from tests.contents import bytes_of

MIB = 1 << 20


@pytest.fixture
def daemon() -> Iterator[spawn.Spawned]:
    """With room for one of the client's components."""
    with spawn.daemon(budget="16MiB", residency_factor=0) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: spawn.Spawned) -> Iterator[Client]:
    with swapd_client.connect(daemon.folder) as client:
        for name in "abc":
            client.register(name, {"x": bytes_of(name, 10 * MIB)})
        yield client


def wait_for(client: Client, n: int) -> None:
    """Until `n` acquires wait."""
    while len(client.status().waits) < n:
        pass


def test_who_is_wanted_sooner_goes_first_and_who_finds_all_in_goes_behind(
    daemon: spawn.Spawned, client: Client
) -> None:
    order, threads = list[str](), list[threading.Thread]()
    held = client.acquire("a")
    with swapd_client.connect(daemon.folder) as other:

        def use(name: str, deadline: float | None) -> None:
            with other.acquire(name, deadline=deadline):
                order.append(name)

        for asked in (("b", 60.0), ("c", 5.0), ("a", None)):
            threads.append(threading.Thread(target=use, args=asked))
            threads[-1].start()
            wait_for(client, len(threads))
        held.release()
        for thread in threads:
            thread.join()
    assert order == ["c", "b", "a"]


def test_so_it_is_with_asyncio_and_a_deadline_ends_no_wait(
    daemon: spawn.Spawned, client: Client
) -> None:
    order = list[str]()

    async def use(other: AsyncClient, name: str, deadline: float | None) -> None:
        async with other.acquire(name, deadline=deadline):
            order.append(name)

    async def main() -> None:
        async with (
            await swapd_client.connect_async(daemon.folder) as other,
            asyncio.TaskGroup() as tasks,
        ):
            held = client.acquire("a")
            for n, (name, deadline) in enumerate((("b", None), ("c", 0.0)), start=1):
                tasks.create_task(use(other, name, deadline))
                await asyncio.to_thread(wait_for, client, n)
            held.release()

    asyncio.run(main())
    assert order == ["c", "b"]
