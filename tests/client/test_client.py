"""The client in one process, against a real daemon."""

import asyncio
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import swapd_client
from swapd import spawn
from swapd_client import Client, ClientClosed, Lease
from swapd_client.memory.component import Component
from swapd_client.registration import refuse_in_use
from swapd_client.session.channel import Channel
from swapd_client.session.gpu import streams
from tests.processes import output_of
from tests.threads import started


def test_a_thread_that_waits_for_a_name_gets_what_another_registers() -> None:
    with spawn.daemon(budget="64MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        for i in range(20):
            name = f"late-{i}"
            seen: list[bytes] = []

            def use(name: str = name, seen: list[bytes] = seen) -> None:
                with client.acquire(name, await_registration=True):
                    seen.append(bytes(Component(client.session.own(name)).view("x")))

            waiting = started(use)
            client.register(name, {"x": name.encode()})
            waiting.join()
            assert seen == [name.encode()]


def test_a_thread_that_first_asks_when_it_has_just_been_closed_is_told_so() -> None:
    with spawn.daemon(budget="64MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        client.register("a", {"x": b"a"})
        client.close()
        with pytest.raises(ClientClosed, match="this client is closed"):
            Channel(client.leasing.factory)
        with pytest.raises(ClientClosed, match="this client is closed"):
            client.update("a", {"x": b"b"})


def test_a_thread_that_is_just_importing_torch_disturbs_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # a half-imported torch
    with spawn.daemon(budget="64MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        client.register("a", {"x": b"a"})
        client.update("a", {"x": b"b"})
        client.acquire_workspace("1MiB").release()
        asyncio.run(_register_in_a_loop(daemon.folder))
        assert streams.current_stream(0) == streams.LEGACY_DEFAULT


async def _register_in_a_loop(folder: Path) -> None:
    async with await swapd_client.connect_async(folder) as client:
        await client.register("b", {"x": b"b"})


def leases(client: Client) -> int:
    """The leases on "a"."""
    return client.status().components[0].leases


def test_a_lease_ends_when_its_object_is_collected() -> None:
    """In its own thread or in another one, whatever its thread does then, and with a warning."""
    with spawn.daemon(budget="64MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        client.register("a", {"x": b"a"})
        kept = [client.acquire("a")]
        assert leases(client) == 1
        kept.clear()
        with pytest.warns(ResourceWarning, match="a lease of a was never released"):
            left = leases(client)  # before this request, at the latest
        assert left == 0
        started(lambda: kept.append(client.acquire("a"))).join()
        gc.collect()
        assert leases(client) == 1, "its object outlives its thread"
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            kept.clear()
            with swapd_client.connect(daemon.folder) as other:
                while leases(other):  # though nobody asks anything of `client`
                    pass


def test_a_finalizer_that_releases_its_lease_ends_no_lease_of_another() -> None:
    """The collector has cleared the reference to the lease then, and another object may hold it."""
    with spawn.daemon(budget="64MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        client.register("a", {"x": b"a"})
        again: list[Lease] = []

        class Owner:
            def __init__(self) -> None:
                self.lease = client.acquire("a")
                self.itself = self

            def __del__(self) -> None:
                again.append(client.acquire("a"))
                self.lease.release()

        Owner()
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            gc.collect()
        (lease,) = again
        assert leases(client) == 1
        lease.release()
        assert leases(client) == 0


def forked(client: Client, *more: Callable[[], object]) -> int:
    """The exit code of a child with the parent's client: 0 if each call raises ClientClosed."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(10)
    calls: list[Callable[[], object]] = [
        lambda: client.acquire("a"),
        lambda: client.resize("a", 0),
        lambda: refuse_in_use(client.leasing, ["a"]),
        lambda: client.unregister("a"),
        lambda: client.update("a", {}),
        lambda: client.status(),
        lambda: client.prefetch("a"),
        *more,
    ]
    for call in calls:
        try:
            call()
        except ClientClosed:
            continue
        os._exit(1)
    client.close()
    os._exit(0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_waits_for_nothing_that_the_parent_was_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: for the lock under which a kept lease is given back."""
    with spawn.daemon(budget="64MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        client.register("a", {"x": b"a"}, mutable=True)
        giving, go_on = threading.Event(), threading.Event()
        try_send = client.session.lifeline.try_send

        def held_up(message: bytes) -> bool:
            giving.set()
            go_on.wait()
            return try_send(message)

        monkeypatch.setattr(client.session.lifeline, "try_send", held_up)
        for _ in range(3):  # from the second on it is kept
            client.acquire("a").release()
        giving.wait()
        try:
            assert forked(client) == 0
        finally:
            go_on.set()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_lease_is_the_parents_though_a_thread_of_it_had_the_sessions_lock() -> None:
    with spawn.daemon(budget="64MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        client.register("a", {"x": b"a"})
        has, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with client.session.life.lock:
                has.set()
                go_on.wait()

        lease = client.acquire("a")
        holder = started(hold)
        has.wait()
        try:
            assert forked(client, lease.wait, lambda: lease.fresh("a"), lease.release) == 0
        finally:
            go_on.set()
            holder.join()
        lease.release()


EXITS_IN_A_BLOCK = """
import os, sys
from swapd_client import connect

with connect(sys.argv[1]) as client:
    client.register("a", {"x": b"a"})
    with client.acquire("a"):
        child = os.fork()
        if not child:
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_exits_in_a_block_of_the_parents_has_its_own_exit_code() -> None:
    with spawn.daemon(budget="64MiB") as daemon:
        assert output_of(EXITS_IN_A_BLOCK, daemon.folder) == "7\n"
