"""How long a component stays, and which sessions hear that it is wanted."""

from itertools import pairwise

import pytest

from swapd.core.actions import Waiting
from swapd.core.planner import CLOSED_S
from swapd.core.records import Key
from swapd.core.states import State
from tests.core.rules.common import blocked
from tests.core.world import Make, World


def rivals(make: Make, **rules: float) -> tuple[World, int, int]:
    """Two sessions with a component each, `a` and `b`, and room for one of them."""
    w = make(10, **rules)
    s, t = w.open(), w.open()
    w.register(s, "a", 8)
    w.register(t, "b", 8)
    return w, s, t


def loops(
    make: Make, stages: list[tuple[float, float]], seconds: float, swap_s: float, **rules: float
) -> tuple[list[int], int]:
    """Stages that use their component for so long again and again, with such a gap in between, and
    have room for one: count the steps of each, and the evictions."""
    w = make(10, **rules)
    sessions = [w.open() for _ in stages]
    for s in sessions:
        w.register(s, f"c{s}", 8)
    steps, uses, waits = dict.fromkeys(sessions, 0), dict[int, float](), dict[int, Key]()
    asks, copied = dict.fromkeys(sessions, 0.0), float("inf")
    while w.now < seconds:
        for s, (use_s, gap_s) in zip(sessions, stages, strict=True):
            if uses.get(s, seconds) <= w.now:
                w.release(waits[s])
                steps[s] += 1
                asks[s] = uses.pop(s) + gap_s
            if asks.get(s, seconds) <= w.now:
                waits[s] = w.acquire(s, f"c{s}")
                del asks[s]
            if copied <= w.now:
                w.settle()
                copied = float("inf")
            if s not in uses and s not in asks and w.granted(waits[s]):
                uses[s] = w.now + use_s
        copied = min(copied, w.now + swap_s) if w.moves else float("inf")
        due = min([*uses.values(), *asks.values(), copied, w.core.next_deadline() or seconds])
        w.sleep(max(due - w.now, 1e-4))
    return list(steps.values()), len(w.evictions())


def test_two_busy_agents_do_not_swap_at_every_step(make: Make) -> None:
    decode = [(0.01, 0.0), (0.01, 0.0)]
    without_steps, without = loops(make, decode, 6.0, 0.1, residency_factor=0.0)
    steps, evictions = loops(make, decode, 6.0, 0.1)
    assert evictions <= without / 4
    assert min(steps) >= 4 * min(without_steps)


def test_a_stage_of_short_steps_gets_as_long_a_turn_as_one_of_long_steps(make: Make) -> None:
    """The longer its gaps, the fewer steps it makes in its turn; no gap of a few milliseconds takes
    its turn away."""
    made = []
    for gap_s in (0.0, 0.015, 0.03, 0.06, 0.1):
        (short, long), _ = loops(make, [(0.01, gap_s), (1.0, 0.0)], 16.0, 0.02)
        assert long >= 8, "it has half of the time"
        made.append(short)
    assert made == sorted(made, reverse=True)
    assert made[0] > 400
    assert made[2] > 100
    assert all(less > more / 4 for more, less in pairwise(made))


def test_a_stage_that_comes_back_late_delays_nobody(make: Make) -> None:
    pair = [(0.01, 0.4), (1.0, 0.0)]
    with_rule, without = (loops(make, pair, 16.0, 0.02, residency_factor=f) for f in (8.0, 0.0))
    assert with_rule == without


def pipeline(make: Make, **rules: float) -> float:
    """a, b, a, b, ... in sequence, with room for one: return the total time."""
    w, s, t = rivals(make, **rules)
    for session, name in [(s, "a"), (t, "b")] * 20:
        key = w.acquire(session, name)
        while not w.granted(key):
            if w.moves:
                w.sleep(0.1)
                w.settle()
            else:
                w.sleep(0.001)
        w.sleep(0.01)
        w.release(key)
    return w.now


def test_a_plain_pipeline_is_not_delayed(make: Make) -> None:
    assert pipeline(make) == pytest.approx(pipeline(make, residency_factor=0.0))


def busy(w: World, session: int, name: str) -> None:
    """Load in 1 s, and return at once, so that the core sees the component in use."""
    key = w.acquire(session, name)
    w.sleep(1.0)
    w.settle()
    w.release(key)
    w.touch(session, name)


def test_a_busy_component_stays_until_its_owner_fails_to_come_back(make: Make) -> None:
    w, s, t = rivals(make)
    busy(w, s, "a")
    w.acquire(t, "b")
    assert w.evictions() == []
    (waiting,) = [a for a in w.log if isinstance(a, Waiting)]
    assert "kept for the minimum residency: a" in waiting.why
    assert w.core.next_deadline() == pytest.approx(1.5)
    w.sleep(0.5)
    assert w.evictions() == ["a"]


def test_a_busy_component_stays_no_longer_than_the_bound(make: Make) -> None:
    w, s, t = rivals(make, residency_bound_s=0.2)
    busy(w, s, "a")
    w.acquire(t, "b")
    w.sleep(0.19)
    assert w.evictions() == []
    w.sleep(0.02)
    assert w.evictions() == ["a"]


def test_a_holder_is_told_it_is_wanted_once_its_quantum_is_over(make: Make) -> None:
    w, s, t = rivals(make)
    key = w.acquire(s, "a")
    w.sleep(0.1)
    w.move("a")
    w.acquire(t, "b")
    assert not w.wanted
    w.sleep(0.79)
    assert not w.wanted
    w.sleep(0.02)
    assert w.wanted == {(s, "a")}
    w.release(key)
    assert not w.wanted
    assert w.state("b") is State.LOADING


def test_a_waiter_that_came_before_the_copy_ended_is_heard_too(make: Make) -> None:
    """It could hurry nobody then: there was no lease yet."""
    w, s, t = rivals(make)
    w.acquire(s, "a")
    w.acquire(t, "b")
    w.sleep(0.1)
    w.move("a")
    w.sleep(0.8)
    assert w.wanted == {(s, "a")}


def test_wanted_is_unsaid_when_the_waiter_goes(make: Make) -> None:
    w, _, others = blocked(make)
    key = w.acquire(others[0], "c0")
    assert w.wanted == {(7001, "held")}
    w.cancel(key)
    assert w.told() == ["unwant held"]


def test_who_holds_is_told_at_once_that_somebody_waits(make: Make) -> None:
    """The quantum does not matter: the holder may keep a component that it does not use."""
    w, s, t = rivals(make)
    key = w.acquire(s, "a")
    w.sleep(0.1)
    w.move("a")
    assert not w.hurried
    waiter = w.acquire(t, "b")
    assert w.hurried == {s}
    assert not w.wanted
    w.release(key)
    assert not w.hurried
    w.settle()
    assert w.granted(waiter)


def test_all_that_hold_are_told_not_only_who_is_in_the_way(make: Make) -> None:
    """The other one may be unused."""
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "a", 2), (t, "b", 8), (u, "c", 8)):
        w.register(session, name, size)
    w.use(s, "a")
    w.use(t, "b")
    key = w.acquire(u, "c")
    assert w.hurried == {s, t}
    w.cancel(key)
    assert not w.hurried


def test_who_comes_to_hold_while_somebody_waits_is_told_too(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "a", 2), (t, "b", 8), (u, "c", 8)):
        w.register(session, name, size)
    w.use(t, "b")
    waiter = w.acquire(u, "c")
    assert w.hurried == {t}
    w.acquire(s, "a", priority=1)
    w.move("a")
    assert w.hurried == {s, t}
    w.leave(t)
    w.settle()
    assert w.granted(waiter)
    assert not w.hurried


def test_nobody_need_hurry_for_what_comes_in_anyway(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for session, name, size in ((s, "a", 4), (s, "b", 4), (t, "c", 6)):
        w.register(session, name, size)
    w.use(s, "a")
    w.release(w.use(s, "b"))
    w.acquire(t, "c")
    assert not w.hurried
    w.prefetch(s, "b")
    assert not w.hurried


def test_only_those_are_wanted_whose_memory_is_needed(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "a", 2), (t, "b", 8), (u, "c", 8)):
        w.register(session, name, size)
    w.use(s, "a")
    w.use(t, "b")
    w.acquire(u, "c")
    assert w.wanted == {(t, "b")}


def test_a_rival_that_gives_way_counts_as_room(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    w.register(s, "x", 5)
    w.register(t, "a", 5, policy="alternating", group="g")
    w.register(u, "b", 5, policy="alternating", group="g")
    w.use(s, "x")
    w.use(t, "a")
    w.acquire(u, "b")
    assert w.wanted == {(t, "a")}


def test_a_wanted_component_takes_no_new_holders_but_its_holder(make: Make) -> None:
    w = make(10, overtake=0)
    s, t, u = w.open(), w.open(), w.open()
    w.register(s, "a", 8)
    w.register(t, "b", 8)
    first = w.use(s, "a")
    waiter = w.acquire(t, "b")
    again = w.acquire(s, "a")
    assert w.granted(again), "the agent that holds it could not go on otherwise"
    other = w.acquire(u, "a")
    assert not w.granted(other)
    w.release(first)
    assert w.evictions() == []
    w.release(again)
    w.settle()
    assert w.granted(waiter)
    assert not w.granted(other)


def test_leases_of_one_session_that_overlap_do_not_keep_others_out(make: Make) -> None:
    w, s, t = rivals(make)
    held = w.use(s, "a")
    waiter = w.acquire(t, "b")
    for agent in range(1, 20):  # each takes it before the previous one has released it
        w.sleep(0.1)
        taken = w.acquire(s, "a", agent=agent)
        w.sleep(0.1)
        w.release(held)
        w.settle()
        if w.granted(waiter):
            break
        held = taken
    assert w.granted(waiter)
    assert not w.granted(taken), "it waits for its turn"
    w.release(waiter)
    w.settle()
    assert w.granted(taken)


def test_an_agent_that_another_of_its_session_waits_for_is_held_off_for_a_while_only(
    make: Make,
) -> None:
    """A holder may have started the others and wait for them, unseen by the core."""
    w, s, t = rivals(make, overtake=0)
    w.use(s, "a")
    w.acquire(t, "b")
    waited = []
    for agent in range(1, 5):
        asked = w.now
        started = w.acquire(s, "a", agent=agent)
        assert not w.granted(started)
        while not w.granted(started):
            due = w.core.next_deadline()
            assert due is not None
            w.sleep(due - w.now)
        waited.append(w.now - asked)
    assert waited == [CLOSED_S, 2 * CLOSED_S, 4 * CLOSED_S, 8 * CLOSED_S]


def test_so_it_is_with_what_could_go_instead_of_what_is_in_the_way(make: Make) -> None:
    w = make(20, overtake=0, residency_factor=0.0)
    s, t = w.open(), w.open()
    for session, name in ((s, "a"), (s, "other"), (t, "b")):
        w.register(session, name, 10)
    w.use(s, "a")
    w.use(s, "other")
    w.acquire(t, "b")
    assert w.core.ledger.in_the_way == {"a"}
    for agent, held_off in ((1, CLOSED_S), (2, 2 * CLOSED_S)):
        started = w.acquire(s, "other", agent=agent)
        assert not w.granted(started)
        assert w.core.next_deadline() == w.now + held_off
        w.sleep(held_off)
        assert w.granted(started)


def test_an_agent_of_another_session_is_held_off_until_its_turn(make: Make) -> None:
    w = make(10, overtake=0)
    s, t, u = w.open(), w.open(), w.open()
    w.register(s, "a", 8)
    w.register(t, "b", 8)
    w.use(s, "a")
    w.acquire(t, "b")
    other = w.acquire(u, "a")
    w.sleep(100 * CLOSED_S)
    assert not w.granted(other)


def test_who_was_held_off_a_wanted_component_joins_when_it_is_wanted_no_more(
    make: Make,
) -> None:
    w = make(10, overtake=0)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "a", 4), (t, "b", 6), (u, "c", 5), (u, "d", 8)):
        w.register(session, name, size)
    w.use(s, "a")
    key_b = w.use(t, "b")
    both = w.acquire(u, "d")
    assert w.wanted == {(s, "a"), (t, "b")}
    w.acquire(u, "c", agent=1)
    behind = w.acquire(u, "a", agent=2)
    assert not w.granted(behind)
    w.cancel(both)
    assert w.wanted == {(t, "b")}
    assert w.granted(behind, key_b)


def test_two_that_take_turns_do_not_starve_one_that_needs_both(make: Make) -> None:
    """One comes back while the other is away: the memory that was given up stays given up."""
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "a", 5), (t, "b", 5), (u, "big", 10)):
        w.register(session, name, size)
    leases = {}
    for session, name in ((s, "a"), (t, "b")):
        leases[session, name] = w.acquire(session, name)
        w.sleep(0.1)
        w.settle()
    big = w.acquire(u, "big")
    for session, name in list(leases) * 30:
        w.sleep(0.1)
        if w.granted(leases[session, name]):
            w.release(leases[session, name])
            leases[session, name] = w.acquire(session, name)
        w.settle()
        if big in w.answers:
            return
    raise AssertionError("starved")


def test_a_higher_priority_ends_the_minimum_residency_at_the_next_release(make: Make) -> None:
    w, s, t = rivals(make)
    busy(w, s, "a")
    held = w.use(s, "a")
    equal = w.acquire(t, "b")
    assert not w.wanted
    w.cancel(equal)
    w.acquire(t, "b", priority=1)
    assert w.wanted == {(s, "a")}
    w.release(held)
    assert w.evictions() == ["a"]


def test_a_component_that_a_higher_priority_holds_stays_for_its_quantum(make: Make) -> None:
    w, s, t = rivals(make)
    busy(w, s, "a")
    held = w.acquire(s, "a", priority=2)
    w.acquire(t, "b", priority=1)
    assert not w.wanted
    w.release(held)
    assert w.evictions() == []
