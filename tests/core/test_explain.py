"""What the core says of itself, for people: sizes, status, and the check that finds faults."""

import pytest

from swapd.core import explain
from swapd.core.check import check
from swapd.core.records import State
from tests.core.world import World


def test_status_tells_leased_idle_and_absent_apart() -> None:
    w = World(10)
    s, t = w.open("vllm-0"), w.open("vllm-1")
    for name in "abc":
        w.register(s, name, 2)
    w.use(t, "a")
    w.touch(s, "b")
    w.now = 3.0
    leased, idle, absent = (
        explain.component_status(w.ledger, w.ledger.components[n], w.now) for n in "abc"
    )
    assert (leased.state, idle.state, absent.state) == ("leased", "idle", "absent")
    assert leased.holders == ("vllm-1 (session 7002)",)
    assert (leased.idle_s, idle.idle_s, absent.idle_s) == (None, 3.0, None)
    assert (idle.loads, idle.evictions, absent.loads) == (1, 0, 0)
    of_t = explain.session_status(w.ledger, t)
    assert (of_t.label, of_t.leases, of_t.waiting) == ("vllm-1", 1, 0)


def test_status_of_what_is_leased_before_it_is_in() -> None:
    w = World(10)
    s = w.open("vllm-0")
    w.register(s, "a", 2)
    w.acquire(s, "a", early=True)
    status = explain.component_status(w.ledger, w.ledger.components["a"], w.now)
    assert (status.state, status.leases) == ("loading", 1)
    assert status.holders == ("vllm-0 (session 7001)",)


def test_status_of_a_workspace() -> None:
    w = World(10)
    s = w.open("vllm-0")
    w.register(s, "held", 6)
    held = w.use(s, "held")
    key = w.workspace(s, 6, agent=1)
    (name,) = w.asked[key].names

    def state() -> str:
        return explain.component_status(w.ledger, w.ledger.components[name], w.now).state

    assert state() == "waiting"
    w.release(held)
    assert state() == "lending"
    w.settle()
    assert state() == "lent"
    status = explain.component_status(w.ledger, w.ledger.components[name], w.now)
    assert (status.nbytes, status.holders) == (6, ("vllm-0 (session 7001)",))
    w.release(key)
    assert state() == "reclaiming"


def test_status_of_what_is_damaged() -> None:
    w = World(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6, mutable=True)
    w.register(t, "b", 6)
    w.touch(s, "a")
    w.acquire(t, "b")
    w.ack("a")
    w.move("b")
    w.move("a", fail="bus")
    status = explain.component_status(w.ledger, w.ledger.components["a"], w.now)
    assert status.state == "damaged"


def test_a_waiting_record_names_the_first_few_and_a_refusal_all() -> None:
    w = World(10)
    owner = w.open()
    for i in range(5):
        w.register(owner, f"c{i}", 2)
        w.use(w.open(), f"c{i}")
    for _ in range(4):
        w.use(w.open(), "c0")
    assert explain.held(w.ledger, 3).endswith("by worker (session 7004); and 2 more")
    assert "7002), worker (session 7007), worker (session 7008), 2 more;" in explain.held(
        w.ledger, 3
    )
    assert "more" not in explain.held(w.ledger)
    assert "c4" in explain.held(w.ledger)


def test_the_check_finds_a_lost_chunk_and_a_false_state() -> None:
    w = World(10)
    s = w.open()
    w.register(s, "a", 2)
    w.use(s, "a")
    w.ledger.components["a"].state = State.ABSENT
    with pytest.raises(AssertionError, match="a chunk is lost or held twice"):
        check(w.core)
    w.ledger.components["a"].state = State.REVOKING
    with pytest.raises(AssertionError, match="is leased and not in"):
        check(w.core)
