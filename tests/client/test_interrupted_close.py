"""After an interrupt at any place of a close, one more close ends all of it."""

import gc
import os
import re
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import swapd_client
from swapd import spawn
from swapd.spawn import Spawned
from swapd_client import AsyncClient, Client
from swapd_client.finalizers import settle
from tests.client.test_cancelled import each_cancelled
from tests.interrupts import forget, interrupt, interrupts, places

#: Places of one call.
MOST = 40
SIZE = 5000
LABEL = "to be closed"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Spawned]:
    with spawn.daemon(budget="16MiB", isolation="strict") as daemon:
        yield daemon


@pytest.fixture
def other(daemon: Spawned, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    # the wait for an answer that was read, and lost in the interrupt
    monkeypatch.setattr("swapd_client.session.channel.GRACE_S", 0.2)
    with swapd_client.connect(daemon.folder) as other, interrupts():
        other.status()
        yield other


class Opened:
    """A client with a component of each kind, and leases in use and kept; and what it opened."""

    def __init__(self, folder: Path | None) -> None:
        gc.collect()
        self._fds = os.listdir("/proc/self/fd")
        self._maps = [mapped(reserved=kept) for kept in (False, True)]
        self.client = swapd_client.connect(folder, label=LABEL, disabled=folder is None)
        self.tensors = {name: torch.full((SIZE,), 1.0) for name in ("clean", "mutable", "held")}
        for name, tensor in self.tensors.items():
            self.client.register(name, {"w": tensor}, mutable=name != "clean")
        self.client.register_scratch("scratch", 4096)
        self.client.register("dropped", {"w": torch.ones(SIZE)}, part_of="family")
        self.client.acquire_workspace("1MiB").release()
        self.lease = self.client.acquire("held")
        with self.client.acquire("mutable", "clean"):
            self.tensors["mutable"].fill_(2.0)
        self.tensors["held"].fill_(2.0)
        self.at = {name: tensor.data_ptr() for name, tensor in self.tensors.items()}

    def assert_closed(self, *, keep: bool = True) -> None:
        """Its tensors are private memory with the last bytes, and nothing else is left."""
        forget()
        assert not self.client.session.components
        for name, tensor in self.tensors.items() if keep else ():
            assert torch.all(tensor == (1.0 if name == "clean" else 2.0)), name
            tensor.fill_(3.0)
            assert tensor.data_ptr() == self.at[name]
            del tensor
        gc.collect()
        assert os.listdir("/proc/self/fd") == self._fds
        client = weakref.ref(self.client)
        del self.client, self.lease
        self.tensors.clear()
        gc.collect()
        assert client() is None
        assert mapped(reserved=keep) <= self._maps[keep]


def mapped(*, reserved: bool) -> set[str]:
    """The mappings of the daemon's memory, and of nothing, which tensors without bytes need."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {
        line
        for line in lines
        if "memfd:swapd" in line or (reserved and re.search(r"0000-\w+00000 ---p .* 0 $", line))
    }


@pytest.mark.parametrize("keep", [True, False])
def test_after_an_interrupted_close_one_more_ends_it(
    daemon: Spawned, other: Client, keep: bool
) -> None:
    for _ in range(2):
        opened = Opened(daemon.folder)
        found = places(partial(opened.client.close, keep=keep), MOST)
        opened.assert_closed(keep=keep)
    for place in found:
        opened = Opened(daemon.folder)
        interrupt(partial(opened.client.close, keep=keep), place)
        opened.client.close(keep=keep)
        assert_ended(other)
        opened.assert_closed(keep=keep)


def test_what_an_interrupted_block_leaves_ends_with_the_client(
    daemon: Spawned, other: Client
) -> None:
    """The close at the end of a `with` block was interrupted, and nobody calls it again."""

    def block(opened: Opened) -> None:
        with opened.client:
            opened.lease.release()

    found = places(partial(block, Opened(daemon.folder)), MOST // 2)
    settle()
    for place in found:
        opened = Opened(daemon.folder)
        tensors, at = opened.tensors, opened.at
        interrupt(partial(block, opened), place)
        del opened
        forget()
        settle()
        assert_ended(other)
        for name, tensor in tensors.items():
            assert torch.all(tensor == (1.0 if name == "clean" else 2.0)), name
            assert tensor.data_ptr() == at[name]


async def test_after_a_cancelled_close_one_more_ends_it(daemon: Spawned, other: Client) -> None:
    fds = os.listdir("/proc/self/fd")
    tensor = torch.ones(SIZE)

    async def close() -> None:
        client = await swapd_client.connect_async(daemon.folder, label=LABEL)
        clients.append(client)
        await client.register("clean", {"w": tensor})
        await client.close()

    clients: list[AsyncClient] = []
    async for _ in each_cancelled(close):
        while clients:
            await clients.pop().close()
        assert_ended(other)
        assert torch.equal(tensor, torch.ones(SIZE))
        gc.collect()
        assert os.listdir("/proc/self/fd") == fds


def assert_ended(other: Client) -> None:
    status = other.status()
    assert LABEL not in [session.label for session in status.sessions]
    assert not status.components
