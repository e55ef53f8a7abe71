"""A client that is collected without `close` is closed, as in a notebook's cell that runs again."""

import _thread
import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import swapd_client
from swapd import spawn
from swapd.shared import runtime_dir
from swapd.shared.fds import OwnedFd
from swapd.shared.system import is_stopped
from swapd_client import finalizers
from swapd_client.session.channel import Channel
from tests.processes import output_of

REGISTER = """
client = connect(folder)
weights = client.register("a", {"x": b"abc"})
client.acquire("a").release()
"""
ATTACH = """
model = torch.nn.Sequential(torch.nn.Linear(8, 8))
client = connect(folder)
client.attach(model, "0")
with torch.no_grad():
    model(torch.ones(1, 8))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with spawn.daemon(budget="64MiB") as daemon:
        yield daemon.folder


def sessions(folder: Path) -> int:
    with swapd_client.connect(folder) as client:
        return len(client.status().sessions) - 1


def await_sessions(folder: Path, count: int) -> None:
    while sessions(folder) != count:
        gc.collect()


@pytest.mark.parametrize("cell", [REGISTER, ATTACH], ids=["register", "attach"])
def test_a_cell_may_run_again(folder: Path, cell: str) -> None:
    names: dict[str, Any] = {"connect": swapd_client.connect, "folder": folder, "torch": torch}
    for _ in range(3):
        exec(cell, names)
    await_sessions(folder, 1)
    names.clear()
    await_sessions(folder, 0)


def test_a_name_is_free_again_also_for_a_daemon_that_hears_the_request_before_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wait for a daemon that had no time: messages of the new client before the end of the
    old one, which brings the next message of the new client before it, too."""
    pid = int((folder / runtime_dir.LOCK).read_text())
    os.setpriority(os.PRIO_PROCESS, pid, 19)  # so that all of it has come when it goes on
    old, client = swapd_client.connect(folder), swapd_client.connect(folder)
    old.register("a", {"x": b"abc"})
    settle, ready = finalizers.settle, Channel._ready

    def settle_while_it_has_no_time(within_s: float) -> None:
        nonlocal old
        os.kill(pid, signal.SIGSTOP)
        while not is_stopped(pid):
            """Soon."""
        client.leasing.hint("a")
        del old
        settle(within_s)

    def has_time_once_it_is_asked(channel: Channel, *how: Any) -> Any:
        os.kill(pid, signal.SIGCONT)
        return ready(channel, *how)

    monkeypatch.setattr(finalizers, "settle", settle_while_it_has_no_time)
    monkeypatch.setattr(Channel, "_ready", has_time_once_it_is_asked)
    client.register("a", {"x": b"xyz"})
    client.close()


def test_who_awaits_what_collected_objects_left_awaits_all_of_it_or_for_so_long() -> None:
    done: list[bool] = []
    goes_on, session = threading.Event(), cast("Any", SimpleNamespace(forked=False))
    for _ in range(2):
        finalizers.when_collected(set(), session, lambda: done.append(goes_on.wait(9)))
    finalizers.settle(0.0)
    assert not done
    goes_on.set()
    finalizers.settle()
    assert done == [True, True]


AT_EXIT = """
import atexit, sys

def last():
    settle()
    with client.acquire("a"):
        print(client.status().components[0].leases)

atexit.register(last)
from swapd_client import connect
from swapd_client.finalizers import settle
client = connect(sys.argv[1])
client.register("a", {"x": b"abc"})
"""


def test_a_client_is_as_it_was_when_a_program_ends(folder: Path) -> None:
    assert output_of(AT_EXIT, folder, anew=True) == "1\n"


def test_a_lease_in_use_keeps_the_session_of_its_client(folder: Path) -> None:
    client = swapd_client.connect(folder)
    view = client.register("a", {"x": b"abc"}).view("x")
    lease = client.acquire("a")
    del client
    gc.collect()
    with swapd_client.connect(folder) as other:
        assert other.status().components[0].leases == 1
        with pytest.raises(swapd_client.DuplicateName):  # that session may last for long
            other.register("a", {"x": b"abc"})
        with pytest.raises(swapd_client.DuplicateName):
            other.attach(torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8)}), "a")
    assert bytes(view) == b"abc"
    lease.release()
    await_sessions(folder, 0)
    assert bytes(view) == b"abc", "private memory"


def test_clients_that_come_and_go_leave_no_thread(folder: Path) -> None:
    sessions(folder)
    before = _thread._count()
    for _ in range(5):
        sessions(folder)
    while _thread._count() > before:  # they are ending
        pass


def test_it_is_closed_beside_a_thousand_open_files(folder: Path) -> None:
    """Numbers from 1024 on do not fit what `select` takes: servers have as many connections."""
    with ExitStack() as opened:
        while opened.enter_context(OwnedFd(os.open(os.devnull, os.O_RDONLY))).fileno() < 1024:
            pass
        client = swapd_client.connect(folder)
        client.register("a", {"x": b"abc"})
        lease, life = client.acquire("a"), client.session.life
        del client
        gc.collect()
        lease.release()
        life.await_end()


def test_an_attached_model_keeps_its_client(folder: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    x = torch.ones(1, 8)
    want = model(x).detach()
    swapd_client.connect(folder).attach(model, "0")
    gc.collect()
    assert sessions(folder) == 1
    with torch.no_grad():
        assert torch.equal(model(x), want)
    del model
    await_sessions(folder, 0)


def test_an_async_client_is_closed_when_it_is_collected(folder: Path) -> None:
    async def use(*, attached: bool) -> torch.nn.Module | None:
        client = await swapd_client.connect_async(folder)
        await client.register("a", {"x": b"abc"})
        (await client.acquire("a")).release()
        if not attached:
            return None
        model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        await client.attach(model, "0")
        return model

    async def main() -> None:
        await use(attached=False)
        await asyncio.to_thread(await_sessions, folder, 0)
        model = await use(attached=True)
        gc.collect()
        assert await asyncio.to_thread(sessions, folder) == 1
        del model
        await asyncio.to_thread(await_sessions, folder, 0)

    asyncio.run(main())


#: They are collected where CPython before 3.11.9 holds a lock that a new thread needs (gh-106883).
COLLECTED = """
    import sys
    from functools import partial
    from itertools import count
    from types import SimpleNamespace

    from swapd_client.finalizers import settle, when_collected
    from tests.garbage import TIMES, collected_in

    done, numbers = [], count()

    def before(one):
        when_collected(one, SimpleNamespace(forked=False), partial(done.append, next(numbers)))

    collected_in(sys._current_frames, before)
    settle()
    print(sorted(done) == list(range(TIMES)))
"""


def test_clients_are_closed_wherever_the_collector_finds_them() -> None:
    assert output_of(COLLECTED) == "True\n"
