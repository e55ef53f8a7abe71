"""A lease is held, ending while the GPU works, or over; each happens once."""

from collections.abc import Callable, Iterator

import pytest

from swapd.shared.protocol import Granted, Placement
from swapd_client.errors import DaemonGone
from swapd_client.leases.arrivals import Arrivals
from swapd_client.leases.leases import Leases
from swapd_client.leases.record import Record
from swapd_client.memory.part import Part
from swapd_client.session.life import Life

ME = 100


class Work:
    """Unfinished work of a GPU."""

    def is_pending(self) -> bool:
        return True

    def is_over(self) -> bool:
        return False


class Processor:
    """A GPU whose work ends when the test says so."""

    works_late = True

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def after(self, work: Work, then: Callable[[], None]) -> None:
        self.waiting.append(then)

    def everything(self) -> Work:
        return Work()

    def free_unused(self, parts: object) -> None:
        """Nothing is scarce."""

    def finish(self) -> None:
        while self.waiting:
            self.waiting.pop()()

    def attempt(self, call: Callable[..., None], *arguments: object) -> bool:
        call(*arguments)
        return True


class Where:
    """A range that records its calls."""

    def __init__(self) -> None:
        self.shown = 0

    def show(self, generation: int, runs: object) -> None:
        self.shown = generation

    def is_shown(self, generation: int) -> bool:
        return self.shown == generation

    def hide(self, generation: int) -> None:
        self.shown = 0


class Layout:
    nbytes, segments = 1, (1,)


def part(name: str) -> Part:
    where = Where()
    where.nbytes, where.address = 1, 4096  # type: ignore[attr-defined]
    return Part(name, Layout(), where, None, mutable=False)  # type: ignore[arg-type]


class World:
    """Leases without a daemon, on a GPU without a driver."""

    def __init__(self) -> None:
        self.life, self.gpu = Life(), Processor()
        self.parts = {name: part(name) for name in "ab"}
        self.arrivals = Arrivals(self.life, self.gpu, None, self.parts)  # type: ignore[arg-type]
        self.leases = Leases(self.life, self.gpu, self.parts, self.arrivals, strict=False)  # type: ignore[arg-type]
        self.told: list[int] = []
        self._ids = 0

    def take(self, *names: str, busy: bool = False) -> Record:
        self._ids += 1
        places = tuple(Placement(name, 1, ()) for name in names)
        record = Record(self._ids, names, ME)
        record.granted = Granted(self._ids, places)
        self.leases.add(record)
        self.leases.show(record)
        record.work = Work() if busy else None
        return record

    def release(self, record: Record) -> bool:
        """Whether it ends later."""
        if self.leases.ends_later(record, self.give_back):
            return True
        self.give_back(record)
        return False

    def give_back(self, record: Record) -> None:
        if self.leases.give_back(record):
            self.told.append(record.id)
            record.told = True


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    with world.life.ended:
        yield world


def test_a_lease_is_ending_until_the_daemon_has_been_told(world: World) -> None:
    record = world.take("a", busy=True)
    seen: list[bool] = []

    def give_back(record: Record) -> None:
        world.give_back(record)
        seen.append(world.leases.is_ending(record.id))

    assert world.leases.ends_later(record, give_back)
    world.gpu.finish()
    assert seen == [True]
    assert not world.leases.is_ending(record.id)


@pytest.mark.parametrize("accessible", [False, True])
def test_a_lease_is_kept_only_if_all_of_it_is_accessible(
    world: World, monkeypatch: pytest.MonkeyPatch, *, accessible: bool
) -> None:
    """What came just after an early grant is complete, and its next user does not wait for it."""
    monkeypatch.setattr(world.arrivals, "is_complete", lambda place: True)
    record = world.take("a")
    if not accessible:
        world.parts["a"].where.hide(1)
    assert world.leases.may_be_kept(record) == accessible


def test_a_lease_with_work_of_which_a_mark_is_missing_waits_for_all_work(world: World) -> None:
    record = world.take("a")
    record.unmarked = True
    assert world.release(record)
    world.gpu.finish()
    assert world.told == [record.id]


def test_a_lease_is_exchanged_after_its_work_also_if_the_daemon_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, awaited = world.take("a", busy=True), []

    def after(work: Work, then: Callable[[], None]) -> None:
        awaited.append(work)
        then()

    monkeypatch.setattr(world.gpu, "after", after)
    world.life.end(DaemonGone("killed"))
    world.leases.exchanged(record)
    assert awaited == [record.work]
    assert not world.leases.in_use()


def test_a_release_that_was_interrupted_may_run_again(world: World) -> None:
    record = world.take("a")
    for _ in range(2):
        assert world.leases.give_back(record), "the daemon was not told yet"
    record.told = True
    assert not world.leases.give_back(record)
    assert not world.parts["a"].holders
