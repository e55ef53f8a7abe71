"""Sessions that go, in every state."""

import pytest

from swapd.core.events import SessionGone
from swapd.core.states import State
from tests.core.rules.common import blocked, mutable_pair, strict_pair
from tests.core.world import Make, outcome, remains


def test_gone_before_its_master_was_made(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.ask_register(s, "a")
    w.leave(s)
    assert w.told() == []
    w.make_masters()
    assert w.told() == ["drop host copy a"]


def test_gone_before_its_master_failed(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.ask_register(s, "a")
    w.leave(s)
    w.make_master(1, fail="host_memory")
    assert w.dropped == w.masters


def test_gone_while_filling(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.ask_register(s, "a")
    w.make_masters()
    w.leave(s)
    assert w.told() == ["drop host copy a"]


def test_gone_before_its_master_was_sealed(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.ask_register(s, "a")
    w.make_masters()
    w.commit(s, "a")
    w.leave(s)
    assert w.told() == []
    w.make_masters()
    assert w.told() == ["drop host copy a"]


def test_gone_while_absent(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a")
    w.leave(s)
    assert w.told() == ["drop host copy a"]


@pytest.mark.parametrize("fail", [None, "bus"])
def test_gone_while_loading_frees_the_chunks_when_the_copy_ends(
    make: Make, fail: str | None
) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    w.register(t, "b", 6)
    joiner = w.acquire(t, "a")
    w.leave(s)
    assert w.refusal(joiner).code == "component_gone"
    key = w.acquire(t, "b")
    assert w.state("b") is State.ABSENT
    w.move("a", fail=fail)
    assert w.told() == ["drop host copy a", "copy in b"]
    w.settle()
    assert w.granted(key)


def test_gone_while_resident_lets_the_waiters_in_at_once(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    w.register(t, "b", 6)
    w.use(s, "a")
    w.acquire(t, "b")
    w.leave(s)
    assert outcome(w) == ["drop host copy a", "copy in b"]


def test_gone_while_resident_takes_it_from_the_leases_of_others(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    w.register(t, "b", 4)
    key = w.use(t, "a", "b")
    w.leave(s)
    assert w.leases[key] == {"b"}
    w.release(key)
    assert "b" in w.ledger.idle


@pytest.mark.parametrize("alive", [False, True])
def test_gone_while_revoking(make: Make, alive: bool) -> None:
    w, s, t = strict_pair(make)
    key = w.acquire(t, "b")
    w.leave(s, alive)
    assert w.told() == ["drop host copy a", "copy in b"]
    assert w.core.next_deadline() is None
    w.settle()
    assert w.granted(key)


@pytest.mark.parametrize("lets_go", [False, True])
def test_gone_while_a_mutable_component_is_revoked_is_quarantined(
    make: Make, lets_go: bool
) -> None:
    w, s, t = mutable_pair(make)
    w.acquire(t, "b")
    w.leave(s, alive=True)
    assert w.ledger.pool.free == 4
    w.exit(s, lets_go=lets_go)
    assert w.ledger.pool.free == 10


@pytest.mark.parametrize("ending", [False, True])
def test_who_needs_what_a_process_may_still_write_to_waits_if_that_is_ending(
    make: Make, ending: bool
) -> None:
    w, s, t = mutable_pair(make)
    w.settle()
    w.leave(s, alive=True, ending=ending)
    key = w.workspace(t, 10)
    if not ending:
        assert w.refusal(key).code == "too_large"
        return
    w.settle()
    assert not w.granted(key)
    w.exit(s)
    w.settle()
    assert w.granted(key)


@pytest.mark.parametrize("alive", [False, True])
@pytest.mark.parametrize("fail", [None, "bus"])
def test_gone_while_writing_back_frees_the_chunks_when_the_copy_ends(
    make: Make, alive: bool, fail: str | None
) -> None:
    w, s, t = mutable_pair(make)
    key = w.workspace(t, 6)
    w.ack("a")
    w.leave(s, alive)
    assert outcome(w) == ["lost a"]
    w.move("a", fail=fail)
    assert w.told() == ["drop host copy a", "lend"]
    w.settle()
    assert w.granted(key)


def test_gone_while_waiting_loading_and_parked(make: Make) -> None:
    w, held, (t, u, v) = blocked(make)
    w.acquire(t, "c0", timeout=50.0)
    w.acquire(t, "unborn", await_registration=True, agent=1)
    key = w.acquire(u, "c1")
    w.leave(t)
    w.release(held)
    assert outcome(w)[-1] == "copy in c1"
    w.acquire(v, "c1")
    w.leave(v)
    w.settle()
    assert w.granted(key)
    assert w.core.next_deadline() is None


def test_gone_while_holding_releases_what_it_held(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    w.register(s, "a", 6)
    w.register(t, "b", 6)
    w.use(u, "a")
    key = w.acquire(t, "b")
    w.leave(u)
    w.settle()
    assert w.granted(key)


def test_gone_with_a_sequential_component_promised_to_itself(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", policy="sequential")
    w.register(s, "b")
    held = w.use(s, "a")
    w.acquire(s, "a", "b", agent=1)
    w.release(held)
    w.leave(s)
    assert w.told() == ["drop host copy a", "stop b"]


def test_gone_though_something_was_evicted_for_it(make: Make) -> None:
    w, _, t = mutable_pair(make)
    w.acquire(t, "b")
    w.ack("a")
    w.leave(t)
    w.move("a", fail="bus")
    assert remains(w.core, t) == []


def test_gone_twice_or_never_there_changes_nothing(make: Make) -> None:
    w = make(10)
    assert w.send(SessionGone(0.0, 9)) == []
    w.exit(9)


def test_isolation_the_name_of_who_is_gone_is_free(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    waiting = w.acquire(t, "a", await_registration=True)
    w.leave(s)
    w.register(t, "a", 3)
    w.settle()
    assert w.refusal(waiting).code == "component_gone", "it was promised the one that went"
    assert w.granted(w.use(t, "a"))
