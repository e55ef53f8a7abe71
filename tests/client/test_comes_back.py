"""A client whose daemon is gone joins the next one by itself: the program sees a pause."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import swapd_client
from swapd_client import (
    AsyncClient,
    Client,
    ClientClosed,
    DaemonGone,
    InvalidArgument,
    NotRunning,
    SwapdError,
    TooLarge,
)
from swapd_client.session.registry import Registry
from tests.guarantees.harness import MIB, PATIENCE_S
from tests.lives import Lives, living
from tests.offload.modules import WIDTH, Decoder, seeded

AGAIN = "No weights are lost.*the next call tries again"
X = torch.ones(2, WIDTH)


@pytest.fixture
def lives() -> Iterator[Lives]:
    with living() as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


def numbers() -> torch.Tensor:
    return torch.arange(MIB, dtype=torch.float32)


def impatient(lives: Lives, reconnect: float = 0.2) -> Client:
    """In place of its client, one that waits for less."""
    lives.client.close()
    lives.client = swapd_client.connect(lives.daemon.folder, reconnect=reconnect)
    return lives.client


def begins_to_wait(monkeypatch: pytest.MonkeyPatch, client: Client) -> threading.Event:
    """Set once a call has looked for the next daemon, and found none."""
    looked, again = threading.Event(), client.session.again

    def look(within_s: float) -> Any:
        try:
            return again(within_s)
        except NotRunning:
            looked.set()
            raise

    monkeypatch.setattr(client.session, "again", look)
    return looked


def test_a_loop_sees_only_pauses_while_daemons_die(lives: Lives, pool: ThreadPoolExecutor) -> None:
    client, clean, mutable = lives.client, numbers(), torch.zeros(MIB)
    component = client.register("clean", {"x": clean}, policy="sequential")
    client.register("mutable", {"x": mutable}, mutable=True)
    family = client.register_family("f", {"a": {"x": bytes(MIB)}, "b": {"x": b"b"}}, resident=MIB)
    scratch = client.register_scratch("kv", "1MiB")
    places = [clean.data_ptr(), mutable.data_ptr(), scratch.tensor.data_ptr()]
    done = threading.Event()

    def die() -> None:
        for way in ("killed", "stopped", "killed"):
            if way == "stopped":
                lives.daemon.terminate()
                assert lives.daemon.wait() == 0
            else:
                lives.daemon.kill()
            lives.start()
            lives.daemon.await_record("Commit", name="kv")
        done.set()

    dying, rounds = pool.submit(die), 0
    while not (done.is_set() or dying.done()):
        with client.acquire("mutable"):
            mutable.add_(1)
        rounds += 1
        with client.acquire("clean", "f"):
            assert torch.equal(clean, numbers())
            assert bytes(family[1].view("x")) == b"b"
        with client.acquire("mutable", "kv"):
            assert bool((mutable == rounds).all())
        assert [clean.data_ptr(), mutable.data_ptr(), scratch.tensor.data_ptr()] == places
        assert component.address == places[0]
    dying.result()
    shown = {c.name: c for c in lives.daemon.status().components}
    assert shown.keys() == {"clean", "mutable", "f/a", "f/b", "kv"}
    assert (shown["clean"].policy, shown["f/a"].part_of) == ("sequential", "f")
    client.close()
    assert torch.equal(clean, numbers())
    assert bool((mutable == rounds).all())


async def test_tasks_see_only_a_pause_and_the_loop_none(lives: Lives) -> None:
    async with await swapd_client.connect_async(lives.daemon.folder) as client:
        tensor = numbers()
        await client.register("a", {"x": tensor})
        await client.register("m", {"x": (mutable := torch.zeros(4))}, mutable=True)
        place = tensor.data_ptr()

        async def use() -> None:
            async with client.acquire("a", "m"):
                assert torch.equal(tensor, numbers())
                mutable.add_(1)

        for rounds in range(1, 4):
            await asyncio.to_thread(lives.kill, lives.client, client._client)
            tasks = [asyncio.ensure_future(use()) for _ in range(40)]
            await asyncio.to_thread(lives.start)  # on this loop, which no task blocks
            await asyncio.gather(*tasks)
            assert tensor.data_ptr() == place
            async with client.acquire("m"):
                assert mutable.tolist() == [40.0 * rounds] * 4
        opened = lives.daemon.watch.seen("SessionOpened")
        assert len([one for one in opened if one.label not in ("observer", "client")]) <= 2
        await asyncio.to_thread(lives.kill, lives.client, client._client)
        await asyncio.to_thread(lives.start)
        assert (await client.status()).components
        await asyncio.to_thread(lives.kill, lives.client, client._client)
        await asyncio.to_thread(lives.start)
        await client.update("a", {"x": torch.zeros(MIB)})
        async with client.acquire("a"):
            assert not tensor.any()


async def test_a_task_that_waits_may_be_cancelled_or_closed(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: AsyncClient = await swapd_client.connect_async(lives.daemon.folder)
    await client.register("a", {"x": (tensor := numbers())})
    async with client.acquire("a"):
        await asyncio.to_thread(lives.kill, lives.client, client._client)
        with pytest.raises(DaemonGone, match="once no lease is in use"):
            await client.acquire("a")
        with pytest.raises(DaemonGone):
            await client.register("b", {"x": b"b"})
    looked = begins_to_wait(monkeypatch, client._client)
    task = asyncio.ensure_future(client.status())
    assert await asyncio.to_thread(looked.wait, PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    looked.clear()
    tasks = [asyncio.ensure_future(client.status()) for _ in range(3)]
    assert await asyncio.to_thread(looked.wait, PATIENCE_S)
    await client.close()
    for each in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(each, ClientClosed)
    assert torch.equal(tensor, numbers())


CALLS: dict[str, Callable[[Client], object]] = {
    "acquire_workspace": lambda client: client.acquire_workspace("1MiB").release(),
    "acquire_start": lambda client: client.acquire_start().release(),
    "prefetch": lambda client: client.prefetch("a"),
    "follows": lambda client: client.follows("a", after="f"),
    "resize": lambda client: client.resize("f", 0),
    "pin": lambda client: client.pin("a"),
    "unpin": lambda client: client.unpin("a"),
    "evict": lambda client: client.evict("a"),
    "forecast": lambda client: client.forecast("a"),
    "cheapest": lambda client: client.cheapest(["a", "f"]),
    "status": lambda client: client.status(timeout=PATIENCE_S),
    "update": lambda client: client.update("a", {"x": numbers()}),
    "register": lambda client: client.register("b", {"x": b"b"}),
    "register_family": lambda client: client.register_family("g", {"b": {"x": b"b"}}),
    "register_scratch": lambda client: client.register_scratch("s", 4096),
    "attach": lambda client: client.attach({"vae": seeded(Decoder)}),
    "unregister": lambda client: client.unregister("f"),
}


def test_every_call_joins_the_next_daemon(lives: Lives, tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "w.safetensors")
    calls = {**CALLS, "load": lambda client: client.load("l", tmp_path / "w.safetensors")}
    lives.client.register("a", {"x": (tensor := numbers())})
    lives.client.register_family("f", {"a": {"x": (part := torch.ones(4))}})
    for name, call in calls.items():
        lives.next()
        call(lives.client)
        assert lives.names() >= {"a"}, name
        with lives.client.acquire("a"):
            assert torch.equal(tensor, numbers()), name
    assert part.tolist() == [1.0] * 4


def test_an_acquire_that_waits_when_the_daemon_dies_is_granted_by_the_next(
    lives: Lives, pool: ThreadPoolExecutor
) -> None:
    client = lives.client
    client.register("a", {"x": bytes(12 * MIB)})
    client.register("b", {"x": (b := numbers())})
    client.register("c", {"x": bytes(8 * MIB)})
    with client.acquire("a"):
        waiting = pool.submit(client.acquire, "c")
        lives.daemon.await_record("Waiting", names=("c",))
        lives.next()
        with pytest.raises(DaemonGone, match="once no lease is in use"):
            client.acquire("b")
        assert not waiting.done(), "the other thread computes on what it holds"
    with client.acquire("b"):
        assert torch.equal(b, numbers())
    waiting.result().release()


@pytest.mark.parametrize("how", ["register", "attach", "load"])
def test_a_registration_in_which_it_dies_changes_nothing_and_may_be_repeated(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    lives.client.register("a", {"x": (tensor := numbers())})
    model = seeded(Decoder)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    wanted, fill = model(X), Registry.fill

    def die(registry: Registry, part: Any) -> None:
        monkeypatch.undo()
        lives.next()
        fill(registry, part)

    def register() -> None:
        if how == "load":
            lives.client.load("m", tmp_path / "w.safetensors", model)
        elif how == "attach":
            lives.client.attach({"m": model})
        else:
            lives.client.register("m", model)

    monkeypatch.setattr(Registry, "fill", die)
    with pytest.raises(DaemonGone):
        register()
    assert torch.equal(model(X), wanted), "unchanged"
    register()
    with lives.client.acquire("m", "a"):
        assert torch.equal(model(X), wanted)
        assert torch.equal(tensor, numbers())


def test_one_thread_joins_and_the_others_wait_for_it(
    lives: Lives, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(Decoder)
    wanted = model(X)
    lives.client.attach({"m": model})
    lives.client.register("a", {"x": (tensor := numbers())})
    lives.kill()
    looked = begins_to_wait(monkeypatch, lives.client)

    def use() -> bool:
        with lives.client.acquire("a"):
            return torch.equal(tensor, numbers())

    uses: list[Future[bool]] = [pool.submit(use) for _ in range(3)]
    uses.append(pool.submit(lambda: torch.equal(model(X), wanted)))
    assert looked.wait(PATIENCE_S)
    lives.start()
    assert all(each.result() for each in uses)
    opened = lives.daemon.watch.seen("SessionOpened")
    assert [one.label for one in opened].count("client") == 1


def test_the_wait_ends_in_time_and_says_what_to_do(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = lives.client
    client.register("a", {"x": (tensor := numbers())})
    place = tensor.data_ptr()
    lives.kill()
    with pytest.raises(NotRunning, match=f"Start one: swapd serve --device host.*{AGAIN}"):
        client.acquire("a", timeout=0)
    monkeypatch.setattr(client, "reconnect_s", 0.1)
    for call in (lambda: client.acquire("a"), client.status, lambda: client.unregister("a")):
        with pytest.raises(NotRunning, match=AGAIN):
            call()
    monkeypatch.setattr(client, "reconnect_s", 0.0)
    with pytest.raises(DaemonGone, match=r"close\(\): all tensors are private memory"):
        client.acquire("a")
    monkeypatch.undo()
    lives.start()
    with client.acquire("a"):
        assert (tensor.data_ptr(), torch.equal(tensor, numbers())) == (place, True)


def test_a_daemon_that_is_about_to_stop_is_awaited(lives: Lives, pool: ThreadPoolExecutor) -> None:
    other = swapd_client.connect(lives.daemon.folder, label="holder")
    other.register("b", {"x": b"b"})
    lives.client.register("a", {"x": (tensor := numbers())})
    with other.acquire("b"):
        lives.daemon.terminate()
        lives.daemon.await_record("Stopping")
        waiting = pool.submit(lives.client.acquire, "a")
    assert lives.daemon.wait() == 0
    lives.start()
    with waiting.result():
        assert torch.equal(tensor, numbers())
    other.close()


def too_small(lives: Lives) -> str:
    lives.next(budget="2MiB")
    return "a needs 4 MiB; the budget is 2 MiB"


def of_another_device(lives: Lives) -> str:
    again = lives.client.session.again

    def elsewhere(within_s: float) -> Any:
        session = again(within_s)
        session.welcome = msgspec.structs.replace(session.welcome, device="cuda:7")
        return session

    lives.client.session.again = elsewhere
    lives.next()
    return "serves cuda:7, but the weights are on host"


@pytest.mark.parametrize("refuses", [too_small, of_another_device])
def test_one_that_refuses_leaves_the_bytes_where_they_are(
    lives: Lives, refuses: Callable[[Lives], str]
) -> None:
    lives.client.register("a", {"x": (tensor := numbers())})
    place, again = tensor.data_ptr(), lives.client.session.again
    why = refuses(lives)
    for _ in range(2):
        with pytest.raises((TooLarge, NotRunning), match=f"{why}.*{AGAIN}"):
            lives.client.acquire("a")
        assert not lives.names()
    lives.client.session.again = again
    lives.next() if refuses is too_small else None
    with lives.client.acquire("a"):
        assert (tensor.data_ptr(), torch.equal(tensor, numbers())) == (place, True)


def test_other_chunks_and_a_second_death_while_it_joins_are_no_obstacle(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives.client.register("a", {"x": (tensor := numbers())})
    place, fill = tensor.data_ptr(), Registry.fill

    def die(registry: Registry, part: Any) -> None:
        monkeypatch.undo()
        lives.daemon.kill()
        lives.start(chunk="8MiB")
        fill(registry, part)

    monkeypatch.setattr(Registry, "fill", die)
    lives.next(chunk="4MiB")
    with lives.client.acquire("a"):
        assert (tensor.data_ptr(), torch.equal(tensor, numbers())) == (place, True)


def test_an_interrupt_ends_the_wait_and_so_does_close(
    lives: Lives, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = lives.client
    client.register("a", {"x": (tensor := numbers())})
    lives.kill()
    looked = begins_to_wait(monkeypatch, client)
    main = threading.main_thread().ident or 0
    pool.submit(lambda: looked.wait(PATIENCE_S) and signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        client.acquire("a")
    lives.start()
    client.acquire("a").release()
    lives.kill()
    looked = begins_to_wait(monkeypatch, client)
    waiting = pool.submit(client.acquire, "a")
    assert looked.wait(PATIENCE_S)
    client.close()
    with pytest.raises(ClientClosed):
        waiting.result()
    assert torch.equal(tensor, numbers()), "private memory"


def test_a_forked_child_does_not_wait(lives: Lives) -> None:
    lives.client.register("a", {"x": (tensor := numbers())})
    lives.kill()
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            lives.client.acquire("a")
        except SwapdError as exc:
            os.write(write, repr(exc).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as told:
        assert told.read().startswith(b"ClientClosed(")
    os.waitpid(pid, 0)
    lives.start()
    with lives.client.acquire("a"):
        assert torch.equal(tensor, numbers())


def test_the_wait_is_set_by_a_variable_too(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lives.daemon.folder
    for said, seconds in (("0", 0.0), ("2m", 120.0), ("", 30.0)):
        monkeypatch.setenv("SWAPD_RECONNECT", said)
        with swapd_client.connect(folder) as one, swapd_client.connect(folder, reconnect=7) as two:
            assert (one.reconnect_s, two.reconnect_s) == (seconds, 7.0)
    monkeypatch.setenv("SWAPD_RECONNECT", "soon")
    with pytest.raises(InvalidArgument, match=r"\$SWAPD_RECONNECT: 'soon' is not a time span"):
        swapd_client.connect(folder)
    for wrong in (-1, float("inf"), "soon"):
        with pytest.raises(InvalidArgument, match="reconnect="):
            swapd_client.connect(folder, reconnect=wrong)  # type: ignore[arg-type]
