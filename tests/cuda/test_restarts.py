"""A daemon dies on a card with room for one budget; the next has that budget, and loses nothing.

All weights together are twice the budget. Each has a host copy, in which a worker keeps it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import fakecuda
from tests.cuda.gpu_world import MIB, Daemon, Worker, WorkerError, World, failure
from tests.processes import line_of, start_python, tell

CARD, BUDGET, SIZE = 32 * MIB, 24 * MIB, 16 * MIB
NAMES = ("a", "b", "c")
ASYNC = Path(__file__).parent / "programs" / "async_client.py"
WORK = "cuMemcpyDtoDAsync"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[fakecuda.Fake]:
    """At the end nothing is left on the card."""
    with fakecuda.shown(monkeypatch, total=CARD) as fake:
        yield fake
        assert fake.held_bytes() == 0


def start(world: World, nbytes: int = BUDGET) -> Daemon:
    return world.daemon(budget=nbytes)


def await_held(world: World, nbytes: int) -> None:
    """Wait until so much of the card is allocated."""
    while world.fake.held_bytes() != nbytes:
        pass


class Owners:
    """Workers, by the component that each has: its address, and its bytes as they are to be."""

    def __init__(self, world: World, daemon: Daemon, label: Callable[[str], str]) -> None:
        labels = {name: label(name) for name in NAMES}
        workers = {one: world.worker(daemon, one) for one in dict.fromkeys(labels.values())}
        self.of: dict[str, Worker] = {name: workers[one] for name, one in labels.items()}
        self.workers = list(workers.values())
        self.seen: dict[str, list[object]] = {}

    def register(self, *names: str, nbytes: int = SIZE, mutable: bool = False) -> None:
        for seed, name in enumerate(names):
            self.of[name].register(name, nbytes, seed=seed, mutable=mutable)
            self.seen[name] = self.of[name].use(name)

    def join(self) -> None:
        for worker in self.workers:
            worker.join_next()

    def are_right(self) -> None:
        for name in (*self.seen, *self.seen):
            assert self.of[name].use(name) == self.seen[name]


def own(name: str) -> str:
    return f"owner of {name}"


@pytest.mark.parametrize("label", [own, lambda _: "one"], ids=["three workers", "one worker"])
def test_all_come_back_to_a_daemon_of_the_same_budget(
    world: World, label: Callable[[str], str]
) -> None:
    daemon = start(world)
    owners = Owners(world, daemon, label)
    owners.register(*NAMES)
    for _ in range(2):
        daemon.kill()
        daemon = start(world)
        assert world.fake.held_bytes() == BUDGET
        owners.join()
        assert world.fake.held_bytes() == BUDGET
        owners.are_right()
        assert world.fake.held_bytes() == BUDGET
        assert daemon.status().bytes_out == 0


def test_without_a_call_the_memory_of_a_dead_daemon_is_free_but_for_what_is_in_use(
    world: World,
) -> None:
    daemon = start(world)
    owners = Owners(world, daemon, own)
    owners.register(*NAMES)
    worker = owners.of["a"]
    for ends_with_work in (False, True):
        worker.acquire("a")
        daemon.kill()
        await_held(world, SIZE)
        assert worker.look("a") == owners.seen["a"], "it computes on"
        if ends_with_work:
            world.hold(WORK, worker)
            worker.work("a")
            worker.release("a")
            assert world.fake.held_bytes() == 2 * SIZE, "and the result of the work"
            world.go_on()
            assert worker.result() == owners.seen["a"][1]
            await_held(world, SIZE)
            break
        worker.release("a")
        await_held(world, 0)
        daemon = start(world)
        owners.join()
        owners.are_right()


@pytest.mark.parametrize("comes", ["after a kill", "in an upgrade"])
def test_the_next_serves_in_what_is_free_and_has_the_rest_when_leases_end(
    world: World, comes: str
) -> None:
    daemon = start(world)
    owners = Owners(world, daemon, own)
    owners.register(*NAMES)
    holder, other = owners.of["a"], owners.of["b"]
    holder.acquire("a")
    if comes == "in an upgrade":
        daemon.upgrade()
    else:
        daemon.kill()
        daemon = start(world)
    assert world.fake.held_bytes() == CARD
    (note,) = daemon.status().notes
    assert "8 MiB are not back yet" in note
    other.join_next()
    assert other.use("b") == owners.seen["b"]
    assert holder.look("a") == owners.seen["a"], "it computes on"
    holder.release("a")
    await_held(world, BUDGET)
    for late in (holder, owners.of["c"]):
        late.join_next()
    owners.are_right()
    assert not daemon.status().notes
    assert world.fake.held_bytes() == BUDGET


def test_a_kept_lease_keeps_no_memory_of_a_dead_daemon(world: World) -> None:
    daemon, worker = world.alone(budget=BUDGET, isolation="relaxed")
    expected = worker.register("a", SIZE, seed=1)
    worker.linger_on()
    address, _ = worker.use("a")
    worker.use("a")
    daemon.kill()
    await_held(world, 0)
    world.daemon(budget=BUDGET, isolation="relaxed")
    worker.join_next()
    assert worker.use("a") == [address, expected]


def test_what_was_written_is_there(world: World) -> None:
    """Of one that was evicted the host copy has the bytes, and of the other the chunks alone."""
    daemon = start(world)
    owners = Owners(world, daemon, own)
    owners.register("a", nbytes=4 * MIB, mutable=True)
    owners.register("b", nbytes=SIZE, mutable=True)
    owners.register("c")
    for turn in range(2):
        for name in ("b", "c", "a"):
            worker = owners.of[name]
            worker.acquire(name)
            if name != "c":
                owners.seen[name][1] = worker.write(name, 10 + turn)
            worker.release(name)
        assert daemon.component("b").state == "absent"
        daemon.kill()
        await_held(world, 4 * MIB)
        daemon = start(world)
        owners.join()
        assert world.fake.held_bytes() == BUDGET
        owners.are_right()
        assert world.fake.held_bytes() == BUDGET


def test_what_a_daemon_refuses_waits_for_another(world: World) -> None:
    daemon = start(world)
    owners = Owners(world, daemon, lambda _: "one")
    other = world.worker(daemon, "other")
    owners.register(*NAMES)
    owners.of["a"].register("w", 2 * MIB, mutable=True)
    owners.seen["w"] = owners.of["a"].use("w")
    owners.of["w"] = owners.of["a"]
    daemon.kill()
    daemon = start(world, 8 * MIB)
    for _ in range(2):
        refused = failure("TooLarge", owners.join)
        assert "No weights are lost" in refused
    daemon.kill()
    daemon = start(world)
    other.register("c", MIB)
    failure("DuplicateName", owners.join)
    other.disconnect(keep=False)
    owners.join()
    assert world.fake.held_bytes() == BUDGET
    owners.are_right()


def test_closing_after_a_refusal_makes_private_what_fits_and_old_bytes_never_come_back(
    world: World,
) -> None:
    daemon = start(world)
    owners = Owners(world, daemon, lambda _: "one")
    worker = owners.of["a"]
    expected = worker.register_tensor("t", 4 * MIB, seed=7)
    address, _ = worker.use("t")
    owners.register("a", "b")
    daemon.kill()
    daemon = start(world, 8 * MIB)
    with pytest.raises(WorkerError, match="TooLarge"):
        owners.join()
    (said,) = worker.close_and_tell()
    assert "no room for private copies of 'b' (16 MiB): do not use their tensors" in said
    assert world.fake.held_bytes() == (8 + 4 + 16) * MIB
    assert worker.look("a") == owners.seen["a"]
    assert worker.tensor("t") == [address, expected]
    written = worker.write("t", 5)
    worker.register_tensor_again("t")
    assert worker.use("t") == [address, written]


def test_the_memory_of_what_was_closed_is_not_given_to_the_next_daemon(world: World) -> None:
    """The same if there was no join before the close."""
    daemon = start(world)
    worker = world.worker(daemon)
    worker.register_tensor("t", 4 * MIB, seed=7)
    address, _ = worker.use("t")
    daemon.kill()
    worker.await_end()
    worker.disconnect()
    written = worker.write("t", 5)
    start(world)
    assert worker.register_tensor_again("t") == address
    assert worker.use("t") == [address, written]


def test_an_asynchronous_client_comes_back(world: World) -> None:
    daemon = start(world)
    arguments = ("a_restart", daemon.folder)
    with start_python(ASYNC, *arguments, env=world.fake.environment()) as process:
        assert line_of(process) == "registered\n"
        daemon.kill()
        await_held(world, 0)
        daemon = start(world)
        tell(process, "next")
        assert line_of(process) == "back\n"
        assert world.fake.held_bytes() == BUDGET
    assert process.returncode == 0
