"""Guarantee 3, of scratch: it loads as zeros, bytes worth saving come back, nothing else is copied,
and its holder hears when its contents are new.
"""

import pytest

from tests.guarantees.harness import MIB, Daemon, Worker, WorkerError, World
from tests.guarantees.test_3_nothing_lost import evict
from tests.guarantees.worker import digest, pattern

SIZE = 8 * MIB


def zeros(nbytes: int = SIZE) -> str:
    return digest(bytearray(nbytes))


def parts_of(seed: int, ranges: list[tuple[int, int]]) -> str:
    """The digest of a worker's bytes in these ranges, and zeros elsewhere."""
    written, kept = pattern(seed, SIZE), bytearray(SIZE)
    for start, nbytes in ranges:
        kept[start : start + nbytes] = written[start : start + nbytes]
    return digest(kept)


def use(worker: Worker, name: str = "s") -> tuple[bool, str]:
    """Whether its contents are new, and their digest, under a lease."""
    worker.acquire(name)
    seen = worker.fresh(name), worker.look(name)[1]
    worker.release(name)
    return seen


def write(worker: Worker, seed: int, used: list[tuple[int, int]] | None = None) -> str:
    """Write under a lease; declare these ranges worth saving."""
    worker.acquire("s")
    written: str = worker.write("s", seed)
    if used is not None:
        worker.used("s", used)
    worker.release("s")
    return written


@pytest.fixture
def daemon(world: World) -> Daemon:
    return world.daemon()


def test_scratch_comes_in_as_zeros_and_is_dropped_without_a_copy(
    world: World, daemon: Daemon
) -> None:
    worker, other = world.workers(daemon, "worker", "other")
    worker.register_scratch("s", SIZE)
    filled = other.register("filler", 16 * MIB, seed=99)
    before = daemon.status()
    address = worker.address("s")
    for seed in range(3):
        assert use(worker) == (True, zeros()), "others' bytes, or its own of before"
        written = write(worker, seed)
        assert use(worker) == (False, written), "it was not evicted"
        evict(daemon, other, "s")
        assert other.use("filler")[1] == filled
    after = daemon.status()
    assert worker.address("s") == address
    assert after.bytes_out == 0
    assert after.bytes_in - before.bytes_in == 3 * 16 * MIB, "the filler alone"
    assert after.host_copy_bytes == 16 * MIB, "it has no host copy"


@pytest.mark.parametrize(
    "used",
    [[(0, SIZE)], [(100, 1)], [(5, 3 * MIB), (6 * MIB - 1, 2)], [(4 * MIB, 4 * MIB)]],
    ids=["all", "one byte", "two", "the end"],
)
def test_what_is_used_of_scratch_is_saved_and_comes_back_among_zeros(
    world: World, daemon: Daemon, used: list[tuple[int, int]]
) -> None:
    worker, other = world.workers(daemon, "worker", "other")
    worker.register_scratch("s", SIZE, mutable=True)
    assert use(worker) == (True, zeros())
    for seed in (1, 2):
        write(worker, seed, used)
        before = daemon.status()
        evict(daemon, other, "s")
        between = daemon.status()
        assert use(worker) == (False, parts_of(seed, used))
        nbytes = sum(n for _, n in used)
        assert between.bytes_out - before.bytes_out == nbytes
        assert daemon.status().bytes_in - between.bytes_in == nbytes


def test_scratch_of_which_nothing_is_said_is_saved_whole(world: World, daemon: Daemon) -> None:
    worker, other = world.workers(daemon, "worker", "other")
    worker.register_scratch("s", SIZE, mutable=True)
    assert use(worker)[0]
    written = write(worker, 1)
    evict(daemon, other, "s")
    assert use(worker) == (False, written)


def test_scratch_of_which_nothing_is_used_is_dropped_and_its_contents_are_new(
    world: World, daemon: Daemon
) -> None:
    worker, other = world.workers(daemon, "worker", "other")
    worker.register_scratch("s", SIZE, mutable=True)
    write(worker, 1, [(0, MIB)])
    evict(daemon, other, "s")
    write(worker, 2, [])
    before = daemon.status().bytes_out
    evict(daemon, other, "s")
    assert daemon.status().bytes_out == before
    assert use(worker) == (True, zeros()), "not even what was saved before"


def test_scratch_that_came_back_and_was_not_used_again_has_what_was_saved(
    world: World, daemon: Daemon
) -> None:
    worker, other = world.workers(daemon, "worker", "other")
    worker.register_scratch("s", SIZE, mutable=True)
    write(worker, 1, [(MIB, MIB)])
    for _ in range(3):
        evict(daemon, other, "s")
        worker.prefetch("s")
        daemon.await_record("CopiedIn")
    assert use(worker) == (True, parts_of(1, [(MIB, MIB)])), "asked for the first time"


def test_contents_that_began_anew_unseen_are_told_by_the_next_lease_that_is_asked(
    world: World, daemon: Daemon
) -> None:
    worker, other = world.workers(daemon, "worker", "other")
    worker.register_scratch("s", SIZE)
    for _ in range(3):
        worker.acquire("s")  # and does not ask for `fresh`
        worker.release("s")
        evict(daemon, other, "s")
    worker.acquire("s")
    worker.acquire("s", lease="again")
    assert worker.fresh("s")
    assert worker.fresh("s"), "it was before, for this one"
    assert not worker.fresh("again", "s")
    with pytest.raises(WorkerError, match="not in this lease"):
        worker.fresh("s", "t")


def test_weights_and_scratch_are_leased_together_or_not_at_all(
    world: World, daemon: Daemon
) -> None:
    worker, other = world.workers(daemon, "worker", "other")
    weights = worker.register("w", 6 * MIB, seed=1)
    worker.register_scratch("s", SIZE)
    other.register("b", 4 * MIB)
    other.acquire("b")
    with pytest.raises(WorkerError) as late:
        worker.acquire("w", "s", timeout=0.0)
    assert late.value.kind == "Timeout"
    assert all(c.leases == 0 for c in daemon.status().components if c.name != "b")
    waiting = worker.start("acquire", "w", "s", lease="both")
    daemon.await_record("Waiting", names=("w", "s"))
    other.release("b")
    waiting.result()
    assert (worker.fresh("both", "s"), worker.fresh("both", "w")) == (True, False)
    assert (worker.look("w")[1], worker.look("s")[1]) == (weights, zeros())


def test_scratch_beyond_the_budget_is_refused(world: World, daemon: Daemon) -> None:
    worker = world.worker(daemon, "worker")
    with pytest.raises(WorkerError) as refused:
        worker.register_scratch("s", 17 * MIB)
    assert refused.value.kind == "TooLarge"
    assert "s needs 18 MiB; the budget is 16 MiB" in refused.value.message
    assert "Raise the daemon's --budget, or make this scratch smaller" in refused.value.message
    with pytest.raises(WorkerError, match="give a size") as refused:
        worker.register_scratch("s", 0)
    assert refused.value.kind == "InvalidSource"
    worker.register_scratch("s", 16 * MIB)
    worker.acquire("s")
    assert worker.look("s")[1] == zeros(16 * MIB)


def test_what_is_no_range_of_scratch_is_refused_and_changes_nothing(
    world: World, daemon: Daemon
) -> None:
    worker, other = world.workers(daemon, "worker", "other")
    worker.register_scratch("s", SIZE, mutable=True)
    worker.register_scratch("d", MIB)
    write(worker, 1, [(0, MIB)])
    for wrong in ([(0, SIZE + 1)], [(-1, 2)], [(SIZE, 1)], [(3, -1)]):
        with pytest.raises(WorkerError, match="is no range") as refused:
            worker.used("s", wrong)
        assert refused.value.kind == "InvalidSource"
    with pytest.raises(WorkerError, match=r"register_scratch\(\.\.\., mutable=True\)"):
        worker.used("d", [])
    evict(daemon, other, "s")
    assert use(worker)[1] == parts_of(1, [(0, MIB)])


def test_more_ranges_than_can_be_told_save_more_and_never_less(
    world: World, daemon: Daemon
) -> None:
    worker, other = world.workers(daemon, "worker", "other")
    worker.register_scratch("s", SIZE, mutable=True)
    many = [(at, 100) for at in range(0, SIZE, 512)]
    written = pattern(1, SIZE)
    write(worker, 1, many)
    evict(daemon, other, "s")
    assert use(worker) == (True, digest(written)), "rounded to pages they are all of it"


def test_what_a_killed_worker_wrote_to_scratch_is_nobodys(world: World, daemon: Daemon) -> None:
    dying, worker = world.workers(daemon, "dying", "worker")
    dying.register_scratch("t", 16 * MIB)
    worker.register_scratch("s", SIZE)
    dying.acquire("t")
    dying.write("t", 5)
    waiting = worker.start("acquire", "s")
    daemon.await_record("Waiting", names=("s",))
    dying.kill()
    waiting.result()
    assert worker.look("s")[1] == zeros()
    assert not daemon.watch.seen("Lost"), "nothing of it was to be kept"


def test_a_worker_killed_while_its_scratch_is_saved_costs_the_others_nothing(
    world: World,
) -> None:
    daemon = world.daemon(bandwidth="40MB/s")
    dying, other = world.workers(daemon, "dying", "other")
    dying.register_scratch("s", SIZE, mutable=True)
    expected = other.register("b", 16 * MIB, seed=2)
    dying.acquire("s")
    dying.write("s", 5)
    dying.release("s")
    waiting = other.start("acquire", "b")
    daemon.await_record("CopyOut", name="s")
    dying.kill()
    waiting.result()
    assert other.look("b")[1] == expected
    assert {c.name for c in daemon.status().components} == {"b"}


@pytest.mark.parametrize("mutable", [False, True])
@pytest.mark.parametrize("where", ["held", "idle", "evicted"])
def test_scratch_that_loses_its_daemon_has_its_bytes_where_it_was_in(
    world: World, daemon: Daemon, where: str, *, mutable: bool
) -> None:
    worker, other = world.workers(daemon, "worker", "other")
    worker.register_scratch("s", SIZE, mutable=mutable)
    written = write(worker, 1)
    if where == "held":
        worker.acquire("s")
    elif where == "evicted":
        evict(daemon, other, "s")
    daemon.kill()
    worker.await_end()
    worker.disconnect()
    kept = where != "evicted" or mutable
    assert worker.look("s")[1] == (written if kept else zeros())
    assert worker.write("s", 3) == worker.look("s")[1], "it is its own now"


@pytest.mark.parametrize("mutable", [False, True])
def test_scratch_that_is_taken_back_is_private_memory_at_its_address(
    world: World, daemon: Daemon, *, mutable: bool
) -> None:
    worker = world.worker(daemon, "worker")
    worker.register_scratch("s", SIZE, mutable=mutable)
    address = worker.address("s")
    written = write(worker, 1)
    worker.unregister("s")
    assert worker.look("s") == [address, written if mutable else zeros()]
    assert worker.write("s", 3) == worker.look("s")[1]
    assert daemon.status().used_bytes == 0


def test_scratch_cannot_be_updated(world: World, daemon: Daemon) -> None:
    worker = world.worker(daemon, "worker")
    worker.register_scratch("s", SIZE)
    with pytest.raises(WorkerError, match="under a lease"):
        worker.update("s", 1)


@pytest.mark.parametrize("saved_since", [False, True])
def test_scratch_that_could_not_be_saved_is_zeros_if_its_daemon_dies_next(
    world: World, *, saved_since: bool
) -> None:
    """Half of its bytes are in its host copy by then."""
    daemon = world.daemon(program="tests.guarantees.failing_saves")
    worker, other = world.workers(daemon, "worker", "other")
    worker.register_scratch("s", SIZE, mutable=True)
    write(worker, 1)
    evict(daemon, other, "s")
    assert daemon.watch.seen("Lost")
    written = zeros()
    if saved_since:
        written = write(worker, 2)
        evict(daemon, other, "s")
    daemon.kill()
    worker.await_end()
    assert worker.lost("s") is not saved_since
    worker.disconnect()
    assert worker.look("s")[1] == written
