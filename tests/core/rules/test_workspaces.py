"""Memory lent to a worker's own allocator."""

from swapd.core.actions import Grant, Lend, Reclaim, Waiting
from swapd.core.events import SessionRequest
from swapd.core.records import MISSING
from swapd.shared.protocol import AcquireWorkspace
from tests.core.rules.common import blocked, mutable_pair
from tests.core.world import Make, outcome


def test_a_workspace_is_lent_granted_and_reclaimed(make: Make) -> None:
    w = make(10)
    s = w.open()
    key = w.workspace(s, 6)
    name = f"workspace {s}.{key[1]}"
    assert w.out == [Lend(s, name, 1, ((0, 6),), 6)]
    w.now = 0.5
    w.move(name)
    assert w.out == [Grant(*key, (), 0.5, False)]
    assert w.ledger.pool.free == 4
    w.release(key)
    assert w.out == [Reclaim(name, 1, ((0, 6),))]
    assert w.ledger.pool.free == 4, "the driver has it still"
    w.move(name)
    assert w.out == []
    assert w.ledger.pool.free == 10
    assert w.ledger.components == {}
    assert (w.ledger.loads, w.ledger.evictions, w.ledger.lane_in.nbytes) == (0, 0, 0)


def test_what_others_use_since_before_the_start_comes_in_parts_and_nobody_is_refused_for_it(
    make: Make,
) -> None:
    w = make(10)
    missing = ((2, 2), (6, 4))
    w.lack(missing)
    assert w.out == [Reclaim(MISSING, 1, missing)]
    s = w.open()
    w.register(s, "a", 8)
    waiting = w.acquire(s, "a")
    w.come_back(MISSING, ((6, 2),))
    assert w.ledger.pool.free == 6
    assert not w.granted(waiting)
    w.settle()
    assert w.granted(waiting)


def test_a_workspace_evicts_what_is_idle_and_waits_until_it_has_left(make: Make) -> None:
    w, _, t = mutable_pair(make)
    key = w.workspace(t, 6)
    assert outcome(w) == ["evict a (room)", "revoke a (ack)"]
    w.ack("a")
    assert w.told() == ["copy out a"]
    w.move("a")
    assert outcome(w) == ["lend"]
    w.settle()
    assert w.granted(key)


def test_who_waits_for_the_memory_of_a_workspace_gets_it_when_it_is_back(make: Make) -> None:
    w = make(10)
    s, t = w.open("vllm-0"), w.open()
    w.register(t, "a", 6)
    w.register(s, "idle", 4)
    w.touch(s, "idle")
    held = w.workspace(s, 6)
    w.settle()
    name = w.asked[held].names[0]
    key = w.acquire(t, "a")
    assert w.wanted == {(s, name)}
    (waiting,) = [a for a in w.log if isinstance(a, Waiting)]
    assert "held: workspace of 6 B by vllm-0 (session 7001)" in waiting.why
    w.release(held)
    assert w.told() == [f"unwant {name}", "reclaim"], "what is coming back is enough"
    w.move(name)
    assert w.told() == ["copy in a"]
    w.settle()
    assert w.granted(key)


def test_who_waits_gets_what_is_back_of_a_workspace_before_the_rest_is(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(t, "a", 6)
    held = w.workspace(s, 6)
    w.settle()
    name = w.asked[held].names[0]
    key = w.acquire(t, "a")
    w.release(held)
    w.come_back(name, ((0, 1),))
    assert w.ledger.pool.free == 5
    assert w.ledger.components[name].nbytes == 5, "status says what is still out"
    assert not w.granted(key)
    w.come_back(name, ((4, 1),))
    assert w.told()[-1] == "copy in a"
    w.move("a")
    assert w.granted(key)
    w.move(name)
    assert name not in w.ledger.components
    assert w.ledger.pool.free == 4


def test_a_workspace_waits_its_turn_and_a_deadline_ends_the_wait(make: Make) -> None:
    w, _, (t, *_) = blocked(make)
    key = w.workspace(t, 6, timeout=3.0)
    assert w.told() == [f"waiting {key[1]}", "want held"]
    w.sleep(3.0)
    refusal = w.refusal(key)
    assert refusal.code == "timeout"
    assert refusal.message.startswith("workspace of 6 B not granted in 3 s: needs 6 B, free 0 B")
    assert set(w.ledger.components) == {"held", "c0", "c1", "c2"}


def test_a_workspace_that_is_tried_for_is_refused_at_once(make: Make) -> None:
    w = make(10)
    s = w.open()
    assert w.refusal(w.workspace(s, 6, timeout=0.0)).code == "timeout"
    assert w.ledger.components == {}


def test_a_workspace_too_large_or_of_nothing_is_refused(make: Make) -> None:
    w = make(10)
    s = w.open()
    refusal = w.refusal(w.workspace(s, 11))
    assert refusal.code == "too_large"
    assert refusal.message == (
        "workspace of 11 B needs 11 B; the budget is 10 B (in chunks of 1 B). "
        "Raise the daemon's --budget, or ask for less"
    )
    for nbytes in (0, -1):
        assert w.refusal(w.workspace(s, nbytes)).code == "bad_request"
    w.register(s, "r", 3, policy="permanent")
    w.touch(s, "r")
    assert "beside 3 B that never leave" in w.refusal(w.workspace(s, 8)).message
    assert set(w.ledger.components) == {"r"}


def test_a_workspace_takes_part_in_deadlocks(make: Make) -> None:
    w = make(10)
    s, t = w.open("one"), w.open("two")
    for session, name in ((s, "a"), (t, "b")):
        w.register(session, name, 5)
        w.use(session, name)
    first = w.workspace(s, 5)
    refusal = w.refusal(w.workspace(t, 5))
    assert refusal.code == "deadlock"
    assert "one (session 7001) waits for workspace of 5 B, holding" in refusal.message
    assert first not in w.answers


def test_an_agent_that_holds_a_workspace_and_needs_it_gone_is_refused(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.workspace(s, 6)
    w.settle()
    refusal = w.refusal(w.acquire(s, "a"))
    assert refusal.code == "deadlock"
    assert "held: workspace of 6 B by worker" in refusal.message


def test_a_lending_that_fails_refuses_and_leaves_nothing(make: Make) -> None:
    w = make(10)
    s = w.open()
    key = w.workspace(s, 6)
    w.end_move(1, fail="no such file")
    refusal = w.refusal(key)
    assert refusal.code == "device_failed"
    assert "memory of the workspace of 6 B could not be given to the driver (no such file)" in (
        refusal.message
    )
    assert w.ledger.components == {}
    assert w.ledger.pool.free == 10


def test_a_workspace_cancelled_while_it_waits_leaves_nothing(make: Make) -> None:
    w, _, (t, *_) = blocked(make)
    w.cancel(w.workspace(t, 6))
    assert w.told() == ["unwant held"]
    assert set(w.ledger.components) == {"held", "c0", "c1", "c2"}


def test_a_workspace_cancelled_while_it_is_lent_out_goes_back(make: Make) -> None:
    for fail in (None, "bus"):
        w = make(10)
        s, t = w.open(), w.open()
        w.register(s, "idle", 4)
        w.register(t, "a", 6)
        w.touch(s, "idle")
        w.cancel(w.workspace(s, 6))
        assert w.told() == []
        key = w.acquire(t, "a")
        assert w.evictions() == [], "what is coming back is enough"
        w.end_move(2, fail)
        if fail is None:
            assert w.told() == ["reclaim"]
            w.end_move(2)
        assert w.told() == ["copy in a"]
        w.settle()
        assert w.granted(key)


def test_a_workspace_cancelled_when_it_was_granted_goes_back(make: Make) -> None:
    w = make(10)
    s = w.open()
    key = w.workspace(s, 6)
    w.settle()
    w.cancel(key)
    assert w.told() == ["reclaim"]


def test_gone_while_its_workspace_is_being_lent(make: Make) -> None:
    for alive, fail in ((False, None), (True, None), (True, "bus")):
        w = make(10)
        s, t = w.open(), w.open()
        w.register(t, "a", 6)
        w.workspace(s, 6)
        key = w.acquire(t, "a")
        w.leave(s, alive)
        assert outcome(w) == []
        w.end_move(1, fail)
        if fail is None:
            assert w.told() == ["reclaim"]
            w.end_move(1)
        assert w.told() == ["copy in a"]
        w.settle()
        assert w.granted(key)


def test_gone_while_it_holds_a_workspace(make: Make) -> None:
    for alive in (False, True):
        w = make(10)
        s, t = w.open(), w.open()
        w.register(t, "idle", 4)
        w.register(t, "a", 6)
        w.touch(t, "idle")
        w.workspace(s, 6)
        w.settle()
        key = w.acquire(t, "a")
        w.leave(s, alive)
        assert outcome(w) == ["reclaim"], "nothing is evicted: enough is coming back"
        w.settle()
        assert w.granted(key)


def test_gone_while_its_workspace_is_on_its_way_back(make: Make) -> None:
    w = make(10)
    s = w.open()
    key = w.workspace(s, 6)
    w.settle()
    w.release(key)
    assert w.core.quiet, "a stop does not wait for it"
    w.leave(s)
    assert w.told() == []
    assert w.ledger.pool.free == 4
    w.settle()
    assert w.ledger.pool.free == 10


def test_gone_while_it_waits_for_a_workspace(make: Make) -> None:
    w, held, (t, u, _) = blocked(make)
    w.workspace(t, 6)
    key = w.acquire(u, "c1")
    w.leave(t)
    w.release(held)
    w.settle()
    assert w.granted(key)


def test_a_workspace_cannot_be_named(make: Make) -> None:
    w = make(10)
    s = w.open()
    key = w.workspace(s, 6)
    w.settle()
    (name,) = w.leases[key]
    assert w.refusal(w.ask_register(s, "workspace 9.9")).code == "bad_request"
    for asked in (
        w.acquire(s, name),
        w.acquire(s, "a", "workspace 9.9", await_registration=True),
        w.prefetch(s, name),
        w.commit(s, name),
        w.unregister(s, name),
    ):
        assert w.refusal(asked).code == "unknown_component"
    assert f"{name!r} is no component" in w.refusal(w.acquire(s, name)).message
    assert "registered: nothing." in w.refusal(w.acquire(s, "a")).message
    assert w.granted(key)


def test_the_request_of_a_workspace_is_not_used_again_before_it_is_back(make: Make) -> None:
    w = make(10)
    s = w.open()
    key = w.workspace(s, 6)
    w.settle()
    w.release(key)
    (answer,) = w.core.handle(SessionRequest(0.0, s, AcquireWorkspace(key[1], 3)))
    assert "bad_request" in repr(answer)


def test_stopping_refuses_a_workspace_and_takes_back_what_is_being_lent(make: Make) -> None:
    w = make(10)
    s = w.open()
    key = w.workspace(s, 6)
    w.stop()
    assert w.refusal(key).code == "stopping"
    assert w.refusal(w.workspace(s, 6)).code == "stopping"
    w.end_move(1)
    assert w.told() == ["reclaim"]


def test_what_could_not_be_saved_is_kept_for_its_worker_when_the_session_ends(make: Make) -> None:
    w = make(10, residency_factor=0.0)
    s, t = w.open(), w.open()
    w.register(s, "a", 6, mutable=True)
    w.register(t, "b", 6)
    w.touch(s, "a")
    w.acquire(t, "b")
    w.end_ack(1)
    w.move("a", fail="injected")
    w.leave(s, alive=True)
    assert w.ledger.pool.free == 4
    w.exit(s)
    assert w.ledger.pool.free == 10


def test_a_workspace_is_no_component_to_any_request(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.workspace(s, 6)
    (name,) = w.ledger.components
    for asked in (w.pin(s, name), w.prefetch(s, name), w.unregister(s, name), w.acquire(s, name)):
        assert w.refusal(asked).message.endswith("a workspace is held by its lease alone")
