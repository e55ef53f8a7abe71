"""Replicas share one host copy, however they were registered, and only if every byte is equal."""

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import swapd_client
from swapd import spawn
from swapd_client import Client

MIB = 1 << 20
ITEMS = 1 << 20
NBYTES = 4 * ITEMS  # of float32


@pytest.fixture
def clients(daemon: spawn.Spawned) -> Iterator[list[Client]]:
    made = [swapd_client.connect(daemon.folder) for _ in range(4)]
    yield made
    for client in made:
        client.close()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))


def values() -> torch.Tensor:
    return torch.randn(ITEMS, generator=torch.Generator().manual_seed(0))


def host_bytes(clients: list[Client]) -> int:
    return clients[0].status().host_copy_bytes


@pytest.mark.parametrize("how", ["register", "attach", "buffers"])
def test_four_replicas_have_one_host_copy(clients: list[Client], how: str) -> None:
    models = [model() for _ in clients]
    sizes = []
    for i, (client, one) in enumerate(zip(clients, models, strict=True)):
        match how:
            case "register":
                client.register(f"replica-{i}", one)
            case "attach":
                client.attach({f"replica-{i}": one})
            case "buffers":
                client.register(f"replica-{i}", {"x": b"".join([b"swapd"] * MIB)})
        sizes.append(host_bytes(clients))
    assert sizes == sizes[:1] * len(clients)
    if how == "buffers":
        return
    x = torch.randn(1, 1024)
    with torch.inference_mode():
        expected = model()(x)
        for i, (client, one) in enumerate(zip(clients, models, strict=True)):
            if how == "register":
                with client.acquire(f"replica-{i}"):
                    assert torch.equal(one(x), expected)
            else:
                assert torch.equal(one(x), expected)
    clients[0].close()
    assert host_bytes(clients[1:]) == sizes[0], "the others have it still"


@pytest.mark.parametrize("at", [0, ITEMS // 3 + 7, ITEMS - 1])
def test_one_other_item_anywhere_is_another_content(clients: list[Client], at: int) -> None:
    first, second = values(), values()
    second[at] += 1
    clients[0].register("first", {"x": first})
    clients[1].register("second", {"x": second})
    assert host_bytes(clients) == 2 * NBYTES
    for client, name, tensor in ((clients[0], "first", first), (clients[1], "second", second)):
        with client.acquire(name):
            assert bool(tensor[at] == values()[at] + (name == "second"))


def test_mutable_parts_and_updates_stay_their_own(clients: list[Client]) -> None:
    tensors = [values() for _ in range(4)]
    for i in (0, 1):
        clients[i].register(f"mutable-{i}", {"x": tensors[i]}, mutable=True)
    assert host_bytes(clients) == 2 * NBYTES
    for i in (2, 3):
        clients[i].register(f"clean-{i}", {"x": tensors[i]})
    assert host_bytes(clients) == 3 * NBYTES
    clients[2].update("clean-2", {"x": torch.zeros(ITEMS)})
    with clients[3].acquire("clean-3"):
        assert torch.equal(tensors[3], values())
    with clients[2].acquire("clean-2"):
        assert not tensors[2].any()
    with clients[0].acquire("mutable-0"):
        tensors[0].fill_(1)
    with clients[1].acquire("mutable-1"):
        assert torch.equal(tensors[1], values())


def test_no_descriptor_is_left_of_one_that_was_not_shared(clients: list[Client]) -> None:
    first, second = values(), values()
    second[ITEMS // 3 + 7] += 1
    clients[0].register("first", {"x": first})
    clients[1].register("second", {"x": second})
    clients[1].unregister("second")
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        clients[1].register("second", {"x": second})
        clients[1].unregister("second")
    assert len(os.listdir("/proc/self/fd")) == files
