"""When a waiter will be granted: the usual times of holders, waiters and copies before it."""

import pytest

from swapd.core import status
from swapd.core.records import Key
from swapd.shared.protocol import Forecast, ForecastRequest
from tests.core.world import Make, World

LOAD_S, USE_S = 1.0, 2.0


@pytest.fixture
def w(make: Make) -> World:
    """Room for one of three components, which were loaded and used before; sessions 1, 2 and 3 own
    one each."""
    world = make(10, residency_factor=0.0)
    for name in "abc":
        s = world.open(name)
        world.register(s, name, 6)
        world.release(held(world, s, name, for_s=USE_S))
        world.sleep(10.0)
    return world


def held(w: World, session: int, name: str, for_s: float = 0.0) -> Key:
    """A lease that was granted so long ago."""
    key = w.acquire(session, name)
    w.sleep(LOAD_S)
    w.settle()
    w.sleep(for_s)
    return key


def told(w: World, session: int, *names: str, acquire: int | None = None) -> Forecast:
    asked = ForecastRequest(99, names, acquire)
    answer = status.forecast(w.core, asked, session, w.now)
    assert isinstance(answer, Forecast), answer
    return answer


def owners(w: World) -> tuple[int, int, int]:
    a, b, c = sorted(w.sessions)
    return a, b, c


def test_a_holder_keeps_it_for_its_usual_time(w: World) -> None:
    a, b, _ = owners(w)
    held(w, a, "a", for_s=0.5)
    assert told(w, b, "b").seconds == pytest.approx(USE_S - 0.5 + LOAD_S)


def test_leases_beside_each_other_end_each_in_its_own_time(w: World) -> None:
    a, b, _ = owners(w)
    first = held(w, a, "a", for_s=1.0)
    second = w.acquire(a, "a", agent=1)
    assert told(w, b, "b").seconds == pytest.approx(USE_S + LOAD_S)
    w.release(second)
    w.release(first)


def test_who_waits_before_has_its_load_and_its_use_first(w: World) -> None:
    a, b, c = owners(w)
    held(w, a, "a")
    w.acquire(b, "b")
    assert told(w, c, "c").seconds == pytest.approx(2 * (USE_S + LOAD_S))


def test_a_load_under_way_has_as_long_as_its_last_one_took_left(w: World) -> None:
    a, b, _ = owners(w)
    w.acquire(a, "a")
    w.sleep(0.25)
    assert told(w, a, "a").seconds == pytest.approx(LOAD_S - 0.25)
    assert told(w, b, "b").seconds == pytest.approx(LOAD_S - 0.25 + USE_S + LOAD_S)


def test_it_comes_after_the_save_of_what_is_leaving(w: World) -> None:
    a, b, _ = owners(w)
    w.register(a, "m", 6, mutable=True)
    w.release(held(w, a, "m"))
    w.evict_now(b, "m")
    w.ack("m")
    assert told(w, b, "b").seconds == pytest.approx(2 * LOAD_S)


def test_an_acquire_that_waits_is_told_what_status_says(w: World) -> None:
    a, b, c = owners(w)
    held(w, a, "a", for_s=0.5)
    second, third = w.acquire(b, "b"), w.acquire(c, "c")
    rest_s = USE_S - 0.5 + LOAD_S
    first, later = status.waits(w.core, w.now)
    assert first.seconds == told(w, b, acquire=second[1]).seconds == pytest.approx(rest_s)
    assert later.seconds == told(w, c, acquire=third[1]).seconds
    assert later.seconds == pytest.approx(rest_s + USE_S + LOAD_S)


def test_who_needs_what_is_free_goes_before_a_head_that_leaves_it(w: World) -> None:
    a, b, c = owners(w)
    w.register(c, "small", 3)
    w.release(held(w, c, "small", for_s=USE_S))
    w.evict_now(c, "small")
    w.settle()
    held(w, a, "a")
    w.acquire(b, "b")
    assert told(w, c, "small").seconds == pytest.approx(LOAD_S)


def test_a_kept_lease_comes_back_within_a_use_once_somebody_waits(w: World) -> None:
    a, b, _ = owners(w)
    key = held(w, a, "a", for_s=10 * USE_S)
    w.release(key, again=9)
    held(w, a, "a", for_s=5 * USE_S)
    hold_s = w.ledger.components["a"].hold_s
    assert told(w, b, "b").seconds == pytest.approx(hold_s / 2 + LOAD_S)


# --- not known ---------------------------------------------------------------------------


def unknown(w: World, session: int, name: str) -> str:
    answer = told(w, session, name)
    assert answer.seconds is None
    return answer.unknown


def test_of_a_holder_that_never_releases_no_number_is_said(w: World) -> None:
    a, b, c = owners(w)
    held(w, a, "a", for_s=100.0)
    said = unknown(w, b, "b")
    assert said == f"not known: a is held by a (session {a}) for 100 s, usually for 2 s"
    w.acquire(b, "b")
    assert unknown(w, c, "c") == said, "nor of a waiter behind one that is blocked"


def test_nor_of_one_that_does_not_answer_when_somebody_waits(w: World) -> None:
    a, b, _ = owners(w)
    w.release(held(w, a, "a", for_s=USE_S), again=9)
    held(w, a, "a", for_s=USE_S)
    key = w.acquire(b, "b")
    assert told(w, b, acquire=key[1]).seconds is not None
    w.sleep(100.0)
    assert told(w, b, acquire=key[1]).seconds is None


def test_nor_of_one_that_has_it_for_the_first_time(w: World) -> None:
    a, b, _ = owners(w)
    w.register(a, "new", 6)
    held(w, a, "new")
    assert unknown(w, b, "b") == "not known yet: new is in use for the first time"


def test_nor_before_the_first_load(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    assert unknown(w, s, "a") == "not known yet: nothing was loaded so far"


def test_nor_of_names_that_nobody_has_registered(w: World) -> None:
    a, _, _ = owners(w)
    key = w.acquire(a, "later", await_registration=True)
    answer = told(w, a, acquire=key[1])
    assert (answer.seconds, answer.unknown) == (None, "not known: not registered yet")
    assert [way.name for way in answer.waits_for] == ["later"]


def test_nor_of_who_comes_behind_many(w: World) -> None:
    a, b, c = owners(w)
    held(w, a, "a")
    for agent in range(30):
        w.acquire(b, "b", agent=agent)
    said = "not known: more than 16 wait before it"
    assert unknown(w, c, "c") == said
    waits = status.waits(w.core, w.now)
    assert [wait.unknown for wait in waits] == [""] * 16 + [said] * 14


def test_a_clock_that_goes_back_makes_no_use_longer_than_usual(w: World) -> None:
    a, b, _ = owners(w)
    held(w, a, "a")
    answer = status.forecast(w.core, ForecastRequest(1, ("b",)), b, w.now - 1000.0)
    assert isinstance(answer, Forecast)
    assert answer.seconds == pytest.approx(USE_S + LOAD_S)


def test_an_acquire_that_no_longer_waits_has_no_forecast(w: World) -> None:
    a, _, _ = owners(w)
    key = held(w, a, "a")
    answer = status.forecast(w.core, ForecastRequest(1, (), key[1]), a, w.now)
    assert not isinstance(answer, Forecast)
    assert answer.code == "bad_request"


# --- refusals ----------------------------------------------------------------------------


def test_a_refusal_says_when_the_grant_was_to_come(w: World) -> None:
    a, b, _ = owners(w)
    held(w, a, "a", for_s=0.5)
    said = w.refusal(w.acquire(b, "b", timeout=0.0)).message
    assert "in about 2.5 s" in said
    late = w.acquire(b, "b", timeout=0.25)
    assert "others wait" in w.refusal(w.acquire(b, "b", timeout=0.0)).message
    w.sleep(0.25)
    assert "in about 2.25 s" in w.refusal(late).message
    w.sleep(100.0)
    assert "not known: a is held by" in w.refusal(w.acquire(b, "b", timeout=0.0)).message
