"""Every wait ends."""

from tests.core.rules.common import blocked
from tests.core.world import Make


def test_a_deadline_refuses_and_says_who_holds_what(make: Make) -> None:
    w, _, others = blocked(make)
    key = w.acquire(others[0], "c0", timeout=3.0)
    w.sleep(2.9)
    assert w.core.next_deadline() == 3.0
    assert key not in w.answers
    w.sleep(0.1)
    refusal = w.refusal(key)
    assert refusal.code == "timeout"
    assert "c0 not granted in 3 s: needs 10 B, free 0 B; held: held (10 B)" in refusal.message
    assert "worker (session 7001)" in refusal.message


def test_the_record_tells_what_was_only_tried_from_what_was_refused(make: Make) -> None:
    w, _, others = blocked(make)
    tried = w.acquire(others[0], "c0", timeout=0.0)
    waited = w.acquire(others[0], "c0", timeout=3.0)
    w.sleep(3.0)
    assert (w.refusal(tried).tried, w.refusal(waited).tried) == (True, False)
    too_much = [w.acquire(others[0], "held", "c0", "c1", timeout=t) for t in (0.0, 3.0)]
    w.sleep(3.0)
    assert [w.refusal(key).tried for key in too_much] == [True, False]


def test_a_timeout_runs_from_when_it_was_asked(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 8)
    w.register(t, "b", 8)
    w.use(s, "a")
    w.sleep(100.0)
    key = w.acquire(t, "b", timeout=5.0)
    w.sleep(4.9)
    assert key in w.waiting
    w.sleep(0.1)
    assert w.refusal(key).code == "timeout"


def test_a_deadline_ends_a_wait_for_a_copy_and_the_copy_stays_useful(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a")
    key = w.acquire(s, "a", timeout=1.0)
    w.sleep(1.0)
    assert w.refusal(key).code == "timeout"
    w.move("a")
    assert "a" in w.ledger.idle


def test_a_deadline_ends_a_wait_for_a_name_and_says_which(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.ask_register(s, "filling")
    w.make_masters()
    keys = [
        w.acquire(s, name, timeout=1.0, await_registration=True) for name in ("unborn", "filling")
    ]
    w.sleep(1.0)
    for key, name in zip(keys, ("unborn", "filling"), strict=True):
        assert w.refusal(key).code == "timeout"
        assert f"not registered yet: {name}" in w.refusal(key).message


def test_a_try_is_granted_what_is_in_and_refused_all_else_at_once(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for name, size in (("a", 6), ("b", 6), ("c", 2)):
        w.register(s, name, size)
    w.touch(s, "a")
    tried = w.acquire(t, "a", timeout=0.0)
    assert w.granted(tried)
    w.release(tried)
    for name in "bc":
        refusal = w.refusal(w.acquire(t, name, timeout=0.0))
        assert w.told() == [f"refuse {refusal.request} timeout"], "no eviction, no load"
        assert refusal.message.startswith(f"{name} not granted in 0 s: needs ")


def test_a_try_does_not_wait_for_a_load_in_flight_or_for_what_is_wanted(make: Make) -> None:
    w = make(10, overtake=0)
    s, t, u = w.open(), w.open(), w.open()
    for name, size in (("a", 6), ("b", 6)):
        w.register(s, name, size)
    first = w.acquire(s, "a")
    assert w.refusal(w.acquire(t, "a", timeout=0.0)).code == "timeout"
    w.settle()
    assert w.granted(first)
    w.sleep(10.0)
    w.acquire(t, "b")
    assert (s, "a") in w.wanted
    assert w.refusal(w.acquire(u, "a", timeout=0.0)).code == "timeout"
    assert w.granted(w.acquire(s, "a", timeout=0.0)), "it holds it already"


def test_a_try_of_what_is_not_registered_is_not_parked(make: Make) -> None:
    w = make(10)
    s = w.open()
    refusal = w.refusal(w.acquire(s, "unborn", timeout=0.0, await_registration=True))
    assert refusal.code == "timeout"
    assert "not registered yet: unborn" in refusal.message
    assert w.told() == [f"refuse {refusal.request} timeout"]


def test_a_try_that_could_never_be_granted_is_told_so(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in "ab":
        w.register(s, name, 6)
    assert w.refusal(w.acquire(s, "a", "b", timeout=0.0)).code == "too_large"


def test_past_its_deadline_a_waiter_starts_nothing(make: Make) -> None:
    """The Tick is late: another event comes first."""
    w, held, (t, u, _) = blocked(make)
    late = w.acquire(t, "c0", timeout=1.0)
    next_one = w.acquire(u, "c1")
    w.now = 2.0
    w.release(held)
    assert w.refusal(late).code == "timeout"
    assert w.told()[-1] == "copy in c1"
    w.settle()
    assert w.granted(next_one)


def test_past_its_deadline_a_parked_waiter_starts_nothing(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    late = w.acquire(t, "a", timeout=1.0, await_registration=True)
    w.now = 2.0
    w.register(s, "a", 6)
    assert w.refusal(late).code == "timeout"
    assert w.moves == {}


def test_past_its_deadline_a_waiter_gets_what_came_in_for_it(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    late = w.acquire(s, "a", timeout=1.0)
    w.now = 2.0
    w.move("a")
    assert w.granted(late), "a copy that is there is better lent than refused"


def test_an_unknown_name_is_refused_with_names_near_it(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in ("talker", "thinker", "vae"):
        w.register(s, name)
    refusal = w.refusal(w.acquire(s, "talkre"))
    assert refusal.code == "unknown_component"
    assert "did you mean 'talker'" in refusal.message
    assert "'vae'" not in refusal.message
    assert "registered: talker, thinker, vae." in w.refusal(w.acquire(s, "zzz")).message


def test_a_component_that_is_not_committed_is_refused_with_that_reason(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.ask_register(s, "a")
    w.make_masters()
    refusal = w.refusal(w.acquire(s, "a"))
    assert refusal.code == "unknown_component"
    assert "still being registered" in refusal.message


def test_wait_parks_until_all_names_are_registered(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    key = w.acquire(s, "a", "b", await_registration=True)
    assert w.told() == [f"waiting {key[1]}"]
    w.register(t, "a")
    w.ask_register(t, "b")
    w.make_masters()
    assert w.moves == {}
    w.commit(t, "b")
    w.make_masters()
    assert w.told() == ["accept 5", "copy in a", "copy in b"]
    w.settle()
    assert w.granted(key)


def test_who_waits_for_names_delays_nobody(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 10)
    w.acquire(s, "unborn", await_registration=True, priority=9)
    assert w.granted(w.use(s, "a", agent=1))


def test_too_large_for_the_budget_is_refused_at_registration(make: Make) -> None:
    w = make(10)
    s = w.open()
    refusal = w.refusal(w.ask_register(s, "a", 11))
    assert refusal.code == "too_large"
    assert "needs 11 B; the budget is 10 B" in refusal.message
    w.register(s, "a", 10)


def test_several_that_are_too_large_together_are_refused(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 6)
    refusal = w.refusal(w.acquire(s, "a", "b"))
    assert refusal.code == "too_large"
    assert refusal.message.startswith("a + b needs 12 B; the budget is 10 B")


def test_too_large_beside_what_is_permanent_is_refused(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "r", 3, policy="permanent")
    w.register(s, "a", 8)
    w.touch(s, "a")
    w.touch(s, "r")
    refusal = w.refusal(w.acquire(s, "a"))
    assert refusal.code == "too_large"
    assert "beside 3 B that never leave" in refusal.message


def test_a_waiter_is_refused_when_a_permanent_component_takes_its_room(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "r", 3, policy="permanent")
    w.register(s, "x", 8)
    w.register(t, "a", 8)
    held = w.use(s, "x")
    w.acquire(s, "r", agent=1)
    key = w.acquire(t, "a")
    w.release(held)
    assert w.refusal(key).code == "too_large"


def test_who_waits_behind_a_waiter_refused_for_room_goes_on_at_once(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for name, size in (("x", 9), ("big", 8), ("small", 2)):
        w.register(s, name, size)
    w.register(s, "r", 3, policy="permanent")
    held = w.use(s, "x")
    keys = [w.acquire(t, name, agent=i) for i, name in enumerate(("r", "big", "small"))]
    w.release(held)
    w.settle()
    assert w.refusal(keys[1]).code == "too_large"
    assert w.granted(keys[0], keys[2])


def test_a_permanent_component_that_is_being_unregistered_does_not_count_as_fixed(
    make: Make,
) -> None:
    w = make(10, strict=True)
    s = w.open()
    w.register(s, "r", 3, policy="permanent")
    w.register(s, "a", 8)
    w.touch(s, "r")
    w.unregister(s, "r")
    key = w.acquire(s, "a")
    w.settle()
    assert w.granted(key)
