"""Workers with the same bytes on the GPU: one copy there, and each is alone once it leaves."""

from tests.cuda.gpu_world import MIB, World


def test_both_read_one_copy_and_one_that_is_killed_leaves_it(world: World) -> None:
    daemon, one, two = world.pair()
    expected = one.register("a", 12 * MIB, seed=1)
    assert two.register("b", 12 * MIB, seed=1) == expected
    one.acquire("a")
    two.acquire("b")
    assert one.look("a")[1] == two.look("b")[1] == expected
    status = daemon.status()
    assert (status.used_bytes, status.bytes_in, status.loads) == (12 * MIB, 12 * MIB, 1)
    one.kill()
    daemon.await_gone(one)
    assert two.look("b")[1] == expected
    two.release("b")
    assert two.use("b")[1] == expected


def test_a_client_that_closes_over_a_dead_daemon_writes_to_no_other_s_weights(
    world: World,
) -> None:
    daemon, one, two = world.pair()
    expected = one.register("a", 12 * MIB, seed=1)
    two.register("b", 12 * MIB, seed=1)
    one.acquire("a")
    two.acquire("b")
    assert one.look("a")[1] == two.look("b")[1] == expected
    daemon.kill()
    one.await_end()
    assert one.close_and_tell() == []
    assert one.look("a")[1] == expected
    one.write("a", 5)
    assert one.look("a")[1] != expected
    assert two.look("b")[1] == expected
