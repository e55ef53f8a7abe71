"""`acquire(progress=)` against a real daemon: who waits hears when it will be granted."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import swapd_client
from swapd.shared.protocol import Forecast
from swapd_client import AsyncClient, Client
from swapd_client.session import channel
from tests import served
from tests.contents import bytes_of

MIB = 1 << 20


@pytest.fixture
def clients() -> Iterator[tuple[Client, Client]]:
    """Two, with a component each of which one has room; both were used."""
    with served.pair("first", "second", budget="16MiB", residency_factor=0) as (_, first, second):
        first.register("a", {"x": bytes_of("a", 10 * MIB)})
        second.register("b", {"x": bytes_of("b", 10 * MIB)})
        first.acquire("a").release()
        second.acquire("b").release()
        yield first, second


def test_who_waits_hears_what_it_waits_for(clients: tuple[Client, Client]) -> None:
    first, second = clients
    told = list[Forecast]()
    held = first.acquire("a")

    def progress(forecast: Forecast) -> None:
        told.append(forecast)
        if len(told) == 2:
            held.release()

    with second.acquire("b", progress=progress) as lease:
        assert lease.waited_s
    assert len(told) == 2
    assert all(one.names == ("b",) and one.bytes_in == 10 * MIB for one in told)
    assert all("first (session" in one.waits_for[0].why for one in told)
    assert all((one.seconds is None) == bool(one.unknown) for one in told)


def test_it_hears_the_answer_when_that_comes(
    clients: tuple[Client, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when it looks for the next time."""
    first, second = clients
    held, ask = first.acquire("a"), channel.Channel.ask

    def ask_once(of: channel.Channel, request: Any) -> None:
        monkeypatch.setattr(channel, "STILL_MS", 3_600_000)
        ask(of, request)

    monkeypatch.setattr(channel, "STILL_MS", 1)
    monkeypatch.setattr(channel.Channel, "ask", ask_once)
    second.acquire("b", timeout=20, progress=lambda _: held.release()).release()


def test_it_may_ask_the_daemon_itself_and_the_grant_is_not_lost(
    clients: tuple[Client, Client],
) -> None:
    first, second = clients
    held = first.acquire("a")
    waits = list[float | None]()

    def progress(_: Forecast) -> None:
        held.release()
        while second.status().waits:
            pass  # the grant comes meanwhile, in this thread
        waits.append(second.forecast("b").seconds)

    with second.acquire("b", progress=progress):
        assert waits == [0.0]


def test_what_it_raises_ends_the_wait(clients: tuple[Client, Client]) -> None:
    first, second = clients

    def progress(_: Forecast) -> None:
        raise ZeroDivisionError

    with first.acquire("a"):
        with pytest.raises(ZeroDivisionError):
            second.acquire("b", progress=progress)
        assert not second.status().waits
    second.acquire("b").release()


def test_nobody_is_told_of_an_acquire_that_does_not_wait(clients: tuple[Client, Client]) -> None:
    first, _ = clients
    first.acquire("a", progress=_never).release()


async def test_a_task_hears_it_too(clients: tuple[Client, Client]) -> None:
    first, second = clients
    held, hears = first.acquire("a"), asyncio.Event()
    loop = asyncio.get_running_loop()
    async with await swapd_client.connect_async(second.session.lifeline.folder.path) as client:
        told = list[Forecast]()

        def progress(forecast: Forecast) -> None:
            told.append(forecast)
            hears.set()

        waiting = loop.create_task(_acquire(client, progress))
        await hears.wait()
        threading.Thread(target=held.release).start()
        await waiting
        assert told[0].waits_for[0].name == "a"


async def test_what_it_raises_in_a_task_goes_to_the_loops_handler(
    clients: tuple[Client, Client],
) -> None:
    first, second = clients
    held, failed = first.acquire("a"), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, what: failed.append(what))

    def progress(_: Forecast) -> None:
        threading.Thread(target=held.release).start()
        raise ZeroDivisionError

    async with await swapd_client.connect_async(second.session.lifeline.folder.path) as client:
        await _acquire(client, progress)
    gc.collect()
    (what,) = failed
    assert isinstance(what["exception"], ZeroDivisionError)


async def _acquire(client: AsyncClient, progress: Callable[[Forecast], None]) -> None:
    async with client.acquire("b", progress=progress):
        pass


def _never(_: Forecast) -> None:
    raise AssertionError("it does not wait")
