"""Guarantee 6, of updates: a later acquire has the new bytes, and no wait is endless.

Also while others hold the old ones, in this process or in others, however rarely they all release.
"""

from typing import Any

from swapd.core import actions, events
from swapd.shared.protocol import Acquire
from tests.guarantees.harness import MIB, Daemon, World
from tests.guarantees.worker import digest, pattern

NEW = digest(pattern(2, 4 * MIB))


def granted_old(daemon: Daemon, name: str) -> list[Any]:
    """Acquires from between the update and the release of the old bytes that were granted before
    this release.
    """
    daemon.watch.seen("Grant")
    records = [record.event or record.action for record in daemon.watch.history]
    took_place = max(i for i, said in enumerate(records) if isinstance(said, events.HostCopySealed))
    asked: set[tuple[int, int]] = set()
    early: list[Any] = []
    for said in records[took_place:]:
        if isinstance(said, actions.Evict) and said.name == name and said.reason == "update":
            return early
        match said:
            case events.SessionRequest(session=session, request=Acquire(id=id, names=names)):
                asked |= {(session, id)} if name in names else set()
        if isinstance(said, actions.Grant) and (said.session, said.request) in asked:
            early.append(said)
    raise AssertionError(f"the old bytes of {name} never left")


def test_threads_that_overlap_for_ever_see_the_new_bytes_in_every_later_acquire(
    world: World,
) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    worker.register("a", 4 * MIB, seed=1)
    seen = worker.overlap_and_update("a", 2, threads=4, uses=20)
    assert set(seen) == {NEW}, f"{len([s for s in seen if s != NEW])} of {len(seen)} had the old"
    assert len(seen) == 80
    assert granted_old(daemon, "a") == []


def test_leases_that_overlap_hand_over_hand_do_not_put_off_the_new_bytes(world: World) -> None:
    """Two threads of the owner and two of another process: one of them holds it at any time."""
    daemon = world.daemon()
    owner, other = world.workers(daemon, "owner", "other")
    owner.register("a", 4 * MIB, seed=1)
    owner.acquire("a", lease="first", lane="first")
    other.acquire("a", lease="first", lane="first")
    owner.update("a", 2)
    coming = [
        owner.start("acquire", "a", lease="second", lane="second"),
        other.start("acquire", "a", lease="second", lane="second"),
    ]
    for _ in coming:
        daemon.await_record("Waiting", names=("a",))
    owner.release("first")
    assert not any(one.done for one in coming)
    other.release("first")
    for one in coming:
        one.result()
    assert owner.look("a")[1] == NEW
    assert granted_old(daemon, "a") == []


def test_threads_of_two_processes_that_overlap_for_ever_put_off_nothing(world: World) -> None:
    daemon = world.daemon()
    owner, other = world.workers(daemon, "owner", "other")
    owner.register("a", 4 * MIB, seed=1)
    swapping = [other.start("swap", "a", 300, lane=f"{i}") for i in range(4)]
    seen = owner.overlap_and_update("a", 2, threads=4, uses=20)
    assert set(seen) == {NEW}
    for one in swapping:
        one.result()
    assert granted_old(daemon, "a") == []


def test_who_holds_the_old_bytes_itself_takes_them_again_and_sees_the_new_ones_then(
    world: World,
) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    a = worker.register("a", 4 * MIB, seed=1)
    worker.acquire("a", lease="outer")
    worker.update("a", 2, lane="other")
    worker.acquire("a", lease="inner")
    assert worker.look("a")[1] == a
    worker.release("inner")
    assert worker.look("a")[1] == a
    worker.release("outer")
    assert worker.use("a")[1] == NEW


def test_threads_that_wait_for_each_other_because_of_an_update_go_on_with_the_old_bytes(
    world: World,
) -> None:
    """Without the update neither would have waited: so neither is refused."""
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    worker.register("a", 4 * MIB, seed=1)
    b = worker.register("b", 4 * MIB, seed=3)
    worker.acquire("a", lease="a1", lane="one")
    worker.acquire("b", lease="b2", lane="two")
    worker.update("a", 2)
    worker.update("b", 2)
    first = worker.start("acquire", "b", lease="b1", lane="one")
    daemon.await_record("Waiting", names=("b",))
    worker.acquire("a", lease="a2", lane="two")
    assert worker.look("b")[1] == b
    worker.release("a2", lane="two")
    worker.release("b2", lane="two")
    first.result()
    assert worker.look("b")[1] == NEW
    worker.release("b1", lane="one")
    worker.release("a1", lane="one")
    assert worker.use("a")[1] == NEW
