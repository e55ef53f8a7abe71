"""The counts in the status are those of the recorded events and actions."""

from collections import Counter
from typing import Any

import pytest

from swapd.core import Residency, actions, events, status
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.core.ledger import HITS_MAX, NAMES_MAX, OTHERS, Ledger, observe
from swapd.core.records import Rules
from swapd.shared import protocol
from swapd.shared.protocol import NAMES_SHOWN, WAITS_SHOWN, WASTED_LAST, WASTED_S
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
                        copies[action.generation] = "joined" if action.joins else "in"
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
    assert w.ledger.counts.of.keys() == {OTHERS}
    assert w.ledger.counts.of[OTHERS].refusals == {"unknown_component": 1}


def test_waits_are_counted_by_what_was_asked_for_and_stay_when_it_is_gone() -> None:
    w = World(10)
    s = w.open()
    for part in ("m/0", "m/1"):
        w.register(s, part, 2, part_of="m")
    w.register(s, "a", 8)
    of, all_waits = w.ledger.counts.of, w.ledger.counts.wait_s.counts
    family = w.use(s, "m")
    later = w.acquire(s, "a", agent=1)
    w.sleep(0.3)
    w.release(family)
    w.settle()
    assert sum(of["m"].waits) == 1, "one acquire, whatever its parts"
    assert of["a"].waits == counted_once(0.3)
    w.release(later)
    w.unregister(s, "a")
    assert "a" not in of
    assert [a + b for a, b in zip(of["m"].waits, of[OTHERS].waits, strict=True)] == all_waits


def counted_once(seconds: float) -> list[int]:
    """The counts of one time."""
    histogram = Ledger(1, 1, Rules()).counts.wait_s
    observe(histogram, seconds)
    return histogram.counts


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


def test_uses_that_a_release_tells_of_count_as_hits() -> None:
    w = World(10)
    s = w.open()
    w.register(s, "a", 1)
    w.release(w.use(s, "a"), again=3)
    assert [w.ledger.hits, w.ledger.counts.of["a"].hits, w.ledger.components["a"].hits] == [3] * 3


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


def in_turn(w: World, rounds: int, *names: str, pause_s: float = 1.0) -> None:
    """Use these in turn, each load a second long."""
    session = w.owner[names[0]]
    for _ in range(rounds):
        for name in names:
            key = w.acquire(session, name)
            w.now += 1.0
            w.settle()
            w.release(key)
            w.sleep(pause_s)


def a_pair(**terms: Any) -> World:
    """Two components, of which one fits at a time."""
    w = World(10, residency_bound_s=0.0)
    s = w.open()
    for name in ("a", "b"):
        w.register(s, name, 6, **terms)
    return w


def test_a_load_soon_after_its_component_made_room_is_wasted() -> None:
    w = a_pair()
    in_turn(w, 5, "a", "b")
    of = w.ledger.counts.of
    assert [(of[n].loads, of[n].wasted) for n in "ab"] == [(5, 4), (5, 4)]
    found = [status.component_status(w.ledger, w.ledger.components[n], w.now) for n in "ab"]
    assert [c.wasted for c in found] == [4, 4]


def test_the_last_wasted_loads_say_how_long_they_took_and_what_was_found() -> None:
    w = a_pair()
    in_turn(w, 4, "a", "b")
    assert status.wasted(w.ledger, w.now) is None, "of eight loads six are wasted"
    in_turn(w, 1, "a", "b")
    assert status.wasted(w.ledger, w.now + 3.0) == protocol.WastedLoads(4.0, 14.0, 7.0, 0)
    w.touch(w.owner["b"], "b")
    in_turn(w, 1, "a")
    assert status.wasted(w.ledger, w.now) == protocol.WastedLoads(1.0, 14.0, 7.0, 1)


def test_wasted_loads_of_what_is_gone_count_no_more_and_the_others_do() -> None:
    w = a_pair()
    in_turn(w, 5, "a", "b")
    w.unregister(w.owner["a"], "a")
    assert [name for _, name, *_ in w.ledger.wasted] == ["b"] * (WASTED_LAST // 2)


def test_a_load_long_after_its_component_left_is_not_wasted() -> None:
    w = a_pair()
    in_turn(w, 6, "a", "b", pause_s=WASTED_S)
    assert w.ledger.counts.of["a"].loads == 6
    assert not any(tally.wasted for tally in w.ledger.counts.of.values())


def test_what_leaves_on_its_own_or_as_it_is_told_wastes_no_load() -> None:
    w = World(10)
    s = w.open()
    w.register(s, "passes", 6, policy="sequential")
    w.register(s, "told", 2)
    for _ in range(2 * WASTED_LAST):
        w.touch(s, "passes")
        w.touch(s, "told")
        w.evict_now(s, "told")
        w.settle()
    assert w.ledger.counts.of["told"].loads == 2 * WASTED_LAST
    assert not any(tally.wasted for tally in w.ledger.counts.of.values())


def test_members_of_an_alternating_group_waste_the_loads_of_each_other() -> None:
    w = World(20, residency_bound_s=0.0)
    s = w.open()
    for name in ("a", "b"):
        w.register(s, name, 6, policy="alternating", group="g")
    in_turn(w, 5, "a", "b")
    assert w.ledger.counts.of["a"].wasted == 4


def test_the_parts_of_a_family_come_back_as_one() -> None:
    w = World(10, residency_bound_s=0.0)
    s = w.open()
    parts = [f"m/{at}" for at in range(WASTED_LAST)]
    for part in parts:
        w.register(s, part, 1, part_of="m")
    w.register(s, "b", 10)
    for _ in range(3):
        w.touch(s, "m")
        w.touch(s, "b")
    assert w.ledger.counts.of["m"].wasted == 2 * WASTED_LAST
    assert status.wasted(w.ledger, w.now) is None
    assert len(w.ledger.wasted) == 4


def test_what_is_gone_has_wasted_as_much_and_takes_turns_no_more() -> None:
    w = a_pair()
    in_turn(w, 5, "a", "b")
    assert status.wasted(w.ledger, w.now)
    w.unregister(w.owner["a"], "a")
    assert w.ledger.counts.of[OTHERS].wasted == 4
    assert status.wasted(w.ledger, w.now) is None, "b has nobody to take turns with"
    assert len(w.ledger.wasted) == 4
