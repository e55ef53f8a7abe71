"""The counts in the status are those of the recorded events and actions."""

from collections import Counter

import pytest

from swapd.core import Residency, actions, events, status
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.core.ledger import HITS_MAX, NAMES_MAX, OTHERS, Ledger, observe
from swapd.core.records import Rules
from swapd.shared import protocol
from swapd.shared.protocol import NAMES_SHOWN, WAITS_SHOWN
from tests.core import driver
from tests.core.world import World


def counted(chunks: int, chunk_bytes: int, rules: Rules) -> Residency:
    """A core that compares its counts with its records after every event."""
    seen: Counter[str] = Counter()
    copies: dict[int, str] = {}

    class Counted(Residency):
        def handle(self, event: AnyEvent) -> list[AnyAction]:
            done = super().handle(event)
            if isinstance(event, events.CopiedIn | events.CopiedOut):
                seen[copies.pop(event.generation)] += 1
            for action in done:
                match action:
                    case actions.CopyIn():
                        copies[action.generation] = "in"
                    case actions.CopyOut():
                        copies[action.generation] = "out"
                    case actions.Grant() if (action.session, action.request) not in starting(self):
                        seen["grants"] += 1
                    case actions.Refuse():
                        seen["skips" if action.tried else "refusals"] += 1
                    case _:
                        pass
            compare(self, seen)
            return done

    return Counted(chunks, chunk_bytes, rules)


def starting(core: Residency) -> set[tuple[int, int]]:
    return set(core.ledger.starts)


def compare(core: Residency, seen: Counter[str]) -> None:
    counts = core.ledger.counts
    for histogram, what in ((counts.copy_in_s, "in"), (counts.copy_out_s, "out")):
        assert sum(histogram.counts) == seen[what]
    assert sum(counts.wait_s.counts) == seen["grants"]
    assert sum(counts.hold_s.counts) == seen["grants"] - len(core.ledger.leases)
    told = [tally for tally in counts.of.values()]
    refused = sum(sum(tally.refusals.values()) for tally in told)
    assert refused + sum(tally.skips for tally in told) >= seen["refusals"] + seen["skips"]
    now = core.ledger.now
    waits, copies = status.waits(core, now), status.copies(core.ledger, now)
    assert len(waits) == min(len(core.ledger.queue), WAITS_SHOWN)
    assert all(wait.waited_s >= 0 for wait in waits)
    assert [copy.direction for copy in copies if copy.since_s is not None].count("in") <= 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_counts_are_those_of_the_records(seed: int, strict: bool) -> None:
    driver.drive(counted, seed, steps=300, strict=strict)


def test_an_acquire_that_only_tried_is_a_skip_and_no_refusal() -> None:
    w = World(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 6)
    w.use(s, "a")
    w.acquire(t, "b", timeout=0.0)
    w.acquire(t, "b", timeout=1.0)
    w.sleep(2.0)
    tally = w.ledger.counts.of["b"]
    assert (tally.skips, tally.refusals) == (1, {"timeout": 1})


def test_an_unknown_name_is_counted_among_the_others() -> None:
    w = World(10)
    w.acquire(w.open(), "nobody's")
    assert w.ledger.counts.of == {OTHERS: protocol.Tally(refusals={"unknown_component": 1})}


def test_parts_count_as_their_family_and_what_is_gone_as_others() -> None:
    w = World(10)
    s = w.open()
    for part in ("m/0", "m/1"):
        w.register(s, part, 1, part_of="m")
        w.touch(s, part)
    assert w.ledger.counts.of["m"].loads == 2
    for part, known in (("m/0", True), ("m/1", False)):
        w.unregister(s, part)
        assert ("m" in w.ledger.counts.of) is known
    assert w.ledger.counts.of[OTHERS].loads == w.ledger.loads == 2


def test_names_that_come_and_go_leave_their_sums_and_nothing_else() -> None:
    ledger = Ledger(1, 1, Rules())
    counts = ledger.counts
    for at in range(10 * NAMES_MAX):
        ledger.names = [f"c{at}"]
        ledger.know(f"c{at}").loads += 1
        if at % 2:
            ledger.forget(f"c{at}")
    assert len(counts.of) <= NAMES_MAX + 1
    assert sum(tally.loads for tally in counts.of.values()) == 10 * NAMES_MAX
    ledger.know("c0").hits = HITS_MAX
    counts.of[OTHERS].hits = HITS_MAX
    for name in list(counts.of.keys() - {OTHERS}):
        ledger.names = [name]
        ledger.forget(name)
    assert counts.of.keys() == {OTHERS}
    assert protocol.encode(counts), "the sum fits into a message"


def test_a_time_is_counted_in_one_class() -> None:
    histogram = protocol.Histogram((0.1, 1.0), [0, 0, 0])
    for seconds in (0.1, 0.5, 2.0):
        observe(histogram, seconds)
    assert histogram.counts == [1, 1, 1]
    assert histogram.sum == pytest.approx(2.6)


def test_status_lists_the_longest_waits_with_their_reason() -> None:
    w = World(100)
    s = w.open()
    for at in range(20):
        w.register(s, f"c{at}", 5)
    held = w.use(s, *(f"c{at}" for at in range(20)))
    w.register(s, "wanted", 90)
    w.sleep(1.0)
    for _ in range(WAITS_SHOWN + 5):
        w.acquire(w.open(), "wanted", *(f"c{at}" for at in range(2)))
    found = status.waits(w.core, w.now + 2.0)
    assert len(found) == WAITS_SHOWN
    assert found[0].waited_s == pytest.approx(2.0)
    assert "held: " in found[0].why
    assert (found[0].names[0], found[0].count <= NAMES_SHOWN) == ("wanted", True)
    w.release(held)


def test_a_copy_is_under_way_and_the_next_waits() -> None:
    w = World(20)
    s = w.open()
    for name, nbytes in (("a", 4), ("b", 8), ("c", 4)):
        w.register(s, name, nbytes)
    w.acquire(s, "a")
    (first,) = status.copies(w.ledger, w.now)
    assert (first.name, first.direction, first.since_s, first.bytes_per_s) == ("a", "in", 0.0, None)
    w.now += 2.0
    w.settle()
    w.acquire(s, "b")
    w.acquire(s, "c")
    first, second = status.copies(w.ledger, w.now + 1.0)
    assert (first.name, first.nbytes, first.since_s, first.bytes_per_s) == ("b", 8, 1.0, 2.0)
    assert (second.name, second.since_s) == ("c", None)
