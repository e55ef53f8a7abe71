"""A client whose daemon is gone joins the next one by itself: the program sees a pause."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

import swapd_client
from swapd_client import (
    Client,
    ClientClosed,
    DaemonGone,
    InvalidArgument,
    InvalidSource,
    NotRunning,
    Timeout,
    TooLarge,
    registration,
    rejoining,
)
from swapd_client.session.registry import Registry
from swapd_client.session.session import Session
from swapd_client.session.unbinding import Unbinding
from tests.guarantees.harness import MIB, PATIENCE_S, stop_process
from tests.lives import Lives, living
from tests.offload.modules import WIDTH, Decoder, computed, seeded

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


def begins_to_wait(monkeypatch: pytest.MonkeyPatch, client: Client) -> threading.Event:
    """Set once a call looks for the next daemon."""
    looked, again = threading.Event(), client.session.again

    def look(within_s: float) -> Any:
        looked.set()
        return again(within_s)

    monkeypatch.setattr(client.session, "again", look)
    return looked


def test_a_holder_waits_for_no_segment_that_it_has(lives: Lives) -> None:
    tensors = {"a": numbers(), "b": numbers()}
    lives.client.register("x", tensors, segments=[["a"], ["b"]])
    for early in (True, False):
        with lives.client.acquire("x", early=early) as lease:
            if early:
                lease.wait(1)
            lives.kill()
            lease.wait(0)
            lease.wait()
            assert all(torch.equal(tensor, numbers()) for tensor in tensors.values())
        lives.start()


def test_a_loop_sees_only_pauses_while_daemons_die(lives: Lives, pool: ThreadPoolExecutor) -> None:
    client, clean, mutable = lives.client, numbers(), torch.zeros(MIB)
    client.register("clean", {"x": clean}, policy="sequential")
    client.register("mutable", {"x": mutable}, mutable=True)
    places = [clean.data_ptr(), mutable.data_ptr()]

    def die() -> None:
        for end in ("kill", "terminate", "kill"):
            getattr(lives.daemon, end)()
            lives.daemon.wait()
            lives.start()
            lives.daemon.await_record("Commit", name="mutable")

    dying, rounds = pool.submit(die), 0
    while not dying.done():
        with client.acquire("mutable"):
            mutable.add_(1)
        rounds += 1
        with client.acquire("clean", "mutable"):
            assert torch.equal(clean, numbers())
            assert bool((mutable == rounds).all())
        assert [clean.data_ptr(), mutable.data_ptr()] == places
    dying.result()
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
            former = client.leasing.channel
            await asyncio.to_thread(lives.kill, lives.client, client._client)
            async with asyncio.TaskGroup() as group:
                for _ in range(40):
                    group.create_task(use(), name="use")
                await asyncio.to_thread(lives.start)  # on this loop, which no task blocks
            assert tensor.data_ptr() == place
            async with client.acquire("m"):
                assert mutable.tolist() == [40.0 * rounds] * 4
            assert former._socket.closed
        labels = [one.label for one in lives.daemon.watch.seen("SessionOpened")]
        assert len([label for label in labels if label.endswith(f":{os.getpid()}")]) == 1
        await asyncio.to_thread(lives.kill, lives.client, client._client)
        await asyncio.to_thread(lives.start)
        await client.update("a", {"x": torch.zeros(MIB)})
        async with client.acquire("a"):
            assert not tensor.any()


async def test_a_task_that_waits_may_be_cancelled_or_closed(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await swapd_client.connect_async(lives.daemon.folder)
    await client.register("a", {"x": (tensor := numbers())})
    async with client.acquire("a"):
        await asyncio.to_thread(lives.kill, lives.client, client._client)
        with pytest.raises(DaemonGone, match="once no lease is in use"):
            await client.acquire("a")
    looked = begins_to_wait(monkeypatch, client._client)
    loop = asyncio.get_running_loop()
    task = loop.create_task(client.status(), name="cancelled")
    assert await asyncio.to_thread(looked.wait, PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    looked.clear()
    tasks = [loop.create_task(client.status(), name="closed") for _ in range(3)]
    assert await asyncio.to_thread(looked.wait, PATIENCE_S)
    await client.close()
    for each in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(each, ClientClosed)
    assert torch.equal(tensor, numbers())


def test_every_call_joins_the_next_daemon(lives: Lives, tmp_path: Path) -> None:
    client = lives.client
    save_file({"w": torch.ones(4)}, tmp_path / "w.safetensors")
    client.register("a", {"x": (tensor := numbers())})
    client.register_family("f", {"a": {"x": (part := torch.ones(4))}})
    names = ("prefetch", "pin", "unpin", "evict", "forecast", "cheapest")
    calls: list[Callable[[], object]] = [partial(getattr(client, name), "a") for name in names]
    calls += [client.status, client.acquire_start, partial(client.acquire_workspace, "1MiB")]
    calls += [partial(client.follows, "a", after="f"), partial(client.resize, "f", 0)]
    calls += [partial(client.update, "a", {"x": numbers()}), partial(client.unregister, "f")]
    calls += [partial(client.register, "b", {"x": b"b"}), partial(client.register_scratch, "s", 9)]
    calls += [partial(client.register_family, "g", {"b": {"x": b"b"}})]
    calls += [partial(client.load, "l", tmp_path / "w.safetensors")]
    calls += [partial(client.attach, {"vae": seeded(Decoder)})]
    for call in calls:
        lives.next()
        made = call()
        if isinstance(made, swapd_client.Lease):
            made.release()
        with client.acquire("a"):
            assert torch.equal(tensor, numbers()), call
    assert part.tolist() == [1.0] * 4


def test_an_update_that_took_place_before_the_daemon_died_is_no_error(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, tensor = lives.client, numbers()
    client.register("a", {"x": tensor})
    renew = client.session.renew

    def last(*update: Any) -> None:
        renew(*update)
        lives.kill()

    monkeypatch.setattr(client.session, "renew", last)
    client.update("a", {"x": torch.zeros(MIB)})
    lives.start()
    with client.acquire("a"):
        assert not tensor.any()


def test_a_program_may_change_its_directory(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lives.daemon.folder
    monkeypatch.chdir(folder.parent)
    with swapd_client.connect(folder.name) as client:
        client.register("a", {"x": b"1"})
        monkeypatch.chdir("/")
        lives.kill(lives.client, client)
        lives.start()
        client.acquire("a", timeout=5).release()


def states(lives: Lives) -> dict[str, str]:
    return {one.name: one.state for one in lives.daemon.status().components}


def test_a_family_that_was_registered_part_by_part_has_its_size_at_the_next_daemon(
    lives: Lives,
) -> None:
    client = lives.client
    client.register("f/a", {"x": bytes(MIB)}, part_of="f")
    client.resize("f", 0)
    lives.next()
    client.acquire("f").release()
    client.forecast("f")  # after the release
    assert states(lives) == {"f/a": "absent"}
    client.unregister("f")
    client.register("f/a", {"x": bytes(MIB)}, part_of="f")  # another one, without a size
    lives.next()
    client.acquire("f").release()
    client.forecast("f")
    assert states(lives) == {"f/a": "idle"}


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


@pytest.mark.parametrize("how", ["register", "attach"])
def test_a_registration_in_which_it_dies_changes_nothing_and_may_be_repeated(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    lives.client.register("a", {"x": (tensor := numbers())})
    model = seeded(Decoder)
    wanted, fill = model(X), Registry.fill

    def die(registry: Registry, part: Any) -> None:
        monkeypatch.undo()
        lives.next()
        fill(registry, part)

    given = ({"m": model},) if how == "attach" else ("m", model)
    again = partial(getattr(lives.client, how), *given)
    monkeypatch.setattr(Registry, "fill", die)
    with pytest.raises(DaemonGone):
        again()
    assert torch.equal(model(X), wanted), "unchanged"
    again()
    with lives.client.acquire("m", "a"):
        assert torch.equal(model(X), wanted)
        assert torch.equal(tensor, numbers())


def test_one_thread_joins_and_the_others_wait_for_it(
    lives: Lives, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wanted = computed(X, Decoder)
    lives.client.attach({"m": model})
    lives.client.register("a", {"x": (tensor := numbers())})
    lives.kill()
    looked = begins_to_wait(monkeypatch, lives.client)

    def use() -> bool:
        with lives.client.acquire("a"):
            return torch.equal(tensor, numbers())

    uses = [pool.submit(use) for _ in range(3)]
    uses.append(pool.submit(lambda: torch.equal(model(X), wanted)))
    assert looked.wait(PATIENCE_S)
    lives.start()
    assert all(each.result() for each in uses)
    opened = lives.daemon.watch.seen("SessionOpened")
    assert [one.label for one in opened].count("client") == 1


#: Calls that change components, each with its last step, after the daemon's answer.
CHANGES: dict[str, tuple[Callable[..., object], Any, str]] = {
    "register": (lambda client, c: client.register("c", {"x": c}), Registry, "bind"),
    "unregister": (lambda client, _: client.unregister("a"), Unbinding, "unbind"),
    "update": (lambda client, c: client.update("a", {"x": c}), Session, "renew"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_a_daemon_has_made_ends_before_the_next_one_is_joined(
    lives: Lives, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    client, a, b, c = lives.client, numbers(), numbers() + 1, numbers() + 2
    client.register("a", {"x": a})
    client.register("b", {"x": b})
    begin, owner, step = CHANGES[change]
    does, answered, waits = getattr(owner, step), threading.Event(), threading.Event()

    def last_step(*given: Any, **how: Any) -> None:
        monkeypatch.setattr(owner, step, does)
        answered.set()
        assert waits.wait(PATIENCE_S)
        does(*given, **how)

    monkeypatch.setattr(owner, step, last_step)
    changing = pool.submit(begin, client, c)
    assert answered.wait(PATIENCE_S)
    lives.next()
    watched = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: waits.set())
    monkeypatch.setattr(rejoining, "time", watched)
    with client.acquire("b"):
        assert torch.equal(b, numbers() + 1)
    waits.set()
    changing.result()
    assert lives.names() == {"b"} | {"register": {"a", "c"}, "update": {"a"}}.get(change, set())
    with client.acquire(*lives.names()):
        assert torch.equal(a, numbers() + 2 * (change == "update"))
        assert torch.equal(c, numbers() + 2)


def test_a_call_within_a_change_joins_no_daemon(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in a signal handler: its thread would wait for itself."""
    client, renew = lives.client, Session.renew
    client.register("a", {"x": (tensor := numbers())})

    def interrupted(*given: Any) -> None:
        lives.next()
        with pytest.raises(DaemonGone):
            client.acquire("a")
        renew(*given)

    monkeypatch.setattr(Session, "renew", interrupted)
    client.update("a", {"x": numbers() + 1})
    with client.acquire("a"):
        assert torch.equal(tensor, numbers() + 1)


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
    for call in (client.acquire, client.forecast, client.unregister):
        with pytest.raises(NotRunning, match=AGAIN):
            call("a")
    monkeypatch.setattr(client, "reconnect_s", 0.0)
    with pytest.raises(DaemonGone, match=r"close\(\): all tensors are private memory"):
        client.acquire("a")
    monkeypatch.undo()
    lives.start()
    with client.acquire("a"):
        assert (tensor.data_ptr(), torch.equal(tensor, numbers())) == (place, True)


@pytest.mark.parametrize("step", ["_ask", "fill"])
def test_a_next_one_that_falls_silent_while_it_is_joined_ends_the_call_in_time(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    client = lives.client
    client.register("a", {"x": (tensor := numbers())})
    client.register("m", {"x": (mutable := torch.ones(4))}, mutable=True)
    places = tensor.data_ptr(), mutable.data_ptr()
    owner: Any = registration if step == "_ask" else Registry
    does = getattr(owner, step)

    def stop(*arguments: Any, **options: Any) -> None:
        stop_process(lives.daemon.pid)
        does(*arguments, **options)

    lives.next()
    monkeypatch.setattr(rejoining, "GRACE_S", 0.5)
    monkeypatch.setattr(client, "reconnect_s", 0.1)
    monkeypatch.setattr(owner, step, stop)
    with pytest.raises(Timeout, match=f"it is stopped.*{AGAIN}"):
        client.acquire("a")
    monkeypatch.undo()
    os.kill(lives.daemon.pid, signal.SIGCONT)
    with client.acquire("a", "m"):
        assert (tensor.data_ptr(), mutable.data_ptr()) == places
        assert torch.equal(tensor, numbers())
        assert mutable.tolist() == [1.0] * 4


@pytest.mark.parametrize("why", ["a needs 4 MiB; the budget is 2 MiB", "serves host, but the"])
def test_one_that_refuses_leaves_the_bytes_where_they_are(lives: Lives, why: str) -> None:
    lives.client.register("a", {"x": (tensor := numbers())})
    place, session = tensor.data_ptr(), lives.client.session
    welcome = session.welcome
    if "host" in why:
        session.welcome = msgspec.structs.replace(welcome, device="cuda:0")
    lives.next(budget="2MiB")
    for _ in range(2):
        with pytest.raises((TooLarge, InvalidSource), match=f"{why}.*{AGAIN}"):
            lives.client.acquire("a")
        assert not lives.names()
    session.welcome = welcome
    lives.next()
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


def test_one_that_dies_as_soon_as_it_is_joined_leaves_all_to_the_next(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, words = lives.client, bytearray(b"words" * 1000)
    client.register("tensor", {"x": (tensor := numbers())})
    client.register("mutable", {"x": (mutable := torch.ones(4))}, mutable=True)
    view = client.register("buffer", {"x": words}).view("x")
    bind = Registry.bind

    def die(registry: Registry, part: Any) -> None:
        bind(registry, part)
        if part.name == "buffer":
            monkeypatch.undo()
            lives.next()
            registry._life.await_end()

    monkeypatch.setattr(Registry, "bind", die)
    lives.next()
    for _ in range(2):
        with client.acquire("tensor", "mutable", "buffer"):
            assert torch.equal(tensor, numbers())
            assert mutable.tolist() == [1.0] * 4
            assert bytes(view) == words
        lives.next()


def test_an_interrupt_ends_the_wait_and_so_does_close(
    lives: Lives, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = lives.client
    client.register("a", {"x": (tensor := numbers())})
    lives.kill()
    looked = begins_to_wait(monkeypatch, client)
    main = threading.main_thread().ident or 0
    waited = pool.submit(looked.wait, PATIENCE_S)
    waited.add_done_callback(lambda _: signal.pthread_kill(main, signal.SIGINT))
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


def test_a_lease_that_was_to_be_exchanged_is_over_too(lives: Lives) -> None:
    client, tensors = lives.client, {"a": numbers(), "b": numbers() + 1}
    client.register_family("f", {name: {"x": tensor} for name, tensor in tensors.items()})
    lease = client.acquire("f/a", early=True)
    lives.kill()
    with pytest.raises(DaemonGone):
        client.leasing.exchange(lease, "f/b")
    assert not client.leasing.in_use(), "else no call joins the next daemon"
    lives.start()
    with client.acquire("f/b"):
        assert torch.equal(tensors["b"], numbers() + 1)


def test_the_wait_is_set_by_a_variable_too(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    for said, asked, seconds in (("0", None, 0), ("2m", None, 120), ("", True, 30), ("1", 7, 7)):
        monkeypatch.setenv("SWAPD_RECONNECT", said)
        with swapd_client.connect(lives.daemon.folder, reconnect=asked) as client:
            assert client.reconnect_s == seconds
    monkeypatch.setenv("SWAPD_RECONNECT", "soon")
    with pytest.raises(InvalidArgument, match=r"\$SWAPD_RECONNECT: 'soon' is not"):
        swapd_client.connect(lives.daemon.folder)
