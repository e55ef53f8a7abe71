"""One process at a time starts on a device; its turn ends with it, however it ends."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import swapd_client
from swapd import spawn
from swapd_client import AsyncClient, AsyncLease, Client, Conflict, Timeout
from tests.processes import line_of, start_python, tell

STARTS = dedent(
    """
    import sys
    import swapd_client

    client = swapd_client.connect(sys.argv[1], label=sys.argv[2])
    print("asks", flush=True)
    lease = client.acquire_start()
    print("starts", flush=True)
    sys.stdin.readline()
    lease.release()
    print("has started", flush=True)
    sys.stdin.readline()
    """
)


class Engine:
    def __init__(self, folder: Path, name: str) -> None:
        self.process = start_python(STARTS, folder, name)
        self.await_line("asks")

    def await_line(self, line: str) -> None:
        assert line_of(self.process).strip() == line

    def go_on(self) -> None:
        tell(self.process)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.__exit__(None, None, None)


@pytest.fixture
def daemon() -> Iterator[spawn.Spawned]:
    with spawn.daemon(budget="8MiB") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: spawn.Spawned) -> Iterator[Client]:
    with swapd_client.connect(daemon.folder, label="test") as client:
        yield client


def await_starting(client: Client, *labels: str) -> None:
    while client.status().starting != labels:
        pass


def test_engines_start_one_after_the_other(daemon: spawn.Spawned, client: Client) -> None:
    with Engine(daemon.folder, "thinker") as thinker:
        thinker.await_line("starts")
        with Engine(daemon.folder, "talker") as talker:
            await_starting(client, "thinker", "talker")
            thinker.go_on()
            thinker.await_line("has started")
            talker.await_line("starts")
            await_starting(client, "talker")
            talker.go_on()
            talker.await_line("has started")
            await_starting(client)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_turn_of_an_engine_that_is_killed_is_the_next_one_s(
    daemon: spawn.Spawned, client: Client, how: signal.Signals
) -> None:
    with Engine(daemon.folder, "thinker") as thinker:
        thinker.await_line("starts")
        with Engine(daemon.folder, "talker") as talker:
            await_starting(client, "thinker", "talker")
            thinker.process.send_signal(how)
            talker.await_line("starts")
            await_starting(client, "talker")


def test_a_wait_for_the_turn_ends_in_time_and_says_who_starts(
    daemon: spawn.Spawned, client: Client
) -> None:
    with swapd_client.connect(daemon.folder, label="thinker") as thinker:
        with thinker.acquire_start():
            with pytest.raises(Timeout, match=r"thinker \(session \d+\) starts"):
                client.acquire_start(timeout=0.01)
            with pytest.raises(Conflict, match="starts once"):
                thinker.acquire_start()
        client.acquire_start().release()


def test_one_that_starts_may_acquire_and_one_that_holds_may_not_start(client: Client) -> None:
    client.register_scratch("cache", 1 << 20)
    with client.acquire_start(), client.acquire("cache"):
        pass
    for _ in range(2):  # the second is kept for a while; the daemon does not see its release
        client.acquire("cache").release()
    client.acquire_start().release()
    with client.acquire("cache"), pytest.raises(Conflict, match="release its leases"):
        client.acquire_start()


def test_a_task_that_gives_up_is_not_waited_for(daemon: spawn.Spawned, client: Client) -> None:
    async def start(one: AsyncClient) -> AsyncLease:
        return await one.acquire_start()

    async def run() -> None:
        one = await swapd_client.connect_async(daemon.folder, label="one")
        two = await swapd_client.connect_async(daemon.folder, label="two")
        async with one, two, asyncio.TaskGroup() as group:
            await gives_up(group, one, two)

    async def gives_up(group: asyncio.TaskGroup, one: AsyncClient, two: AsyncClient) -> None:
        held = client.acquire_start()
        waits = group.create_task(start(one))
        await asyncio.to_thread(await_starting, client, "test", "one")
        also_waits = group.create_task(start(two))
        await asyncio.to_thread(await_starting, client, "test", "one", "two")
        waits.cancel()
        held.release()
        lease = await also_waits
        await asyncio.to_thread(await_starting, client, "two")
        lease.release()

    asyncio.run(run())
