"""A cancelled registration leaves nothing: in the daemon, in the process, or of its memory."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import swapd_client
from swapd import spawn
from swapd.spawn import Spawned
from swapd_client import AsyncClient
from swapd_client.memory.layout import ContentMismatch
from swapd_client.session.registry import Registry

MIB = 1 << 20
PARTS = {"x": {"d": bytearray(MIB)}, "y": {"d": bytearray(MIB)}}


@pytest.fixture
def daemon() -> Iterator[Spawned]:
    with spawn.daemon(budget="16MiB") as daemon:
        yield daemon


class Halt:
    """Lets `method` of the registry begin, and return when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.begun, self.go_on = asyncio.Event(), threading.Event()
        loop, real = asyncio.get_running_loop(), getattr(Registry, method)

        def halted(*arguments: Any, **named: Any) -> Any:
            done = real(*arguments, **named)
            loop.call_soon_threadsafe(self.begun.set)
            self.go_on.wait()
            return done

        monkeypatch.setattr(Registry, method, halted)


async def broken_off(halt: Halt, task: "asyncio.Task[Any]", times: int) -> None:
    await halt.begun.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    halt.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("step", ["prepare", "prepare_family", "fill"])
async def test_a_family_that_is_cancelled_can_be_registered_again(
    daemon: Spawned, step: str, times: int
) -> None:
    async with await swapd_client.connect_async(daemon.folder) as client:
        with pytest.MonkeyPatch.context() as patched:
            halt = Halt(patched, step)
            task = asyncio.get_running_loop().create_task(client.register_family("f", PARTS))
            await broken_off(halt, task, times)
        assert (await client.status()).components == ()
        await client.register_family("f", PARTS)


async def test_tensors_that_were_to_be_moved_are_free_for_another_name(daemon: Spawned) -> None:
    torch = pytest.importorskip("torch")
    tensors = {"w": torch.ones(1000)}
    async with await swapd_client.connect_async(daemon.folder) as client:
        with pytest.MonkeyPatch.context() as patched:
            halt = Halt(patched, "prepare")
            task = asyncio.get_running_loop().create_task(client.register("a", tensors))
            await broken_off(halt, task, 1)
        await client.register("b", tensors)
        async with client.acquire("b"):
            assert float(tensors["w"].sum()) == 1000


def test_what_is_interrupted_as_it_starts_over_is_discarded_once(daemon: Spawned) -> None:
    with swapd_client.connect(daemon.folder) as client:
        registry = client.session.registry
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                registry, "fill", lambda part: _raise(ContentMismatch(part.name, was_guessed=True))
            )
            patched.setattr(registry, "start_over", lambda *_: _raise(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                client.register_family("f", PARTS)
        assert client.status().components == ()
        client.register_family("f", PARTS)


def _raise(error: BaseException) -> None:
    raise error


async def started(client: AsyncClient) -> None:
    async with client.acquire_start(timeout=0):
        pass


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.unregister("a"),
        lambda client: client.evict("a"),
        lambda client: client.resize("a", 0),
        started,
    ],
)
async def test_what_model_calls_in_threads_keep_does_not_hold_up(
    daemon: Spawned, call: Callable[[AsyncClient], Awaitable[object]]
) -> None:
    async with await swapd_client.connect_async(daemon.folder) as client:
        await client.register_family("a", PARTS)
        inner = client._client

        def loop() -> None:
            for _ in range(3):  # from the second on it is kept
                inner.acquire("a").release()

        await asyncio.to_thread(loop)
        await call(client)
        assert not any(one.leases for one in (await client.status()).components)
