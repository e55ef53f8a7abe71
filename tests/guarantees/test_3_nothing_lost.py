"""Guarantee 3: no byte is lost, except by a worker's death, and then swapd reports it."""

import pytest

from tests.guarantees.harness import MIB, Daemon, Worker, WorkerError, World


def evict(daemon: Daemon, other: Worker, name: str, filler: str = "filler") -> None:
    """Have `other` use the whole budget for another component."""
    if filler not in {c.name for c in daemon.status().components}:
        other.register(filler, 16 * MIB, seed=99)
    other.use(filler)
    daemon.await_record("Evicted", name=name)


def test_what_was_written_to_a_mutable_component_survives_eviction(world: World) -> None:
    daemon = world.daemon()
    worker, other = world.workers(daemon, "worker", "other")
    first = worker.register("m", 8 * MIB, seed=1, mutable=True)
    assert worker.use("m")[1] == first
    evict(daemon, other, "m")
    for seed in (2, 3):
        worker.acquire("m")
        address, _ = worker.look("m")
        written = worker.write("m", seed)
        worker.release("m")
        evict(daemon, other, "m")
        assert worker.use("m") == [address, written]


def test_nothing_is_evicted_before_its_write_back_is_complete(world: World) -> None:
    daemon = world.daemon(bandwidth="60MB/s")
    worker, other = world.workers(daemon, "worker", "other")
    worker.register("m", 8 * MIB, mutable=True)
    worker.acquire("m")
    written = worker.write("m", 5)
    worker.release("m")
    evict(daemon, other, "m")

    steps = {"Evict", "SendRevoke", "RevokeAck", "CopyOut", "CopiedOut", "Evicted"}
    daemon.watch.seen("Evicted")
    said = [type(r.event or r.action).__name__ for r in daemon.watch.history]
    order = [kind for kind in said if kind in steps][:6]
    assert order == ["Evict", "SendRevoke", "RevokeAck", "CopyOut", "CopiedOut", "Evicted"]
    assert worker.use("m")[1] == written


def test_a_clean_component_is_never_copied_back(world: World) -> None:
    daemon = world.daemon()
    worker, other = world.workers(daemon, "worker", "other")
    a = worker.register("a", 8 * MIB, seed=1)
    for _ in range(5):
        assert worker.use("a")[1] == a
        evict(daemon, other, "a")
    assert daemon.status().bytes_out == 0


def test_a_worker_that_dies_in_a_lease_loses_its_writes_and_it_is_said(world: World) -> None:
    daemon = world.daemon()
    worker, other = world.workers(daemon, "worker", "other")
    worker.register("m", 8 * MIB, mutable=True)
    b = other.register("b", 16 * MIB, seed=2)
    worker.acquire("m")
    worker.write("m", 5)
    waiting = other.start("acquire", "b")
    daemon.await_record("Waiting", names=("b",))
    worker.kill()
    lost = daemon.await_record("Lost", name="m")
    assert "its writes since the last write-back are gone" in lost.why
    waiting.result()
    assert other.look("b")[1] == b
    assert daemon.status().quarantined_bytes == 0


@pytest.mark.parametrize("where", ["never loaded", "resident", "evicted"])
def test_what_is_taken_back_is_private_memory_with_the_same_bytes_and_address(
    world: World, where: str
) -> None:
    daemon = world.daemon()
    one_by_one, at_once, other = world.workers(daemon, "one by one", "at once", "other")
    expected = {}
    for worker in (one_by_one, at_once):
        for kind in ("clean", "mutable"):
            name = f"{kind} {worker.label}"
            digest = worker.register(name, 4 * MIB, seed=1, mutable=kind == "mutable")
            if where != "never loaded":
                worker.acquire(name)
                if kind == "mutable":
                    digest = worker.write(name, 7)
                worker.release(name)
            expected[worker, name] = [worker.address(name), digest]
    if where == "evicted":
        other.register("filler", 16 * MIB)
        other.use("filler")
        assert {c.name for c in daemon.status().components if c.state == "idle"} == {"filler"}

    for name in ("clean one by one", "mutable one by one"):
        one_by_one.unregister(name)
    at_once.disconnect()
    for (worker, name), before in expected.items():
        assert worker.look(name) == before
        assert worker.write(name, 9) == worker.look(name)[1], "private memory can be written to"
        daemon.await_record("DropHostCopy")
    assert {c.name for c in daemon.status().components} <= {"filler"}


def test_a_registration_that_is_refused_leaves_its_source_and_the_name_alone(
    world: World,
) -> None:
    daemon = world.daemon()
    first, second = world.workers(daemon, "first", "second")
    a = first.register("a", 8 * MIB, seed=1)
    with pytest.raises(WorkerError, match=r"by first \(session") as refused:
        second.register("a", 4 * MIB, seed=2)
    assert refused.value.kind == "DuplicateName"
    with pytest.raises(WorkerError, match="registered by this process") as refused:
        first.register("a", 4 * MIB, seed=2)
    assert refused.value.kind == "DuplicateName"
    assert first.use("a")[1] == a
    b = second.register("b", 4 * MIB, seed=2)
    assert second.use("b")[1] == b


@pytest.mark.parametrize("where", ["held", "released", "evicted", "evicted and back"])
def test_the_daemons_death_loses_nothing_that_was_written(world: World, where: str) -> None:
    """`close` finds the last bytes, on the device or in the host copy."""
    daemon = world.daemon()
    worker, other = world.workers(daemon, "worker", "other")
    worker.register("m", 8 * MIB, mutable=True)
    worker.acquire("m")
    address, _ = worker.look("m")
    written = worker.write("m", 5)
    if where != "held":
        worker.release("m")
    if where.startswith("evicted"):
        evict(daemon, other, "m")
    if where == "evicted and back":
        worker.use("m")
    daemon.kill()
    assert "DaemonGone" in worker.await_end()
    worker.disconnect()
    assert worker.look("m") == [address, written]


def test_a_death_in_the_middle_of_a_write_back_loses_nothing(world: World) -> None:
    """Half of the host copy is outdated then; the worker was not told yet to rely on it."""
    daemon = world.daemon(bandwidth="24MB/s", budget="8MiB")
    worker, other = world.workers(daemon, "worker", "other")
    worker.register("m", 8 * MIB, mutable=True)
    other.register("b", 8 * MIB)
    worker.acquire("m")
    address, _ = worker.look("m")
    written = worker.write("m", 5)
    worker.release("m")
    waiting = other.start("acquire", "b")
    daemon.await_record("CopyOut", name="m")
    daemon.kill()
    with pytest.raises(WorkerError, match="DaemonGone"):
        waiting.result()
    worker.await_end()
    worker.disconnect()
    assert worker.look("m") == [address, written]


@pytest.mark.parametrize("mutable", [False, True], ids=["clean", "mutable"])
def test_a_client_that_is_closed_in_a_lease_gives_it_back_and_keeps_its_bytes(
    world: World, mutable: bool
) -> None:
    daemon = world.daemon()
    worker, other = world.workers(daemon, "worker", "other")
    expected = worker.register("a", 8 * MIB, seed=1, mutable=mutable)
    b = other.register("b", 16 * MIB, seed=2)
    worker.acquire("a")
    if mutable:
        expected = worker.write("a", 5)
    waiting = other.start("acquire", "b")
    daemon.await_record("Waiting", names=("b",))
    worker.disconnect()
    waiting.result()
    assert other.look("b")[1] == b
    assert worker.look("a")[1] == expected


def test_a_daemon_killed_while_it_saves_and_loads_at_once(world: World) -> None:
    daemon = world.daemon(isolation="relaxed", bandwidth="40MB/s")
    one, two = world.workers(daemon, "one", "two")
    one.register("m", 12 * MIB, mutable=True)
    digests = two.register_in_segments("a", 2 * MIB, 6)
    one.acquire("m")
    written = one.write("m", 5)
    one.release("m")
    two.acquire("a", early=True)
    assert two.arrive("a", 2) == digests[2]  # where "m" was; its saved bytes are in its host copy
    daemon.kill()
    for worker in (one, two):
        worker.await_end()
        worker.disconnect()
    assert one.look("m")[1] == written
    assert two.look_at("a", 5) == digests[5]
