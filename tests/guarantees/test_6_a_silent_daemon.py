"""Guarantee 6, of a daemon that does not answer: `close` and `unregister` end all the same."""

import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest

from swapd_client import Client, Timeout, aio, connect, connect_async, leasing
from swapd_client.session import channel, lifeline
from tests.contents import bytes_of
from tests.guarantees import held_save
from tests.guarantees.harness import MIB, PATIENCE_S, Daemon, World, stop_process

T = TypeVar("T")
BRIEF_S = 0.2
WRITTEN = bytes_of("written", MIB)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls give up soon."""
    for module in (leasing, aio):
        monkeypatch.setattr(module, "ANSWER_S", BRIEF_S)
    monkeypatch.setattr(channel, "STILL_MS", 50)
    monkeypatch.setattr(channel, "GRACE_S", BRIEF_S)
    monkeypatch.setattr(lifeline, "LET_GO_S", BRIEF_S)


@contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    stop_process(daemon.pid)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def ended(call: Callable[[], T]) -> T:
    """The result of `call()`, if it ends within the patience of a test."""
    threads = ThreadPoolExecutor(1)
    try:
        return threads.submit(call).result(PATIENCE_S)
    finally:
        threads.shutdown(wait=False)


def mutable(client: Client, name: str = "m") -> memoryview:
    """A view of a new component with `WRITTEN`, which is on the device alone."""
    view = client.register(name, {"x": bytearray(MIB)}, mutable=True).view("x")
    with client.acquire(name):
        view[:] = WRITTEN
    return view


def test_a_client_of_a_stopped_daemon_closes_and_keeps_the_latest_bytes(world: World) -> None:
    daemon, clean = world.daemon(), bytes_of("clean", MIB)
    client = connect(daemon.folder)
    views = [mutable(client, name) for name in "mn"]
    kept = client.register("c", {"x": clean}).view("x")
    lease = client.acquire("n")
    with stopped(daemon):
        ended(client.close)
        lease.release()
        assert [bytes(view) for view in (*views, kept)] == [WRITTEN, WRITTEN, clean]
    with connect(daemon.folder) as other:  # which gets all of the memory
        other.register("all", {"x": bytes_of("all", 16 * MIB)})
        with other.acquire("all"):
            assert [bytes(view) for view in views] == [WRITTEN, WRITTEN]


def test_who_connects_in_vain_has_no_more_descriptors_than_before(world: World) -> None:
    daemon = world.daemon()
    before = os.listdir("/proc/self/fd")
    with stopped(daemon), pytest.raises(Timeout):
        connect(daemon.folder, timeout=BRIEF_S)
    assert os.listdir("/proc/self/fd") == before


def test_bytes_that_the_daemon_had_saved_in_part_are_kept_too(world: World) -> None:
    door = held_save.door(world.folder / "d")
    os.mkfifo(door)
    daemon = world.daemon(program="tests.guarantees.held_save")
    client = connect(daemon.folder)
    view = mutable(client)
    client.evict("m")
    daemon.await_record("CopyOut", name="m")
    with stopped(daemon):
        ended(client.close)
        assert bytes(view) == WRITTEN
    with door.open("w"):
        assert bytes(view) == WRITTEN


def test_what_a_stopped_daemon_was_to_unregister_may_be_unregistered_again(world: World) -> None:
    daemon = world.daemon()
    with connect(daemon.folder) as client:
        view = mutable(client)
        with stopped(daemon), pytest.raises(Timeout, match=r"does not answer: it is stopped"):
            ended(lambda: client.unregister("m"))
        client.unregister("m")
        assert bytes(view) == WRITTEN
        assert not client.status().components


def test_a_daemon_that_answers_has_the_time_that_it_needs_to_save(world: World) -> None:
    door = held_save.door(world.folder / "d")
    os.mkfifo(door)
    daemon = world.daemon(program="tests.guarantees.held_save")
    with connect(daemon.folder) as client, ThreadPoolExecutor(1) as threads:
        view = mutable(client)
        leaving = threads.submit(client.unregister, "m")
        daemon.await_record("CopyOut", name="m")
        asked = [daemon.await_record("Release", ack=True).id for _ in range(3)]
        assert len(set(asked)) == 3
        assert not leaving.done()
        with door.open("w"):
            leaving.result(PATIENCE_S)
        assert bytes(view) == WRITTEN


async def test_an_async_client_closes_too_and_its_calls_end(world: World) -> None:
    daemon = world.daemon()
    client = await connect_async(daemon.folder)
    view = (await client.register("m", {"x": bytearray(MIB)}, mutable=True)).view("x")
    async with client.acquire("m"):
        view[:] = WRITTEN
    with stopped(daemon):
        calls: tuple[Awaitable[object], ...] = (
            client.acquire("m", timeout=0.0),
            client.unregister("m"),
            client.register("n", {"x": bytearray(8)}),
        )
        for call in calls:
            with pytest.raises(Timeout, match="does not answer: it is stopped"):
                await call
        await client.close()
        assert bytes(view) == WRITTEN
