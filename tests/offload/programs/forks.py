"""A client that forks, and objects that its child drops.

`python forks.py CASE FOLDER ...` runs the function CASE with the daemon in FOLDER.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from swapd.shared import vm
from swapd.shared.board import BOARD_BYTES, Boards
from swapd.shared.fds import OwnedFd
from swapd_client import Client, ClientClosed, connect, finalizers
from swapd_client.leases import cache
from swapd_client.offload.attachment import ONE_AT_A_TIME
from swapd_client.session import channel
from tests.offload.modules import TOKENS, Encoder, evict, seeded
from tests.threads import started


def in_a_child(run: Callable[[], None]) -> None:
    """Fork; the child must run this, and end, within 20 s."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        status = 1
        try:
            run()
            status = 0
        except BaseException:  # noqa: BLE001 - the parent sees the status
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0, os.waitstatus_to_exitcode(status)


def mapped(address: int, nbytes: int) -> Any:
    """Other memory at the address, with known bytes."""
    vm.map_anonymous(nbytes, at=address)
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    ctypes.memset(address, 7, nbytes)
    return memory


def held(client: Client) -> dict[str, int]:
    return {c.name: c.leases for c in client.status().components if c.leases}


def a_client_dropped(folder: str) -> None:
    client = connect(folder, label="child")
    component = client.register("a", {"x": bytes(1 << 20)})
    boards = Boards()

    def drop() -> None:
        nonlocal client, component, boards
        addresses = client.session._board.address, boards.board.address
        others = [mapped(address, BOARD_BYTES) for address in addresses]
        del client, component, boards
        gc.collect()
        for other in others:
            assert bytes(other) == bytes([7]) * BOARD_BYTES

    in_a_child(drop)
    with client.acquire("a"):
        assert held(client) == {"a": 1}
    boards.close()
    client.close()


def a_board_at_exit(folder: str) -> None:
    client = connect(folder, label="child")
    board = client.session._board
    registry: dict[Any, Any] = vars(weakref.finalize)["_registry"]
    at_exit = [f for f, info in registry.items() if info.atexit]
    assert not [f for f in at_exit if f.peek()[0] is board]
    client.close()


def copies_of_weights(folder: str) -> None:
    client = connect(folder, label="child")
    model = seeded(Encoder)
    expected = model.norm.weight.clone()
    client.attach({"text": model})
    state = model.state_dict()
    address = state["norm.weight"].untyped_storage().data_ptr()

    def drop() -> None:
        nonlocal state
        assert torch.equal(state["norm.weight"], expected)
        state["norm.weight"].zero_()
        del state
        gc.collect()
        page = address // vm.PAGE_BYTES * vm.PAGE_BYTES
        others = mapped(page, vm.PAGE_BYTES)
        gc.collect()
        assert bytes(others) == bytes([7]) * vm.PAGE_BYTES

    in_a_child(drop)
    assert torch.equal(state["norm.weight"], expected)
    client.close()


def a_descriptor_dropped(folder: str) -> None:
    client = connect(folder, label="child")
    fd = OwnedFd(os.open("/dev/null", os.O_RDONLY))

    def drop() -> None:
        nonlocal fd, client
        numbers = range(3, 256)
        os.closerange(3, 256)
        for number in numbers:
            os.dup2(2, number)
        del fd, client
        gc.collect()
        for number in numbers:
            os.fstat(number)

    in_a_child(drop)
    fd.close()
    client.close()


class Stop(nn.Module):
    """A layer that reports that it was reached, and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside.set()
        self.go_on.wait()
        return x


def held_by_a_thread(folder: str, options: dict[str, Any], in_use: bool) -> None:
    client = connect(folder, label="child")
    model, stop = seeded(Encoder), Stop()
    expected = model(TOKENS)
    model.layers.insert(1, stop)
    attachment = client.attach({"text": model}, **options)
    stop.go_on.set()
    assert torch.equal(model(TOKENS), expected)
    stop.go_on.clear()
    stop.inside.clear()
    outputs = []

    def work() -> None:
        with torch.no_grad():
            if not in_use:
                outputs.append(model(TOKENS))
                return
            with attachment.use("text"):
                outputs.append(model(TOKENS))

    thread = started(work)
    stop.inside.wait()
    before = held(client)
    assert before
    end_children_that_speak()
    in_a_child(forked_in_the_midst)
    assert held(client) == before
    stop.go_on.set()
    thread.join()
    assert torch.equal(outputs[0], expected)
    evict(client, *(c.name for c in client.status().components))
    assert torch.equal(model(TOKENS), expected)
    assert held(client) == {}
    client.close()


def end_children_that_speak() -> None:
    """Leases of another thread end as a child begins, before it can send anything."""
    mine = os.getpid()

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if os.getpid() != mine:
                os.write(2, b"the child speaks for its parent\n")
                os._exit(3)
            return original(*args, **options)

        setattr(owner, name, watched)

    for name in ("send", "call", "abandon"):
        watch(channel.Channel, name)
    watch(cache.Cache, "each")


def while_a_thread_attaches(folder: str) -> None:
    client, stop = connect(folder, label="child"), Stop()
    model = nn.Sequential(nn.Linear(4, 4), stop)
    call = started(model, torch.ones(1, 4))
    stop.inside.wait()
    attach = started(client.attach, {"text": model})
    while ONE_AT_A_TIME.acquire(blocking=False):
        ONE_AT_A_TIME.release()

    def attach_another() -> None:
        other = seeded(Encoder)
        with connect(folder, label="grandchild") as mine, mine.attach({"a": other}):
            other(TOKENS)

    in_a_child(attach_another)
    stop.go_on.set()
    call.join()
    attach.join()
    client.close()


def detached_in_the_child(folder: str) -> None:
    client, model = connect(folder, label="child"), seeded(Encoder)
    expected = model(TOKENS)
    attachment = client.attach({"text": model})

    def detach() -> None:
        with attachment:
            with pytest.raises(ClientClosed, match="weights stay with the parent"):
                attachment.detach()
            with pytest.raises(ClientClosed, match="weights stay with the parent"):
                model(TOKENS)

    in_a_child(detach)
    attachment.detach()
    assert torch.equal(model(TOKENS), expected)
    client.close()


def forked_in_the_midst() -> None:
    assert not [t for t in threading.enumerate() if t is not threading.current_thread()]


def whole(folder: str) -> None:
    held_by_a_thread(folder, {}, in_use=False)


def streamed_all_in(folder: str) -> None:
    held_by_a_thread(folder, {"blocks": ["layers"], "resident": None}, in_use=False)


def streamed(folder: str) -> None:
    held_by_a_thread(folder, {"blocks": ["layers"], "resident": 0}, in_use=False)


def in_use(folder: str) -> None:
    held_by_a_thread(folder, {}, in_use=True)


class Steps(Encoder):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor | None]:  # type: ignore[override]
        yield super().forward(x)
        yield None


def a_lease_and_a_generator_dropped(folder: str) -> None:
    client = connect(folder, label="child")
    model = seeded(Steps)
    client.attach({"text": model})
    steps = model(TOKENS)
    next(steps)
    client.register("a", {"x": bytes(1 << 20)})
    lease = client.acquire("a")
    before = held(client)
    assert before == {"text": 1, "a": 1}

    def drop() -> None:
        nonlocal steps, lease
        warnings.simplefilter("error")
        with warnings.catch_warnings(record=True) as said:
            del lease, steps
            gc.collect()
        assert not said, said
        assert finalizers._collected.queue.empty()

    in_a_child(drop)
    assert held(client) == before
    lease.release()
    steps.close()
    assert held(client) == {}
    client.close()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    globals()[sys.argv[1]](sys.argv[2])
