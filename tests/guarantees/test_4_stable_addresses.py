"""Guarantee 4: a tensor's address never changes, neither while it is registered nor after."""

import pytest

from tests.guarantees.harness import MIB, World


@pytest.fixture
def imported() -> tuple[str, ...]:
    return ("torch",)


def test_a_tensor_keeps_its_address_and_bytes_over_fifty_swaps(world: World) -> None:
    daemon = world.daemon(eviction="lru")  # it has to leave each time
    worker, other = world.workers(daemon, "worker", "other")
    before = worker.start("register_tensor", "a", 6 * MIB, seed=1)
    for i, name in enumerate(("b", "c")):
        other.register(name, (8 - 2 * i) * MIB, seed=i)
    expected = before.result()
    worker.acquire("a")
    address, digest = worker.tensor("a")
    assert digest == expected
    worker.release("a")
    for _ in range(50):
        other.swap("b", 1)
        other.swap("c", 1)
        worker.acquire("a")
        assert worker.tensor("a") == [address, expected]
        worker.release("a")

    status = daemon.component("a")
    assert status.evictions >= 50
    placed = {copy.runs for copy in daemon.watch.seen("CopyIn") if copy.name == "a"}
    assert len(placed) > 1, "it always came back to the same chunks: that proves little"
    worker.unregister("a")
    assert worker.tensor("a") == [address, expected]
