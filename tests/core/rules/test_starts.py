"""One process at a time starts, so that no other affects its measurements of the device."""

from swapd.core.actions import Grant, Waiting
from swapd.core.events import Stopping
from tests.core.world import Make


def test_one_starts_and_the_others_wait_in_the_order_in_which_they_came(make: Make) -> None:
    w = make(10)
    thinker, talker, vocoder = (w.open(label) for label in ("thinker", "talker", "vocoder"))
    first = w.start(thinker)
    assert w.out == [Grant(*first, (), 0.0, False)]
    second = w.start(talker)
    why = "thinker (session 7001) starts"
    assert w.out == [Waiting(*second, ("the turn to start",), why)]
    third = w.start(vocoder)
    w.now = 4.0
    w.release(first)
    assert w.out == [Grant(*second, (), 4.0, False)]
    w.release(second)
    assert w.out == [Grant(*third, (), 4.0, False)]
    w.release(third)
    assert w.out == []


def test_the_turn_of_one_that_is_gone_is_the_next_one_s(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    w.start(s)
    w.start(t)
    last = w.start(u)
    w.leave(t)
    assert last not in w.answers
    w.leave(s)
    assert w.out == [Grant(*last, (), 0.0, False)]


def test_one_that_gives_up_is_not_waited_for(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    first, second, third = (w.start(one) for one in (s, t, u))
    w.cancel(second)
    w.release(first)
    assert w.out == [Grant(*third, (), 0.0, False)]


def test_a_deadline_ends_the_wait_and_says_who_starts(make: Make) -> None:
    w = make(10)
    s, t = w.open("thinker"), w.open()
    first = w.start(s, timeout=1.0)
    second, tried = w.start(t, timeout=3.0), w.start(w.open(), timeout=0.0)
    assert w.refusal(tried).code == "timeout"
    w.sleep(3.0)
    assert w.refusal(second).message == (
        "the turn to start was not granted in time: thinker (session 7001) starts"
    )
    assert list(w.ledger.starts) == [first], "it has the turn for as long as it needs"


def test_one_that_waited_and_has_the_turn_keeps_it_when_its_wait_would_be_over(make: Make) -> None:
    w = make(10)
    first, second = w.start(w.open()), w.start(w.open(), timeout=3.0)
    w.release(first)
    assert w.sleep(4.0) == []
    assert list(w.ledger.starts) == [second]


def test_one_that_starts_may_acquire_and_one_that_holds_may_not_start(make: Make) -> None:
    """Otherwise it would wait for a session that waits for its memory."""
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    w.register(t, "b", 6)
    first = w.start(s)
    w.touch(s, "a")
    held = w.use(t, "b")
    assert w.refusal(w.start(t)).code == "conflict"
    w.release(held)
    second = w.start(t)
    assert w.refusal(w.start(t)).code == "conflict", "it starts once"
    w.release(first)
    assert second in w.answers


def test_a_daemon_that_stops_lets_nobody_start(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    first, second = w.start(s), w.start(t)
    w.send(Stopping(w.now))
    assert w.refusal(second).code == "stopping"
    assert w.refusal(w.start(u)).code == "stopping"
    w.release(first)
    assert w.out == []
    assert w.core.quiet
