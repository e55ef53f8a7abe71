"""Registering a component."""

from swapd.core.actions import Accept
from swapd.core.events import SessionRequest
from swapd.core.states import State
from swapd.shared.protocol import Acquire, Register
from tests.core.world import Make


def test_registration_is_answered_when_the_master_is_made_and_when_it_is_sealed(
    make: Make,
) -> None:
    w = make(10)
    s = w.open()
    made = w.ask_register(s, "a", 3)
    assert w.told() == ["makehostcopy a"]
    w.make_masters()
    assert w.out == [Accept(*made)]
    committed = w.commit(s, "a")
    assert w.told() == ["sealhostcopy a"]
    assert w.state("a") is State.FILLING
    w.make_masters()
    assert w.out == [Accept(*committed)]
    assert w.state("a") is State.ABSENT


def test_a_name_is_registered_once(make: Make) -> None:
    w = make(10)
    s, t = w.open("one"), w.open("two")
    w.register(s, "a")
    refusal = w.refusal(w.ask_register(t, "a"))
    assert refusal.code == "duplicate_name"
    assert "registered already by one (session 7001)" in refusal.message


def test_a_group_and_the_policy_alternating_go_together(make: Make) -> None:
    w = make(10)
    s = w.open()
    assert w.refusal(w.ask_register(s, "a", policy="alternating")).code == "bad_request"
    assert w.refusal(w.ask_register(s, "a", group="g")).code == "bad_request"


def test_a_size_below_zero_is_refused(make: Make) -> None:
    w = make(10)
    s = w.open()
    assert w.refusal(w.ask_register(s, "a", -1)).code == "bad_request"


def test_a_master_that_cannot_be_made_refuses_the_registration(make: Make) -> None:
    w = make(10)
    s = w.open()
    key = w.ask_register(s, "a")
    w.make_master(1, fail="host_memory")
    assert w.refusal(key).code == "host_memory"
    assert w.dropped == w.masters
    w.register(s, "a")


def test_a_master_that_cannot_be_sealed_refuses_the_commit(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.ask_register(s, "a")
    w.make_masters()
    key = w.commit(s, "a")
    w.make_master(1, fail="bad_request")
    assert w.refusal(key).code == "bad_request"
    assert w.dropped == w.masters
    assert w.ledger.components == {}


def test_commit_is_for_the_owner_and_once(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.ask_register(s, "a")
    assert w.refusal(w.commit(s, "a")).code == "bad_request"
    w.make_masters()
    assert w.refusal(w.commit(t, "a")).code == "unknown_component"
    assert w.refusal(w.commit(s, "b")).code == "unknown_component"
    w.commit(s, "a")
    w.make_masters()
    assert w.refusal(w.commit(s, "a")).code == "bad_request"


def test_a_request_of_no_session_and_a_replayed_one_are_refused(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a")
    _, request = w.use(s, "a")
    for session, number in ((s, request), (99, 1)):
        (answer,) = w.core.handle(SessionRequest(0.0, session, Acquire(number, ("a",))))
        assert "bad_request" in repr(answer)
    (answer,) = w.core.handle(SessionRequest(0.0, 99, Register(1, "b", 1)))
    assert "bad_request" in repr(answer)


def test_acquires_that_await_a_registration_go_on_in_order_of_arrival(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for name in ("small", "large"):
        w.register(t, name, 6)
    # each would be granted if it were the first: there is room for one of both
    first = w.acquire(t, "unborn", "small", await_registration=True, agent=1)
    second = w.acquire(t, "unborn", "large", await_registration=True, agent=2)
    w.register(s, "unborn", 3)
    w.settle()
    assert w.granted(first)
    assert second not in w.answers
