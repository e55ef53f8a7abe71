"""Who needs no memory may go before others, and overtakes nobody more often than the rules say."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapd.core.actions import Waiting
from swapd.core.planner import CLOSED_S
from swapd.core.records import Key
from tests.core.driver import EXAMPLES
from tests.core.world import Make, World

BOUND = 3


def crowd(w: World, name: str, n: int, **how: Any) -> list[Key]:
    """Acquires of one component, each by a session of its own."""
    return [w.acquire(w.open(), name, **how) for _ in range(n)]


def wait_for(make: Make, **rules: Any) -> tuple[World, Key, Key]:
    """`a` is leased, and the first in the queue waits for its memory to have `b`."""
    w = make(10, overtake=BOUND, **rules)
    s, t = w.open(), w.open()
    w.register(s, "a", 10)
    w.register(t, "b", 10)
    held = w.use(s, "a")
    return w, held, w.acquire(t, "b")


def granted(w: World, keys: list[Key]) -> list[bool]:
    return [w.granted(key) for key in keys]


def test_who_may_not_overtake_is_told_for_whom_it_waits(make: Make) -> None:
    w, _, _ = wait_for(make)
    late = crowd(w, "a", BOUND + 1)[-1]
    (why,) = [a.why for a in w.log if isinstance(a, Waiting) and (a.session, a.request) == late]
    assert "all of it is in, but worker (session 7002) waits for its memory to have b" in why


def test_several_of_which_one_is_closed_are_shared_when_it_opens(make: Make) -> None:
    w = make(20, overtake=0, residency_factor=0.0)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "a", 14), (s, "d", 6), (t, "b", 10)):
        w.register(session, name, size)
    w.use(s, "a")
    first = w.acquire(t, "b")
    both = w.acquire(u, "a", "d")
    w.use(s, "d")
    assert not w.granted(both)
    w.cancel(first)
    w.settle()
    assert w.granted(both)


def test_some_share_what_must_go_for_another_and_not_more(make: Make) -> None:
    w, held, first = wait_for(make)
    others = crowd(w, "a", 5)
    assert granted(w, others) == [True, True, True, False, False]
    for key in (held, *others[:3]):
        w.release(key)
    w.settle()
    assert w.granted(first)
    w.release(first)
    w.settle()
    assert granted(w, others[3:]) == [True, True]


def test_who_is_queued_for_what_it_had_last_waits_its_turn_whoever_is_the_head(make: Make) -> None:
    w = make(10, overtake=0)
    s, t, u, v = (w.open() for _ in range(4))
    for session, name in ((s, "a"), (t, "b"), (u, "long")):
        w.register(session, name, 10)
    slow = w.use(u, "long")
    w.sleep(1.5)
    w.release(slow)
    w.release(w.use(s, "a"))
    w.use(v, "a")
    w.release(w.use(s, "a"))  # the last that had it
    w.sleep(1.0)
    first = w.acquire(t, "b")
    then = w.acquire(u, "long")
    back = w.acquire(s, "a")
    assert granted(w, [first, then, back]) == [False] * 3
    w.cancel(first)  # a stays longer for one of long uses
    assert not w.granted(back)
    w.cancel(then)
    assert w.granted(back)


def test_those_that_waited_for_the_same_load_are_bound_too(make: Make) -> None:
    w, held, _ = wait_for(make)
    w.register(w.open(), "c", 10)
    second = w.acquire(w.open(), "c")
    waiting = crowd(w, "b", 5)
    w.release(held)
    later = crowd(w, "b", 2)
    w.settle()
    assert granted(w, waiting) == [True, True, True, False, False]
    assert not any(granted(w, [second, *later]))


def test_a_waiter_may_say_how_many_overtake_it(make: Make) -> None:
    w, _, first = wait_for(make)
    w.cancel(first)
    w.acquire(w.open(), "b", overtake=1)
    others = crowd(w, "a", 3)
    assert granted(w, others) == [True, False, False]


def test_a_group_and_a_component_may_have_a_bound_of_their_own(make: Make) -> None:
    w, _, _ = wait_for(make, overtake_of=(("b", 1), ("a", 0)))
    waiting = crowd(w, "a", 3)
    assert granted(w, waiting) == [True, False, False]
    w.change_rules(overtake_of=(("b", 2),))
    assert granted(w, waiting) == [True, True, False]
    w = make(10, residency_factor=0.0, overtake_of=(("images", 0),))
    s = w.open()
    for name in ("a", "b"):
        w.register(s, name, 8, policy="alternating", group="images")
    w.use(s, "a")
    w.acquire(w.open(), "b")
    assert not any(granted(w, crowd(w, "a", 2)))


def test_an_agent_that_got_in_has_its_other_requests_for_the_same(make: Make) -> None:
    w = make(10, overtake=0)
    s, t = w.open(), w.open()
    w.register(s, "a", 10)
    w.register(t, "b", 10)
    w.use(s, "a")
    w.acquire(t, "b")
    waiting = [w.acquire(s, "a", agent=5) for _ in range(3)]
    assert granted(w, waiting) == [False, False, False]
    w.sleep(CLOSED_S)
    assert granted(w, waiting) == [True, True, True]


def test_what_is_in_nobodys_way_is_shared_without_a_bound(make: Make) -> None:
    w = make(10, overtake=0)
    s, t = w.open(), w.open()
    for session, name, size in ((s, "a", 8), (s, "small", 2), (t, "b", 8)):
        w.register(session, name, size)
    w.use(s, "a")
    w.use(s, "small")
    w.acquire(t, "b")
    assert all(granted(w, crowd(w, "small", 20)))


def test_nobody_overtakes_who_says_when_it_is_wanted(make: Make) -> None:
    w, _, first = wait_for(make)
    w.cancel(first)
    wanted = w.acquire(w.open(), "b", due=60.0)
    assert not any(granted(w, crowd(w, "a", 2)))
    sooner = w.acquire(w.open(), "a", due=1.0)
    assert w.granted(sooner), "it finds all in"
    assert not w.granted(wanted)


def test_who_is_wanted_sooner_goes_first_and_then_who_came_first(make: Make) -> None:
    w, held, first = wait_for(make, residency_factor=0.0)
    for name in "cde":
        w.register(w.open(), name, 10)
    late, soon = w.acquire(w.open(), "c", due=60.0), w.acquire(w.open(), "d", due=1.0)
    urgent = w.acquire(w.open(), "e", priority=1)
    for key in (urgent, soon, late, first):
        w.release(held)
        w.settle()
        assert granted(w, [key]) == [True]
        held = key


def test_infinity_is_no_time_at_which_it_is_wanted(make: Make) -> None:
    """The swap log writes it as null, and a replay would decide otherwise."""
    w, held, first = wait_for(make, residency_factor=0.0)
    w.register(w.open(), "c", 10)
    never = w.acquire(w.open(), "c", due=math.inf)
    w.release(held)
    w.settle()
    assert granted(w, [first, never]) == [True, False]


def test_who_is_behind_one_that_is_wanted_sooner_is_told_so(make: Make) -> None:
    w, _, first = wait_for(make)
    w.cancel(first)
    w.acquire(w.open(), "b", due=1.0)
    behind = w.acquire(w.open(), "b")
    (why,) = [a.why for a in w.log if isinstance(a, Waiting) and (a.session, a.request) == behind]
    assert "which is wanted sooner and needs" in why


def test_a_deadline_that_has_passed_is_no_end_and_patience_rules_over_it(make: Make) -> None:
    w, held, first = wait_for(make, residency_factor=0.0, patience_s=5.0)
    w.register(w.open(), "c", 10)
    soon = w.acquire(w.open(), "c", due=0.0)
    w.sleep(5.0)
    w.release(held)
    w.settle()
    assert w.granted(first)
    assert not w.granted(soon)
    w.release(first)
    w.settle()
    assert w.granted(soon)


def test_a_higher_priority_is_not_counted(make: Make) -> None:
    w, _, _ = wait_for(make)
    assert all(granted(w, crowd(w, "a", 10, priority=1)))
    assert granted(w, crowd(w, "a", 4)) == [True, True, True, False]


def test_whoever_has_waited_long_is_overtaken_by_no_more_of_a_higher_priority(make: Make) -> None:
    w, _, first = wait_for(make, patience_s=5.0)
    w.acquire(w.open(), "b", priority=1)
    w.sleep(5.0)
    assert granted(w, crowd(w, "a", 4, priority=2)) == [True, True, True, False]
    assert not w.granted(first)


def test_nobody_overtakes_once_the_turn_is_over(make: Make) -> None:
    w, _, _ = wait_for(make, turn_s=4.0)
    assert granted(w, crowd(w, "a", 1)) == [True]
    w.sleep(4.0)
    assert granted(w, crowd(w, "a", 1)) == [False]


def test_the_minimum_residency_ends_with_the_turn(make: Make) -> None:
    w = make(10, residency_factor=8.0, residency_bound_s=100.0, turn_s=2.0)
    s, t = w.open(), w.open()
    w.register(s, "a", 10)
    w.register(t, "b", 10)
    w.acquire(s, "a")
    w.sleep(1.0)
    w.settle()
    w.acquire(t, "b")
    assert not w.wanted
    w.sleep(2.0)
    assert w.wanted == {(s, "a")}


def test_a_loop_goes_on_within_the_minimum_residency_however_many_steps_it_has(make: Make) -> None:
    w = make(10, overtake=0, residency_factor=8.0, residency_bound_s=2.0)
    s, t = w.open(), w.open()
    w.register(s, "a", 10)
    w.register(t, "b", 10)
    loop = w.acquire(s, "a")
    w.sleep(1.0)
    w.settle()
    w.release(loop)
    w.touch(s, "a")
    first = w.acquire(t, "b")
    steps = 0
    while not w.granted(first) and steps < 100:
        loop = w.acquire(s, "a")
        w.sleep(0.1)
        if not w.granted(loop):
            break
        w.release(loop)
        steps += 1
        w.settle()
    assert 15 <= steps < 25


def test_rules_that_change_bind_those_that_wait(make: Make) -> None:
    w, _, _ = wait_for(make)
    w.change_rules(overtake=1)
    assert granted(w, crowd(w, "a", 3)) == [True, False, False]


@settings(max_examples=EXAMPLES // 2)
@given(
    st.lists(st.sampled_from("abcR"), min_size=10, max_size=80),
    st.integers(0, 4),
    st.sampled_from((10, 20)),
)
def test_nobody_is_overtaken_more_often_by_what_needs_its_memory(
    steps: list[str], bound: int, chunks: int
) -> None:
    """Each letter is an acquire of that component by a session of its own, R a release.

    It counts for the first one that waits.
    """
    w = World(chunks, overtake=bound, residency_factor=0.0)
    s = w.open()
    for name in "abc":
        w.register(s, name, 10)
    waiting: list[Key] = []
    held: list[Key] = []
    overtaken: Counter[Key] = Counter()

    def settle() -> None:
        w.settle()
        for key in [key for key in waiting if w.granted(key)]:
            if key != waiting[0]:
                overtaken[waiting[0]] += 1
            waiting.remove(key)
            held.append(key)

    for step in (*steps, *"R" * len(steps)):
        if step == "R" and held:
            w.release(held.pop(0))
        elif step != "R":
            waiting.append(w.acquire(w.open(), step))
        settle()
    assert not waiting, "a wait without end"
    assert max(overtaken.values(), default=0) <= bound


def test_hundreds_of_one_agent_that_waited_are_granted_in_one_event(make: Make) -> None:
    """Each may be what lets the next one go on; Python's stack has a thousand frames."""
    w = make(10, overtake=0)
    s, t = w.open(), w.open()
    w.register(s, "a", 10)
    w.register(s, "b", 10)
    w.use(s, "a")
    head = w.acquire(w.open(), "b")
    keys = [w.acquire(t, "a", agent=1) for _ in range(400)]
    assert not w.granted(keys[0])
    w.cancel(head)
    assert all(granted(w, keys))


def test_uses_of_no_time_are_worth_as_many_as_the_rules_say(make: Make) -> None:
    """A worker that says 2,500 times that its use ended before it began comes to that number."""
    w = make(10, overtake=BOUND)
    s = w.open()
    w.register(s, "a", 10)
    w.register(s, "b", 10)
    first = w.acquire(s, "a")
    w.sleep(1.0)
    w.settle()
    w.ledger.components["a"].use_s = math.ulp(0.0)
    assert w.granted(first)
    w.acquire(w.open(), "b")
    assert granted(w, crowd(w, "a", BOUND + 1)) == [True] * BOUND + [False]


def test_no_more_overtake_than_the_load_is_worth(make: Make) -> None:
    """A load takes 1 s, and a use 30 s: two uses are 60 loads."""
    w = make(10, residency_factor=0.0)
    s, t = w.open(), w.open()
    w.register(s, "a", 10)
    w.register(t, "b", 10)
    held = w.acquire(s, "a")
    w.sleep(1.0)
    w.settle()
    w.sleep(30.0)
    w.release(held)
    held = w.acquire(s, "a")
    w.acquire(t, "b")
    assert granted(w, crowd(w, "a", 4)) == [True, True, False, False]


@pytest.mark.parametrize("bound", [0, 16])
def test_a_long_queue_moves_less_with_overtaking(make: Make, bound: int) -> None:
    w = make(10, overtake=bound, residency_factor=0.0)
    s = w.open()
    for name in "ab":
        w.register(s, name, 10)
    keys = [w.acquire(w.open(), "ab"[i % 2]) for i in range(32)]
    w.settle()
    left = list(keys)
    while left:
        (done, *_) = [key for key in left if w.granted(key)]
        left.remove(done)
        w.release(done)
        w.settle()
    loads = w.ledger.loads
    assert loads == (32 if bound == 0 else 2)
