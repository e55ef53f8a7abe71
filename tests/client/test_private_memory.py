"""The private memory of a former component is freed with its last tensor."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import swapd_client
from swapd import spawn
from swapd.shared import vm
from swapd_client import Client
from swapd_client.memory import ranges

SIZE = 1 << 16


@pytest.fixture
def client() -> Iterator[Client]:
    with spawn.daemon(budget="16MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        yield client


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines)
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def refusing(address: int) -> Callable[[int, int], int]:
    """munmap as the system answers it when the process has as many mappings as it may."""
    unmap = vm.unmap
    return lambda at, nbytes: -1 if at == address else unmap(at, nbytes)


@pytest.mark.parametrize("last", ["before", "after"])
def test_memory_that_the_system_does_not_unmap_is_unmapped_when_it_does(
    client: Client, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Its last tensor goes before or after the client is closed; neither of the two raises."""
    tensors = [torch.full((SIZE,), 7.0) for _ in range(2)]
    addresses = [client.register(f"{i}", {"x": t}).address for i, t in enumerate(tensors)]
    with monkeypatch.context() as patch:
        patch.setattr(vm, "unmap", refusing(addresses[0]))
        if last == "before":
            del tensors[0]
        client.close()
        del tensors[:-1]
        assert is_mapped(addresses[0])
    assert torch.equal(tensors[0], torch.full((SIZE,), 7.0))
    tensors.clear()  # with this memory the client tries to free the other, too
    assert not any(map(is_mapped, addresses))


def test_nothing_is_kept_of_memory_that_is_freed(client: Client) -> None:
    tensor = torch.full((SIZE,), 7.0)
    client.register("a", {"x": tensor})
    where = weakref.ref(client.session.components["a"].where)
    client.close()
    assert where() is not None
    del tensor
    gc.collect()
    assert where() is None


def test_nothing_is_kept_of_what_was_freed_before_its_session_ended() -> None:
    with swapd_client.connect(disabled=True) as client:
        client.register("x", {"x": torch.ones(SIZE)})  # the tensor is gone now
        place = weakref.ref(client.session.own("x").where)
    del client
    gc.collect()
    assert place() is None


def test_a_range_that_a_close_let_go_of_is_freed_with_its_last_tensor(client: Client) -> None:
    """Until then nobody else has its addresses; then they are free for anything."""
    tensors = [torch.full((SIZE,), 7.0) for _ in range(2)]
    addresses = [client.register(f"{i}", {"x": t}).address for i, t in enumerate(tensors)]
    view = tensors[0][1:]
    client.close(keep=False)
    del tensors[:]
    assert list(map(is_mapped, addresses)) == [True, False]
    assert ranges.find(addresses[1], SIZE) is None
    assert ranges.find(addresses[0], SIZE) is not None
    del view
    assert not is_mapped(addresses[0])
    assert ranges.find(addresses[0], SIZE) is None
