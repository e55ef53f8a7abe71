"""Components that lost their daemon rejoin the next: at the same addresses, with the same bytes."""

import ctypes
import gc
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from swapd.shared import vm
from swapd_client import (
    Client,
    ClientClosed,
    DaemonGone,
    DuplicateName,
    InvalidSource,
    OutOfMemory,
    TooLarge,
)
from swapd_client.memory.part import Part
from swapd_client.registration import register_again
from tests.guarantees.harness import MIB, WorkerDied, World
from tests.lives import Lives, living


@pytest.fixture
def life() -> Iterator[Lives]:
    with living(reconnect=0) as made:
        yield made


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return {name: torch.randn(512, 1024, generator=numbers) for name in ("a", "b", "c")}


def addresses(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors.values()]


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def swap_out(client: Client, name: str) -> None:
    """Evict the component, and put other bytes in its place."""
    if "filler" not in client.session.components:
        client.register("filler", {"x": b"\xff" * (16 * MIB)})
    client.acquire("filler").release()
    assert {c.name: c.state for c in client.status().components}[name] == "absent"


@pytest.mark.parametrize("when", ["before", "after"])
def test_where_a_component_was_that_is_freed_is_no_place_to_take_back(
    life: Lives, when: str
) -> None:
    """Other code may have its memory there by now."""
    tensor = torch.zeros(MIB, dtype=torch.uint8)
    life.client.register("a", {"a": tensor})
    where = tensor.data_ptr()
    if when == "before":
        del tensor
    client = life.again()
    if when == "after":
        del tensor
    gc.collect()
    vm.map_anonymous(MIB, at=where)
    others = torch.frombuffer((ctypes.c_ubyte * MIB).from_address(where), dtype=torch.uint8)
    client.register("b", {"b": others})
    assert others.data_ptr() != where


def test_addresses_and_bytes_are_the_same_and_it_is_swapped_again(life: Lives) -> None:
    tensors = values()
    life.client.register("a", tensors)
    before = addresses(tensors)
    for _ in range(3):
        client = life.again()
        assert same(tensors, values()), "private memory"
        part = client.register("a", tensors)
        assert addresses(tensors) == before
        assert part.address == min(before)
        for _ in range(2):
            with client.acquire("a"):
                assert same(tensors, values())
            swap_out(client, "a")
    life.lose()
    assert same(tensors, values())
    assert addresses(tensors) == before


def test_segments_arrive_in_their_order_or_it_moves(life: Lives) -> None:
    tensors = values()
    life.client.register("a", tensors, segments=[["a"], ["b"], ["c"]])
    before = addresses(tensors)
    client = life.again()
    part = client.register("a", tensors, segments=[["a", "b"], ["c"]])
    assert part.segments == 2
    assert addresses(tensors) == before
    with client.acquire("a", early=True) as lease:
        lease.wait(0)
        assert torch.equal(tensors["a"], values()["a"])
        lease.wait(1)
        assert torch.equal(tensors["c"], values()["c"])
    client = life.again()
    client.register("a", tensors, segments=[["c"], ["a", "b"]])
    assert addresses(tensors) != before, "the last comes first now"
    with client.acquire("a"):
        assert same(tensors, values())


def test_views_and_tied_tensors_stay_what_they_are(life: Lives) -> None:
    model = nn.Module()
    fused = torch.randn(3, 256, 256)
    model.q, model.k = nn.Parameter(fused[0]), nn.Parameter(fused[1].t())
    model.embed = nn.Linear(64, 64, bias=False)
    model.head = nn.Linear(64, 64, bias=False)
    model.head.weight = model.embed.weight
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    life.client.register("a", model)
    before = [tensor.data_ptr() for tensor in model.parameters()]
    storage = model.q.untyped_storage().data_ptr()
    client = life.again()
    outside = model.q.detach()[3:5]
    client.register("a", model)
    assert [tensor.data_ptr() for tensor in model.parameters()] == before
    assert model.q.untyped_storage().data_ptr() == storage
    assert model.k.untyped_storage().data_ptr() == storage
    assert model.head.weight is model.embed.weight
    swap_out(client, "a")
    with client.acquire("a"):
        assert same(dict(model.named_parameters()), {k: wanted[k] for k in ("q", "k")})
        assert torch.equal(model.head.weight, wanted["embed.weight"])
        assert torch.equal(outside, wanted["q"][3:5]), "it shares the memory, as before"


def test_a_part_of_what_it_was_moves(life: Lives) -> None:
    """Other code may use the rest of the memory."""
    tensors = values()
    life.client.register("a", tensors)
    client = life.again()
    some = {name: tensors[name] for name in ("a", "b")}
    before = addresses(some)
    client.register("a", some)
    assert addresses(some) != before
    assert torch.equal(tensors["c"], values()["c"])


def test_what_was_taken_back_while_the_daemon_lives_is_the_caller_s_own(life: Lives) -> None:
    tensors = values()
    life.client.register("a", tensors)
    life.client.unregister("a")
    kept = tensors["a"].detach()
    life.client.register("a", tensors)
    assert torch.equal(kept, values()["a"]), "without a lease"


def test_a_mutable_one_has_what_was_written_last(life: Lives) -> None:
    tensors = values()
    life.client.register("a", tensors, mutable=True)
    before = addresses(tensors)
    with life.client.acquire("a"):
        tensors["a"].fill_(1)
    client = life.again()
    client.register("a", tensors, mutable=True)
    assert addresses(tensors) == before
    with client.acquire("a"):
        assert bool((tensors["a"] == 1).all())
        tensors["a"].fill_(2)
    swap_out(client, "a")
    with client.acquire("a"):
        assert bool((tensors["a"] == 2).all())
        assert torch.equal(tensors["b"], values()["b"])


def test_what_was_loaded_can_be_loaded_again_or_registered(life: Lives, tmp_path: Path) -> None:
    save_file(values(), tmp_path / "model.safetensors")
    module = nn.Module()
    for name in reversed(values()):
        module.register_parameter(name, nn.Parameter(torch.zeros(512, 1024)))
    life.client.load("a", tmp_path / "model.safetensors", module)
    before = [p.data_ptr() for p in module.parameters()]
    for way in ("load", "register", "load"):
        client = life.again()
        if way == "load":
            client.load("a", tmp_path / "model.safetensors", module)
        else:
            client.register("a", module)
        assert [p.data_ptr() for p in module.parameters()] == before
        swap_out(client, "a")
        with client.acquire("a"):
            assert same(dict(module.named_parameters()), values())


def refuse(*_: object) -> None:
    raise OutOfMemory("injected")


@pytest.mark.parametrize("why", ["too large", "name taken", "no host memory", "killed", "closed"])
def test_if_it_fails_all_is_private_memory_as_before(
    life: Lives, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    tensors, others = values(), values(1)
    life.client.register("a", tensors)
    life.client.register("b", others)
    before = addresses(tensors) + addresses(others)
    parts = life.client.session.registry.all()
    client = life.again(budget="4MiB" if why == "too large" else "16MiB")
    registry = client.session.registry
    fill = registry.fill

    def fill_and(call: Callable[[], None]) -> Callable[[Part], None]:
        def run(part: Part) -> None:
            fill(part)
            call()

        return run

    error: type[Exception] = TooLarge
    if why == "name taken":
        error = DuplicateName
        rival = life.connect()
        rival.register("b", {"x": b"x"})
    elif why == "no host memory":
        error = OutOfMemory
        monkeypatch.setattr(registry, "fill", refuse)
    elif why == "killed":
        error = DaemonGone
        monkeypatch.setattr(registry, "fill", fill_and(life.daemon.kill))
    elif why == "closed":
        error = ClientClosed
        monkeypatch.setattr(registry, "fill", fill_and(client.close))
    with pytest.raises(error):
        register_again(client.leasing, parts)
    assert same(tensors, values())
    assert same(others, values(1))
    assert addresses(tensors) + addresses(others) == before
    tensors["a"].add_(0)  # it is writable
    again = life.again(budget="32MiB")
    register_again(again.leasing, parts)
    assert addresses(tensors) + addresses(others) == before


def test_if_one_would_move_none_is_registered(life: Lives) -> None:
    tensors, others = values(), values(1)
    life.client.register("a", tensors)
    life.client.register("b", others)
    parts = life.client.session.registry.all()
    before = addresses(tensors)
    client = life.again()
    del others
    gc.collect()
    with pytest.raises(InvalidSource, match="'b' cannot keep its address"):
        register_again(client.leasing, parts)
    assert not client.status().components
    assert same(tensors, values())
    client.register("a", tensors)
    assert addresses(tensors) == before


def test_another_thread_may_be_granted_it_before_registering_fails(
    life: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = values()
    life.client.register("a", tensors)
    before = addresses(tensors)
    client = life.again()
    call = client.leasing.call

    def grant_and_kill(request: object, *rest: object) -> object:
        reply = call(request, *rest)  # type: ignore[arg-type]
        if type(request).__name__ == "Commit":
            client.acquire("a").release()
            life.daemon.kill()
            call(request, *rest)  # type: ignore[arg-type]
        return reply

    monkeypatch.setattr(client.leasing, "call", grant_and_kill)
    with pytest.raises(DaemonGone):
        client.register("a", tensors)
    monkeypatch.undo()
    assert same(tensors, values())
    life.again().register("a", tensors)
    assert addresses(tensors) == before


@pytest.mark.parametrize("used", [True, False])
def test_after_it_came_back_a_stray_access_faults_again(world: World, used: bool) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    expected = worker.register_tensor("a", 5 * MIB, seed=1)
    worker.acquire("a")
    address, _ = worker.tensor("a")
    daemon.kill()
    worker.disconnect()
    daemon = world.daemon()
    assert worker.tensor("a") == [address, expected]
    assert worker.register_tensor_again("a") == address
    if used:
        worker.acquire("a")
        assert worker.tensor("a") == [address, expected]
        worker.release("a")
    with pytest.raises(WorkerDied):
        worker.peek("a")
    assert worker.wait() == -signal.SIGSEGV
