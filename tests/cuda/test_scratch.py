"""Scratch on a GPU: zeroed there, saved in parts, private memory at the end."""

import pytest

from tests.cuda.gpu_world import MIB, World
from tests.guarantees.worker import digest, pattern

SIZE = 6 * MIB


def zeros() -> str:
    return digest(bytearray(SIZE))


@pytest.mark.parametrize("isolation", ["strict", "relaxed"])
def test_scratch_takes_turns_and_nobody_finds_anothers_bytes(world: World, isolation: str) -> None:
    daemon, one, other = world.pair("one", "other", isolation=isolation)
    arena = daemon.status().budget_bytes
    for worker in (one, other):
        worker.register_scratch("s" + worker.label, arena - 2 * MIB)
    for seed in range(3):
        for worker in (one, other):
            name = "s" + worker.label
            worker.acquire(name)
            assert worker.fresh(name)
            assert worker.look(name)[1] == digest(bytearray(arena - 2 * MIB))
            worker.write(name, seed)
            worker.release(name)
    status = daemon.status()
    assert (status.bytes_in, status.bytes_out, status.host_copy_bytes) == (0, 0, 0)


def test_what_is_used_of_scratch_is_saved_and_comes_back_among_zeros(world: World) -> None:
    daemon, worker, other = world.pair()
    worker.register_scratch("s", SIZE, mutable=True)
    other.register("b", daemon.status().budget_bytes)
    used = [(1000, 2 * MIB), (5 * MIB + 1, 77)]
    kept = bytearray(SIZE)
    for start, nbytes in used:
        kept[start : start + nbytes] = pattern(4, SIZE)[start : start + nbytes]
    worker.acquire("s")
    worker.write("s", 4)
    worker.used("s", used)
    worker.release("s")
    other.use("b")
    assert worker.use("s")[1] == digest(kept)
    assert daemon.status().bytes_out == sum(n for _, n in used)


@pytest.mark.parametrize("mutable", [False, True])
def test_scratch_that_is_taken_back_is_memory_of_the_processs_own(
    world: World, *, mutable: bool
) -> None:
    _, worker = world.alone()
    worker.register_scratch("s", SIZE, mutable=mutable)
    worker.acquire("s")
    address, _ = worker.look("s")
    written = worker.write("s", 4)
    worker.release("s")
    worker.unregister("s")
    assert worker.look("s") == [address, written if mutable else zeros()]
    worker.write("s", 5)


def test_scratch_that_is_held_when_the_daemon_dies_stays_where_it_is(world: World) -> None:
    daemon, worker = world.alone()
    worker.register_scratch("s", SIZE)
    worker.acquire("s")
    worker.write("s", 4)
    before = worker.look("s")
    daemon.kill()
    worker.await_end()
    assert worker.look("s") == before
    worker.disconnect()
    assert worker.look("s") == before


def test_what_is_back_of_a_workspace_is_used_before_the_rest_is(world: World) -> None:
    """The driver returns a part of the memory of a worker's allocator, and the daemon asks for the
    rest.
    """
    daemon, borrower, other = world.pair("borrower", "other")
    expected = other.register("a", 12 * MIB, seed=1)
    borrower.acquire_workspace(8 * MIB)
    with world.fake.occupied(world.fake.free_bytes() - 4 * MIB):
        borrower.release("workspace")
        assert other.use("a")[1] == expected
        status = daemon.status()
        (out,) = [c for c in status.components if c.kind == "workspace"]
        assert (out.state, out.nbytes) == ("reclaiming", 4 * MIB)
        assert any("4 MiB are not back yet" in note for note in status.notes)
    while any(c.kind == "workspace" for c in daemon.status().components):
        pass
    assert not any("not back yet" in note for note in daemon.status().notes)
