"""Guarantee 1: a leased component is never evicted, moved or overwritten."""

import signal
from itertools import repeat
from pathlib import Path

import pytest

from tests.guarantees.harness import MIB, WorkerDied, World
from tests.guarantees.worker import pattern

#: The host device's.
CHUNK = 2 * MIB


def test_a_leased_component_stays_while_others_want_its_memory(world: World) -> None:
    daemon = world.daemon()
    holder, other = world.workers(daemon, "holder", "other")
    a = holder.register("a", 8 * MIB, seed=1)
    other.register("b", 12 * MIB, seed=2)
    holder.acquire("a")

    waiting = other.start("acquire", "b")
    daemon.await_record("Waiting", names=("b",))
    assert holder.look("a")[1] == a
    assert daemon.component("a").state == "leased"
    assert not waiting.done
    assert not daemon.watch.seen("Evict")

    holder.release("a")
    assert waiting.result()["loaded"]
    assert daemon.component("a").state == "absent"


def test_the_bytes_of_a_lease_do_not_change_while_others_swap_beside_it(world: World) -> None:
    daemon = world.daemon()
    holder, other = world.workers(daemon, "holder", "other")
    a = holder.register("a", 8 * MIB, seed=1)
    expected = [other.register(name, 6 * MIB, seed=i) for i, name in enumerate("bcd", 10)]
    holder.acquire("a")
    before = holder.look("a")
    for _ in range(4):
        found = [other.use(name)[1] for name in "bcd"]
        assert found == expected
        assert holder.look("a") == before == [before[0], a]
    assert daemon.status().evictions >= 11
    assert daemon.component("a").evictions == 0


def test_a_component_goes_only_when_the_last_of_its_leases_ended(world: World) -> None:
    """Nested in one thread, and held by a second thread of the process, too."""
    daemon = world.daemon()
    holder, other = world.workers(daemon, "holder", "other")
    a = holder.register("a", 8 * MIB, seed=1)
    other.register("b", 16 * MIB, seed=2)
    holder.acquire("a", lease="outer")
    holder.acquire("a", lease="inner")
    holder.start("acquire", "a", lease="thread", lane="second").result()
    waiting = other.start("acquire", "b")
    daemon.await_record("Waiting", names=("b",))

    for lease, lane in (("inner", "main"), ("thread", "second")):
        holder.start("release", lease, lane=lane).result()
        daemon.await_record("Release")
        assert not waiting.done
        assert holder.look("a")[1] == a
    holder.release("outer")
    waiting.result()


def test_a_session_holds_what_another_registered(world: World) -> None:
    daemon = world.daemon()
    owner, holder, other = world.workers(daemon, "owner", "holder", "other")
    a = owner.register("a", 8 * MIB, seed=1)
    other.register("b", 16 * MIB, seed=2)
    owner.acquire("a")
    holder.acquire("a")
    waiting = other.start("acquire", "b")
    daemon.await_record("Waiting", names=("b",))
    owner.release("a")
    daemon.await_record("Release")
    assert daemon.component("a").holders == (f"holder (session {holder.ping()})",)
    assert not waiting.done
    holder.release("a")
    waiting.result()
    other.release("b")
    assert owner.use("a")[1] == a


def test_a_busy_holder_is_told_that_it_is_wanted_and_gives_way(world: World) -> None:
    daemon = world.daemon()
    busy, other = world.workers(daemon, "busy", "other")
    busy.register("a", 8 * MIB, seed=1)
    b = other.register("b", 12 * MIB, seed=2)
    busy.acquire("a")
    steps = busy.start("work_until_wanted", "a")
    other.acquire("b")
    assert steps.result() >= 0
    assert other.look("b")[1] == b
    assert daemon.watch.seen("SendWanted")[0].wanted


def test_a_stray_read_outside_a_lease_kills_the_one_who_reads(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    b = other.register("b", 16 * MIB, seed=2)
    for when in ("never acquired", "released", "evicted"):
        stray = world.worker(daemon, when)
        stray.register(when, 8 * MIB, seed=1)
        if when != "never acquired":
            stray.use(when)
        if when == "evicted":
            other.use("b")
            daemon.await_record("Evicted", name=when)
        with pytest.raises(WorkerDied):
            stray.peek(when)
        assert stray.wait() == -signal.SIGSEGV
        daemon.await_gone(stray)
        assert other.use("b")[1] == b


def test_relaxed_a_stray_read_sees_its_bytes_then_others_until_its_worker_has_unmapped(
    world: World,
) -> None:
    """As docs/isolation.md says. A stopped worker has not unmapped."""
    daemon = world.daemon(isolation="relaxed")
    stray, other = world.workers(daemon, "stray", "other")
    a = stray.register("a", 8 * MIB, seed=1)
    b = other.register("b", 16 * MIB, seed=2)
    stray.use("a")
    address, found = stray.look("a")
    assert found == a
    stray.stop()
    assert other.use("b")[1] == b
    with Path(f"/proc/{stray.pid}/mem").open("rb") as memory:
        memory.seek(address)
        seen = {memory.read(CHUNK) for _ in range(8 * MIB // CHUNK)}
    data = pattern(2, 16 * MIB)
    assert seen <= {bytes(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)}
    stray.go_on()
    with pytest.raises(WorkerDied):
        all(stray.look("a") for _ in repeat(None))
    assert stray.wait() == -signal.SIGSEGV


def test_a_write_to_a_clean_component_kills_the_writer_and_changes_nothing(world: World) -> None:
    daemon = world.daemon()
    writer, other = world.workers(daemon, "writer", "other")
    writer.register("a", 4 * MIB, seed=1)
    b = other.register("b", 8 * MIB, seed=2)
    other.acquire("b")
    writer.acquire("a")

    with pytest.raises(WorkerDied):
        writer.write("a", seed=3)
    assert writer.wait() == -signal.SIGSEGV
    daemon.await_gone(writer)
    assert other.look("b")[1] == b
    assert [c.name for c in daemon.status().components] == ["b"]
