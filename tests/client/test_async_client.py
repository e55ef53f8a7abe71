"""The asyncio client in one process, against a real daemon."""

import asyncio
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

import swapd_client
from swapd import spawn
from swapd.shared.protocol import LEASES_MAX
from swapd_client import InvalidArgument, SessionFenced, UnknownComponent
from swapd_client.memory.part import Part
from tests.guarantees.relay import Relay


async def test_a_registration_that_is_cancelled_while_it_copies_copies_no_more_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    copied: list[str] = []
    with spawn.daemon(budget="16MiB") as daemon:
        async with await swapd_client.connect_async(daemon.folder) as client:
            fill = client.session.registry.fill

            def slowly(part: Part) -> None:
                copied.append(part.name)
                loop.call_soon_threadsafe(started.set)
                go_on.wait()
                fill(part)

            with monkeypatch.context() as patch:
                patch.setattr(client.session.registry, "fill", slowly)
                parts = {"one": {"x": b"first"}, "two": {"x": b"second"}}
                registering = loop.create_task(client.register_family("a", parts))
                await started.wait()
                registering.cancel()
                loop.call_later(0, go_on.set)
                with pytest.raises(asyncio.CancelledError):
                    await registering
            assert len(copied) == 1
            assert not client.session.components
            part = await client.register("a", {"x": b"third"})
            async with client.acquire("a"):
                assert bytes(part.view("x")) == b"third"


async def test_requests_of_one_service_that_overlap_do_not_keep_another_model_out() -> None:
    """Many tasks of one session; each begins before the previous one has ended."""
    with spawn.daemon(budget="8MiB") as daemon:
        async with await swapd_client.connect_async(daemon.folder) as client:
            await client.register("busy", {"x": bytes(6 << 20)})
            await client.register("other", {"x": bytes(6 << 20)})
            asked = [asyncio.Event() for _ in range(3)]
            done = asyncio.Event()

            async def keep_busy(number: int) -> None:
                next_one = asked[(number + 1) % 3]
                while not done.is_set():
                    asked[number].set()
                    async with client.acquire("busy"):
                        await next_one.wait()
                        next_one.clear()
                asked[number].set()

            async def ask_for_other() -> None:
                async with client.acquire("other", timeout=60):
                    done.set()

            async with asyncio.TaskGroup() as tasks:
                for number in range(3):
                    tasks.create_task(keep_busy(number))
                tasks.create_task(ask_for_other())


async def test_a_lease_that_was_awaited_may_be_held_by_async_with_too() -> None:
    with spawn.daemon(budget="16MiB") as daemon:
        async with await swapd_client.connect_async(daemon.folder) as client:
            await client.register("a", {"x": b"here"})
            async with await client.acquire("a") as lease:
                assert lease.names == ("a",)
                (component,) = (await client.status()).components
                assert component.leases
            async with client.acquire("a", timeout=30):
                pass


async def test_no_two_blocks_have_one_lease_which_would_end_with_the_first() -> None:
    async def hold(acquire: Any, entered: list[Any], goes_on: asyncio.Event) -> None:
        async with acquire as lease:
            entered.append(lease)
            await goes_on.wait()
            assert lease.held

    with spawn.daemon(budget="16MiB") as daemon:
        async with await swapd_client.connect_async(daemon.folder) as client:
            await client.register("a", {"x": b"here"})
            for acquire in (client.acquire("a"), await client.acquire("a")):
                entered: list[Any] = []
                goes_on = asyncio.Event()
                first = asyncio.get_running_loop().create_task(hold(acquire, entered, goes_on))
                with pytest.raises(InvalidArgument, match="for each block"):
                    await asyncio.gather(*(hold(acquire, entered, goes_on) for _ in range(2)))
                goes_on.set()
                await first
                assert not entered[0].held
            with pytest.raises(InvalidArgument, match="by this block: it is over"):
                await entered[0].__aenter__()


def test_another_loop_is_refused_and_what_outlives_the_loop_ends_all_the_same() -> None:
    left: list[Any] = []

    async def begin() -> None:
        client = await swapd_client.connect_async(daemon.folder)
        await client.register("a", {"x": b"here"})
        left.extend([client, await client.acquire("a"), await client.acquire("a")])

    async def go_on(client: swapd_client.AsyncClient) -> None:
        calls = (client.status, lambda: client.acquire("a"), lambda: client.evict("a"))
        for call in calls:
            with pytest.raises(InvalidArgument, match="belongs to another event loop"):
                await call()

    with spawn.daemon(budget="16MiB") as daemon, swapd_client.connect(daemon.folder) as other:
        with asyncio.Runner() as runner:
            runner.run(begin())
            client, lease = left[:2]
            asyncio.run(go_on(client))
            with pytest.raises(InvalidArgument, match="belongs to another event loop"):
                asyncio.run(client.close())
        assert other.status().components[0].leases == 2
        lease.release()
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            left.clear()
        while other.status().components[0].leases:
            pass
        asyncio.run(client.close())
        assert not other.status().components


def test_a_lease_that_is_dropped_ends_also_while_its_loop_does_not_run() -> None:
    with spawn.daemon(budget="16MiB") as daemon, asyncio.Runner() as runner:
        client = runner.run(swapd_client.connect_async(daemon.folder))
        runner.run(client.register("a", {"x": b"here"}))

        async def acquire() -> Any:
            return await client.acquire("a")

        lease = runner.run(acquire())
        assert lease.held
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            del lease
        with swapd_client.connect(daemon.folder) as other:
            while other.status().components[0].leases:
                pass
        runner.run(client.close())


async def test_a_lease_may_be_released_in_another_thread() -> None:
    async def use(client: swapd_client.AsyncClient) -> None:
        for _ in range(20):
            await asyncio.to_thread((await client.acquire("a")).release)

    with spawn.daemon(budget="16MiB") as daemon:
        async with await swapd_client.connect_async(daemon.folder) as client:
            await client.register("a", {"x": b"here"})
            await asyncio.gather(*(use(client) for _ in range(8)))
            while (await client.status()).components[0].leases:
                pass


async def test_orders_reach_the_daemon_and_so_do_their_errors_the_task() -> None:
    with spawn.daemon(budget="16MiB") as daemon:
        async with await swapd_client.connect_async(daemon.folder) as client:
            await client.register("a", {"x": b"here"})
            async with client.acquire("a"):
                await client.pin("a")
            (component,) = (await client.status()).components
            assert component.pinned
            await client.unpin("a")
            await client.evict("a")
            (component,) = (await client.status()).components
            assert not component.pinned
            assert not component.inside
            for order in (client.pin, client.unpin, client.evict, client.forget, client.prefetch):
                with pytest.raises(UnknownComponent):
                    await order("b")
            await client.prefetch("b", over=())
            await client.follows("b", after="a")
            with pytest.raises(InvalidArgument, match="cannot follow itself"):
                await client.follows("a", after="a")
            assert [one.bytes_in for one in await client.cheapest("a")] == [4]
            for timeout in ("5", -1):
                with pytest.raises(InvalidArgument, match="give a number of seconds"):
                    await client.pin("a", timeout=timeout)  # type: ignore[arg-type]


async def test_a_task_may_hold_more_leases_than_a_message_can_name() -> None:
    with spawn.daemon(budget="16MiB") as daemon:
        async with await swapd_client.connect_async(daemon.folder) as client:
            await client.register("a", {"x": b"here"})
            leases = [await client.acquire("a") for _ in range(LEASES_MAX + 2)]
            for lease in leases:
                lease.release()


async def test_a_release_that_raises_has_ended_the_lease(tmp_path: Path) -> None:
    with (
        spawn.daemon(budget="16MiB") as daemon,
        Relay(tmp_path / "relay", daemon.folder) as relay,
    ):
        async with await swapd_client.connect_async(relay.folder) as client:
            await client.register("a", {"x": b"here"})
            lease = await client.acquire("a")
            relay.send_garbage()
            await asyncio.to_thread(client.session.life.await_end)
            with pytest.raises(SessionFenced):
                lease.release()
            assert not lease.held
            lease.release()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_block_whose_lease_ended_before_it_raises_its_own_error_first(
    tmp_path: Path, fails: bool
) -> None:
    async def in_a_task(client: Any) -> None:
        async with await client.acquire("a"):
            await asyncio.to_thread(ended, client)

    def in_a_thread(client: Any) -> None:
        with client.acquire("a"):
            ended(client)

    def ended(client: Any) -> None:
        relay.send_garbage()
        client.session.life.await_end()
        if fails:
            raise ZeroDivisionError

    expected = ZeroDivisionError if fails else SessionFenced
    with spawn.daemon(budget="16MiB") as daemon:
        with Relay(tmp_path / "one", daemon.folder) as relay:
            async with await swapd_client.connect_async(relay.folder) as tasks:
                await tasks.register("a", {"x": b"here"})
                with pytest.raises(expected):
                    await in_a_task(tasks)
        with (
            Relay(tmp_path / "other", daemon.folder) as relay,
            swapd_client.connect(relay.folder) as threads,
        ):
            threads.register("a", {"x": b"here"})
            with pytest.raises(expected):
                await asyncio.to_thread(in_a_thread, threads)
