"""A cancelled registration leaves nothing: in the daemon, in the process, or of its memory."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import swapd_client
from swapd import spawn
from swapd.spawn import Spawned
from swapd_client import moving
from swapd_client.memory.layout import OtherBytes
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


class Faked:
    """A session without a daemon, whose registry counts its discarded components."""

    #: The session has ended: it sends nothing to the daemon.
    error = "gone"

    def __init__(self) -> None:
        self.registry = self
        self.discarded: list[object] = []
        self.lies = True

    def next_id(self) -> int:
        return 1

    def prepare_family(self, name: str, sources: Any, *, mutable: bool) -> list[Any]:
        return ["one", "two"]

    def request(self, *_: Any, **__: Any) -> Callable[[], None]:
        return lambda: None

    def fill(self, part: str) -> None:
        if self.lies:
            raise OtherBytes(part)

    def start_over(self, parts: Any, lie: OtherBytes) -> None:
        raise KeyboardInterrupt

    def discard(self, part: object) -> None:
        self.discarded.append(part)


def test_what_is_interrupted_as_it_starts_over_is_discarded_once() -> None:
    session: Any = Faked()
    steps = moving.register_family(
        session, lambda _: None, "f", {}, "lru", None, mutable=False, resident_bytes=None
    )
    with pytest.raises(KeyboardInterrupt):
        moving.take(steps, lambda _: pytest.fail("nothing is asked"))
    assert session.discarded == ["one", "two"]


def test_steps_that_are_not_taken_to_the_end_are_discarded() -> None:
    session: Any = Faked()
    steps = moving.register_family(
        session, lambda _: None, "f", {}, "lru", None, mutable=False, resident_bytes=None
    )
    step: Any = next(steps)
    steps.send(step())
    steps.close()
    assert session.discarded == ["one", "two"]


async def test_what_model_calls_in_threads_keep_does_not_hold_up_an_unregister(
    daemon: Spawned,
) -> None:
    async with await swapd_client.connect_async(daemon.folder) as client:
        await client.register("a", {"d": bytearray(MIB)})
        inner = client._have_inner()

        def loop() -> None:
            for _ in range(3):  # from the second on it is kept
                inner.acquire("a").release()

        await asyncio.to_thread(loop)
        await client.unregister("a")
