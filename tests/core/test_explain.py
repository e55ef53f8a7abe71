"""The texts of the core for people: sizes, status, and the check that finds faults."""

import pytest

from swapd.core import explain
from swapd.core.states import State
from swapd.core.status import component_status, session_status
from tests.core.check import check
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
        component_status(w.ledger, w.ledger.components[n], w.now) for n in "abc"
    )
    assert (leased.state, idle.state, absent.state) == ("leased", "idle", "absent")
    assert leased.holders == ("vllm-1 (session 7002)",)
    assert (leased.idle_s, idle.idle_s, absent.idle_s) == (None, 3.0, None)
    assert (idle.loads, idle.evictions, absent.loads) == (1, 0, 0)
    of_t = session_status(w.ledger, t)
    assert (of_t.label, of_t.leases, of_t.waiting) == ("vllm-1", 1, 0)


def test_status_of_what_is_leased_before_it_is_in() -> None:
    w = World(10)
    s = w.open("vllm-0")
    w.register(s, "a", 2)
    w.acquire(s, "a", early=True)
    status = component_status(w.ledger, w.ledger.components["a"], w.now)
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
        return component_status(w.ledger, w.ledger.components[name], w.now).state

    assert state() == "waiting"
    w.release(held)
    assert state() == "lending"
    w.settle()
    assert state() == "lent"
    status = component_status(w.ledger, w.ledger.components[name], w.now)
    assert (status.nbytes, status.holders) == (6, ("vllm-0 (session 7001)",))
    w.release(key)
    assert state() == "reclaiming"


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


# --- refusals give the name, the holder, the size and the remedy ---------------------------


def test_what_is_too_large_names_what_stays_its_owner_and_the_setting() -> None:
    w = World(10)
    s, t = w.open("vllm-0"), w.open("vllm-1")
    w.register(s, "vae", 4, policy="permanent")
    message = w.refusal(w.ask_register(t, "dit", 7, policy="permanent")).message
    assert message.startswith(
        "dit needs 7 B, beside 4 B that never leave: vae (4 B) of vllm-0 (session 7001); "
        "the budget is 10 B"
    )
    assert "Raise the daemon's --budget" in message


def test_without_host_memory_the_component_and_the_largest_are_named() -> None:
    w = World(10)
    s, t = w.open("vllm-0"), w.open("vllm-1")
    w.register(s, "vae", 2)
    w.register(s, "dit", 9)
    request = w.ask_register(t, "enc", 3)
    w.make_master(next(iter(w.making)), fail="host_memory")
    assert w.refusal(request).message == (
        "'enc' (3 B): no memory. The largest are dit (9 B) of vllm-0 (session 7001), "
        "vae (2 B) of vllm-0 (session 7001)"
    )


def test_what_is_being_updated_or_unregistered_names_who_does_it() -> None:
    w = World(10)
    s = w.open("vllm-0")
    w.register(s, "a", 2)
    c = w.ledger.components["a"]
    assert "updated by vllm-0 (session 7001); wait" in explain.being_updated(w.ledger, c)
    said = explain.unregistered(w.ledger, c)
    assert "unregistered by vllm-0 (session 7001); use await_registration=True" in said


def test_a_copy_that_failed_names_its_bytes() -> None:
    w = World(10)
    s = w.open("vllm-0")
    w.register(s, "a", 2)
    c = w.ledger.components["a"]
    assert explain.copy_failed(w.ledger, c, "bus").startswith("copying 'a' (2 B) failed (bus), and")
