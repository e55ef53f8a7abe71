"""A recorded run, again under other settings: the same settings give the same run."""

from math import inf

import msgspec
import pytest

from swapd.core import Residency, events
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.core.records import Rules
from swapd.log.records import Start
from swapd.log.replay import Step as Recorded
from swapd.replay.optimum import fewest_of
from swapd.replay.rerun import run_again
from swapd.replay.work import RecordedWork, WorkReader
from swapd.shared import protocol
from tests.core import driver
from tests.replayed import LRU, RATE, Site


def cyclic(chunks: int = 8, rules: Rules = LRU) -> RecordedWork:
    """A thread that uses three components in a circle."""
    site = Site(chunks, rules)
    site.thread("a", "b", "c", uses=30, hold_s=1.0)
    return site.work()


def rivals() -> RecordedWork:
    """Two threads whose components never fit together."""
    site = Site(8)
    site.thread("a", uses=10, hold_s=0.5, gap_s=2.0, size=6)
    site.thread("b", uses=10, hold_s=0.25, gap_s=1.3, size=6, at=0.4)
    return site.work()


@pytest.mark.parametrize("work", [cyclic(), rivals()], ids=["a cycle", "rivals"])
def test_the_same_settings_give_what_happened(work: RecordedWork) -> None:
    again = run_again(work, work.start.rules, work.start.chunks, RATE)
    assert again.waits == pytest.approx(work.happened.waits)
    for name in ("loads", "bytes_in", "bytes_out", "evictions", "refused", "waiting"):
        assert getattr(again, name) == getattr(work.happened, name)
    assert again.seconds == pytest.approx(work.happened.seconds)
    assert again.uses == work.happened.uses
    assert work.bytes_per_s == pytest.approx(RATE)


def test_another_rule_of_eviction_loads_less_as_it_would_have() -> None:
    other = msgspec.structs.replace(LRU, eviction="next_use")
    again = run_again(cyclic(), other, 8, RATE)
    assert cyclic().happened.loads == 30
    assert again.loads == cyclic(rules=other).happened.loads < 20
    assert sum(again.waits) == pytest.approx(again.loads)


def test_the_fewest_bytes_of_a_cycle_are_those_of_who_knows_what_comes() -> None:
    work = cyclic()
    assert fewest_of(work, work.happened, 8) == (4 * (3 + 27 // 2), True)
    assert fewest_of(work, work.happened, 12) == (12, True)
    site = Site(8)
    site.thread("a", "b", uses=4, hold_s=1.0)
    site.machine.at(50.0, lambda: site.ask(1, protocol.Update(99, "a")))
    updated = site.work()
    assert not fewest_of(updated, updated.happened, 8).exact


def test_what_is_leased_at_a_time_must_be_there_together() -> None:
    site = Site(12)
    site.thread("a", uses=1, hold_s=20.0)
    site.thread("b", "c", uses=6, hold_s=1.0, at=2.0)
    work = site.work()
    assert work.happened.uses[1:] == [frozenset("ab"), frozenset("ac")] * 3
    assert fewest_of(work, work.happened, 8) == (7 * 4, True)
    assert fewest_of(work, work.happened, 12) == (3 * 4, True)


def test_more_memory_takes_one_load_for_each() -> None:
    again = run_again(cyclic(), LRU, 12, RATE)
    assert (again.loads, again.evictions) == (3, 0)
    assert sum(again.waits) == pytest.approx(3.0)


def test_less_memory_refuses_what_never_fits() -> None:
    again = run_again(rivals(), LRU, 5, RATE)
    assert again.loads == 0
    assert again.refused
    assert again.waiting == 0


def test_a_faster_bus_waits_less() -> None:
    before, after = (sum(run_again(rivals(), LRU, 8, rate).waits) for rate in (RATE, 4 * RATE))
    assert after < before / 2


def test_what_was_never_granted_waits_as_long_as_it_did_and_holds_nothing() -> None:
    site = Site(8)
    site.thread("a", uses=1, hold_s=50.0, size=8)
    site.thread("b", uses=1, hold_s=1.0, size=8, at=2.0)
    site.machine.at(10.0, lambda: site.machine.feed(events.SessionGone(10.0, 2, alive=False)))
    work = site.work()
    assert work.happened.loads == 1
    again = run_again(work, LRU, 16, RATE)
    assert again.loads == 2
    assert again.waiting == 0


def test_a_lease_that_nobody_uses_goes_to_who_waits() -> None:
    site = Site(8)
    site.thread("a", uses=1, hold_s=1.0, kept_s=5.0, size=8)
    site.thread("b", uses=1, hold_s=1.0, size=8, at=2.5)
    work = site.work()
    assert work.happened.waits == pytest.approx([2.0, 7.5])
    assert run_again(work, LRU, 8, RATE).waits == pytest.approx([2.0, 2.5])
    assert run_again(work, LRU, 16, RATE).waits == pytest.approx([2.0, 2.0])


def test_what_waits_for_ever_ends_the_run() -> None:
    site = Site(8, msgspec.structs.replace(LRU, overtake=0))
    site.thread("a", uses=1, hold_s=inf, size=8)
    site.thread("b", uses=1, hold_s=1.0, size=8, at=2.5)
    site.machine.at(3.0, lambda: site.ask(1, protocol.Acquire(99, ("a",), 5)))
    work = site.work()
    again = run_again(work, work.start.rules, 8, RATE)
    assert again.waiting == work.happened.waiting == 1


def test_a_thread_does_not_wait_for_the_return_of_what_it_keeps() -> None:
    site = Site(8)
    site.thread("a", "b", uses=6, hold_s=1.0, kept_s=5.0)
    site.goes_on_at_once = True
    work = site.work()
    again = run_again(work, LRU, 8, RATE)
    assert again.waits == pytest.approx(work.happened.waits)
    assert run_again(work, LRU, 8, RATE / 2).waits == pytest.approx([2.0, 2.0, 0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("seed", range(12))
def test_any_history_may_be_run_again(seed: int) -> None:
    steps: list[Recorded] = []

    class Recording(Residency):
        def handle(self, event: AnyEvent) -> list[AnyAction]:
            done = super().handle(event)
            steps.append(Recorded(len(steps), event, done, list(done)))
            return done

    world = driver.drive(Recording, seed, steps=300, strict=bool(seed % 2))
    reader = WorkReader()
    for step in steps:
        reader.note(step)
    work = reader.work(Start("0", "host", 10, 1, world.core.rules))
    for chunks in (5, 10, 20):
        again = run_again(work, work.start.rules, chunks, RATE)
        assert again.waits or again.refused
        assert fewest_of(work, again, chunks).nbytes <= again.bytes_in
    assert fewest_of(work, work.happened, 10).nbytes <= work.happened.bytes_in
