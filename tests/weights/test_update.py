"""New values for clean components: all of them or none, and every later acquire sees them."""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import nn

import swapd_client
from swapd import spawn
from swapd.shared import protocol
from swapd.shared.fds import OwnedFd
from swapd_client import (
    Client,
    ClientClosed,
    InUse,
    InvalidArgument,
    InvalidSource,
    OutOfMemory,
    UnknownComponent,
)
from swapd_client.leases.leases import Leases
from swapd_client.leases.record import Record
from swapd_client.memory.part import Part
from swapd_client.weights import update
from tests import served
from tests.processes import line_of, start_python
from tests.threads import started

MIB = 1 << 20


@pytest.fixture(params=["strict", "relaxed"])
def daemon(request: pytest.FixtureRequest) -> Iterator[spawn.Spawned]:
    with spawn.daemon(budget="64MiB", isolation=request.param) as daemon:
        yield daemon


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))


def copies(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def seen(client: Client, name: str, module: nn.Module) -> dict[str, torch.Tensor]:
    """A component's values under a lease."""
    with client.acquire(name):
        return copies(module)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def await_host_copies(client: Client, nbytes: int) -> None:
    """Wait until the daemon has this many bytes of host copies: it drops them in its own time."""
    while client.status().host_copy_bytes != nbytes:
        pass


# --- visible values ----------------------------------------------------------------------


@pytest.mark.parametrize("resident", [True, False])
def test_the_next_acquire_sees_the_new_values(client: Client, resident: bool) -> None:
    module, new = model(), copies(model(1))
    client.register("talker", module)
    addresses = [p.data_ptr() for p in module.parameters()]
    if resident:
        seen(client, "talker", module)
    client.update("talker", new)
    assert same(seen(client, "talker", module), new)
    assert [p.data_ptr() for p in module.parameters()] == addresses


def test_updates_follow_each_other(client: Client) -> None:
    module = model()
    client.register("talker", module)
    client.update("talker", {"0.bias": torch.ones(32)})
    client.update("talker", {"2.bias": torch.ones(16)})
    values = seen(client, "talker", module)
    assert values["0.bias"].eq(1).all()
    assert values["2.bias"].eq(1).all()
    await_host_copies(client, client.session.components["talker"].nbytes)


def test_whoever_holds_it_goes_on_with_the_old_values(client: Client) -> None:
    module = model()
    old, new = copies(module), copies(model(1))
    client.register("talker", module)
    lease = client.acquire("talker")
    client.update("talker", new)
    assert same(copies(module), old)
    with client.acquire("talker"):  # its session holds it
        assert same(copies(module), old)
    lease.release()
    assert same(seen(client, "talker", module), new)


def test_a_holder_in_another_process_keeps_it_in_until_it_releases(
    daemon: spawn.Spawned, client: Client
) -> None:
    module, new = model(), copies(model(1))
    client.register("talker", module)
    with swapd_client.connect(daemon.folder) as other:
        lease = other.acquire("talker")
        client.update("talker", new)
        done = []
        asking = started(lambda: done.append(seen(client, "talker", module)))
        while not client.status().waiting:
            pass
        assert not done
        lease.release()
        asking.join()
    assert same(done[0], new)


def test_a_loop_that_keeps_its_lease_sees_them_once_the_update_returns(client: Client) -> None:
    """A lingering lease is not used again."""
    module = model()
    client.register("talker", module)
    updated = threading.Event()
    going = threading.Event()
    late: list[float] = []
    failed: list[BaseException] = []

    def loop() -> None:
        try:
            after = 0
            while after < 50:
                is_after = updated.is_set()
                with client.acquire("talker"):
                    value = module[0].bias[0].item()  # type: ignore[index]
                if is_after:
                    late.append(value)
                    after += 1
                going.set()
        except BaseException as exc:  # noqa: BLE001 - for the thread that waits
            failed.append(exc)
            going.set()

    looping = started(loop)
    going.wait()
    client.update("talker", {"0.bias": torch.full((32,), 7.0)})
    updated.set()
    looping.join()
    assert not failed
    assert set(late) == {7.0}


def test_a_lease_granted_before_an_update_and_heard_of_after_it_does_not_linger(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.register("raw", {"a": b"x"})
    add = Leases.add

    def late(leases: Leases, record: Record) -> None:
        monkeypatch.undo()
        client.update("raw", {"a": b"y"})
        add(leases, record)

    monkeypatch.setattr(Leases, "add", late)
    with client.acquire("raw") as lease:
        assert lease._record.outdated
    with client.acquire("raw") as lease:
        assert not lease._record.outdated


def test_tied_parameters_go_by_either_name(client: Client) -> None:
    embed, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embed.weight
    client.register("tied", nn.ModuleDict({"embed": embed, "head": head}))
    new = torch.randn(16, 8)
    client.update("tied", {"head.weight": new})
    with client.acquire("tied"):
        assert torch.equal(embed.weight, new)


def test_values_are_written_in_the_strides_there_are(client: Client) -> None:
    base = torch.zeros(8, 6)
    tensors = {"turned": base.t(), "row": base[3]}
    client.register("views", tensors)
    new = torch.randn(6, 8)
    client.update("views", {"turned": new})
    with client.acquire("views"):
        assert torch.equal(tensors["turned"], new)
        assert torch.equal(tensors["row"], new[:, 3])


def test_buffers_go_by_their_names(client: Client) -> None:
    part = client.register("raw", {"a": b"old", "b": b"stays"})
    client.update("raw", {"a": b"new"})
    with client.acquire("raw"):
        assert bytes(part.view("a")) + bytes(part.view("b")) == b"newstays"
    with pytest.raises(InvalidSource, match="has 4 bytes"):
        client.update("raw", {"a": b"long"})


# --- families ----------------------------------------------------------------------------


def family(client: Client) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    module = model()
    parts = {
        "rest": {"0.bias": module[0].bias, "2.bias": module[2].bias},  # type: ignore[index]
        "0": {"weight": module[0].weight},  # type: ignore[index]
        "2": {"weight": module[2].weight},  # type: ignore[index]
    }
    client.register_family("dit", parts)
    return module, copies(model(1))


def test_each_part_of_a_family_gets_its_share(client: Client) -> None:
    module, new = family(client)
    client.update("dit", new)
    assert same(seen(client, "dit", module), new)


def test_of_a_family_nobody_sees_a_part_that_is_new_beside_one_that_is_old(
    client: Client,
) -> None:
    module, _ = family(client)
    over = threading.Event()
    mixed: list[set[float]] = []
    failed: list[BaseException] = []

    def look() -> None:
        try:
            while not over.is_set():
                with client.acquire("dit"):
                    values = {p.flatten()[0].item() for p in module.parameters()}
                if len(values) > 1:
                    mixed.append(values)
        except BaseException as exc:  # noqa: BLE001 - for the thread that waits
            failed.append(exc)

    names = [name for name, _ in module.named_parameters()]
    shapes = {name: p.shape for name, p in module.named_parameters()}
    client.update("dit", {name: torch.zeros(shapes[name]) for name in names})
    looking = started(look)
    for i in range(1, 20):
        client.update("dit", {name: torch.full(shapes[name], float(i)) for name in names})
    over.set()
    looking.join()
    assert not failed
    assert not mixed


def test_of_a_family_nothing_changes_if_one_value_does_not_fit(client: Client) -> None:
    module, new = family(client)
    old = seen(client, "dit", module)
    with pytest.raises(InvalidSource, match=r"weight.*\(3,\)"):
        client.update("dit", {**new, "2.weight": torch.zeros(3)})
    with pytest.raises(InvalidSource, match="in several: dit/0, dit/2"):
        client.update("dit", {"weight": new["0.weight"]})
    with pytest.raises(InvalidSource, match="'nobody' is in none"):
        client.update("dit", {"nobody": new["0.weight"]})
    assert same(seen(client, "dit", module), old)


# --- all or nothing ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"0.bias": torch.zeros(31)}, r"'0\.bias' is \(31,\)"),
        ({"0.bias": torch.zeros(32, dtype=torch.float64)}, "float64"),
        ({"0.bias": torch.zeros(32, device="meta")}, "meta"),
        ({"0.bias": torch.ones(32).to_sparse()}, "is torch.sparse_coo, and dense in the component"),
        ({"0.bias": torch.nested.nested_tensor([torch.ones(32)], layout=torch.jagged)}, "nested"),
        ({"0.bias": [0.0] * 32}, "is a list"),
        ({"0.bia": torch.zeros(32)}, r"no tensor '0\.bia'; did you mean '0\.bias'"),
    ],
)
def test_a_value_that_does_not_fit_changes_nothing(
    client: Client, values: dict[str, torch.Tensor], said: str
) -> None:
    module = model()
    old = copies(module)
    client.register("talker", module)
    with pytest.raises(InvalidSource, match=said):
        client.update("talker", {"2.bias": torch.ones(16), **values})
    assert same(seen(client, "talker", module), old)


class Breaks(torch.Tensor):
    """A value of the right shape that cannot be copied."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.copy_:
            raise RuntimeError("broken")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_an_update_that_fails_halfway_leaves_nothing(client: Client) -> None:
    module = model()
    old = copies(module)
    client.register("talker", module)
    for _ in range(2):  # and another may begin
        with pytest.raises(RuntimeError, match="broken"):
            client.update(
                "talker",
                {"0.bias": torch.ones(32), "2.bias": torch.ones(16).as_subclass(Breaks)},
            )
    assert same(seen(client, "talker", module), old)
    await_host_copies(client, client.session.components["talker"].nbytes)
    client.update("talker", {"0.bias": torch.ones(32)})
    assert same(seen(client, "talker", module), {**old, "0.bias": torch.ones(32)})


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_is_interrupted_at_the_commit_knows_which_bytes_it_has(
    daemon: spawn.Spawned, when: str
) -> None:
    module = model()
    old, new = copies(module), copies(model(1))
    with swapd_client.connect(daemon.folder) as client:
        client.register("talker", module)

        def call(request: protocol.AnyRequest) -> protocol.AnyReply:
            is_commit = isinstance(request, protocol.Commit)
            if is_commit and when == "before":
                raise KeyboardInterrupt
            reply = client.leasing.call(request)
            if is_commit:
                raise KeyboardInterrupt
            return reply

        with pytest.raises(KeyboardInterrupt):
            update.together(client.session, call, {"talker": new})
        expected = old if when == "before" else new
        assert same(seen(client, "talker", module), expected)
        await_host_copies(client, client.session.components["talker"].nbytes)
    assert same(copies(module), expected), "private memory has the same"


def test_no_room_for_a_second_master_changes_nothing() -> None:
    with served.alone(budget="16MiB", host_memory="5MiB") as (_, client):
        part = client.register("raw", {"a": bytes(4 * MIB)})
        with pytest.raises(OutOfMemory):
            client.update("raw", {"a": bytes([1]) * (4 * MIB)})
        with client.acquire("raw"):
            assert part.view("a")[0] == 0


def test_who_may_not_update_is_told(daemon: spawn.Spawned, client: Client) -> None:
    client.register("m", {"a": b"x"}, mutable=True)
    with pytest.raises(InvalidArgument, match="under a lease"):
        client.update("m", {"a": b"y"})
    with pytest.raises(UnknownComponent):
        client.update("nobody", {"a": b"y"})


def test_one_update_at_a_time(client: Client) -> None:
    client.register("raw", {"a": b"x"})
    other = client.session.next_id()
    client.leasing.call(protocol.Update(other, "raw"))
    with pytest.raises(InUse, match="being updated"):
        client.update("raw", {"a": b"y"})
    with pytest.raises(InUse, match="being updated"):
        client.unregister("raw")
    client.leasing.call(protocol.GiveUp(client.session.next_id(), "raw", other))
    client.update("raw", {"a": b"y"})


def test_an_update_that_has_just_taken_place_is_not_lost_if_another_thread_unregisters(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, new = model(), copies(model(1))
    client.register("talker", module)
    renewing, go_on, renew = Event(), Event(), client.session.renew

    def late(part: Part, master: OwnedFd) -> None:
        renewing.set()
        go_on.wait()
        renew(part, master)

    monkeypatch.setattr(client.session, "renew", late)
    with ThreadPoolExecutor(1) as threads:
        updating = threads.submit(client.update, "talker", new)
        renewing.wait()
        try:
            with pytest.raises(InUse, match="updated or unregistered by another thread"):
                client.unregister("talker")
        finally:
            go_on.set()
        updating.result()
    client.unregister("talker")
    assert same(copies(module), new)


def test_an_update_that_has_just_taken_place_as_another_thread_closes_leaves_no_descriptor(
    daemon: spawn.Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = swapd_client.connect(daemon.folder)
    client.register("raw", {"a": b"x"})
    masters, renew = list[OwnedFd](), client.session.renew

    def late(part: Part, master: OwnedFd) -> None:
        client.close()
        masters.append(master)
        renew(part, master)

    monkeypatch.setattr(client.session, "renew", late)
    with pytest.raises(ClientClosed):
        client.update("raw", {"a": b"y"})
    with pytest.raises(ValueError, match="closed"):
        masters[0].fileno()


def test_of_a_client_killed_in_the_middle_nothing_is_left(
    daemon: spawn.Spawned, client: Client
) -> None:
    program = Path(__file__).parent / "programs" / "half_updated.py"
    with start_python(program, daemon.folder) as worker:
        assert line_of(worker) == "begun\n"
        assert client.status().host_copy_bytes == 2 * MIB
        with pytest.raises(UnknownComponent):
            client.update("raw", {})
        worker.send_signal(signal.SIGKILL)
    while len(client.status().sessions) > 1:
        pass
    await_host_copies(client, 0)
