"""Each step of a component's life may be refused by the system once; nothing of it is left then."""

import errno
import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from swapd.shared import vm
from swapd_client import Client, SwapdError, UnknownComponent, connect
from tests.guarantees.harness import World

MIB = 1 << 20
#: The calls that reserve addresses and map memory there.
STEPS = ("reserve", "map_shared", "map_private", "move_pages")
NEVER = 1000


def life(client: Client) -> None:
    """Register, acquire, update, evict and unregister one component."""
    tensors = {"w": torch.full((MIB,), 3, dtype=torch.uint8)}
    client.register("a", tensors)
    with client.acquire("a"):
        assert int(tensors["w"][-1]) == 3
    client.update("a", {"w": torch.full((MIB,), 5, dtype=torch.uint8)})
    with client.acquire("a"):
        assert int(tensors["w"][-1]) == 5
    with client.acquire("filler"):
        pass
    with client.acquire("a"):
        assert int(tensors["w"][-1]) == 5
    client.unregister("a")
    assert int(tensors["w"][-1]) == 5


def is_mapped(start: int, nbytes: int) -> bool:
    """Whether this process has anything in that range of addresses."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(word, 16) for word in line.split()[0].split("-"))
        if first < start + nbytes and start < end:
            return True
    return False


@pytest.mark.parametrize("step", STEPS)
def test_what_the_system_refuses_once_leaves_nothing_and_can_be_done_again(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    daemon = world.daemon(budget="4MiB")
    left = NEVER
    taken: list[tuple[int, int]] = []
    reserve, refusable = vm.reserve, getattr(vm, step)

    def reserve_and_note(nbytes: int) -> int:
        taken.append((reserve(nbytes), nbytes))
        return taken[-1][0]

    def refuse_once(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.ENOMEM, "no memory, for once")
        return (reserve_and_note if step == "reserve" else refusable)(*args, **options)

    monkeypatch.setattr(vm, "reserve", reserve_and_note)
    monkeypatch.setattr(vm, step, refuse_once)
    with connect(daemon.folder) as client:
        client.register("filler", {"w": torch.zeros(3 * MIB, dtype=torch.uint8)})
        life(client)
        steps = NEVER - left
        assert steps > 0
        for number in range(1, steps + 1):
            taken.clear()
            left = number
            with suppress(SwapdError, OSError):
                life(client)
            left = NEVER
            with suppress(UnknownComponent):
                client.unregister("a")
            gc.collect()
            assert not [each for each in taken if is_mapped(*each)], f"refused call {number}"
            life(client)
