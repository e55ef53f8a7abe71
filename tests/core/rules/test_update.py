"""New bytes for a clean component."""

import pytest

from swapd.core.actions import Accept, CopyIn, DropHostCopy, Evict, MakeHostCopy, SealHostCopy
from swapd.core.events import DeviceDown
from swapd.core.states import State
from tests.core.world import Make, World


def there(make: Make, nbytes: int = 6, **rules: object) -> tuple[World, int]:
    """A world, and its session that has registered `a`."""
    w = make(10, **rules)
    s = w.open()
    w.register(s, "a", nbytes)
    return w, s


def test_a_second_master_is_made_beside_the_first(make: Make) -> None:
    w, s = there(make)
    began = w.update(s, "a")
    assert w.out == [MakeHostCopy(s, 2, "a", 6, False, (), began[1], 0, 1)]
    w.make_master(2)
    assert w.out == [Accept(*began)]
    w.commit(s, "a")
    assert w.out == [SealHostCopy(2, "a")]
    w.make_master(2)
    assert w.out[1:] == [DropHostCopy(1, "a")]


def test_until_it_is_committed_the_old_bytes_are_loaded(make: Make) -> None:
    w, s = there(make)
    w.update(s, "a")
    w.make_masters()
    w.acquire(s, "a")
    assert w.out == [CopyIn(1, "a", 1, 6, ((0, 6),), in_use=6, urgency=(0, 0, 0, 1))]


def test_an_idle_one_leaves_at_once_and_the_next_acquire_loads_the_new_bytes(make: Make) -> None:
    w, s = there(make)
    w.touch(s, "a")
    w.renew(s, "a")
    assert w.told()[1:] == ["drop host copy a", "evict a (update)", "revoke a", "evicted a"]
    w.acquire(s, "a")
    assert w.out == [CopyIn(2, "a", 2, 6, ((0, 6),), in_use=6, urgency=(0, 0, 0, 2))]


def test_a_permanent_or_busy_one_leaves_all_the_same(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "r", 2, "permanent")
    w.touch(s, "r")
    w.renew(s, "r")
    assert w.evictions() == ["r"]


def test_holders_keep_the_old_bytes_and_are_told(make: Make) -> None:
    w, s = there(make)
    held = w.use(s, "a")
    w.renew(s, "a")
    assert w.told()[1:] == ["drop host copy a", "want a"]
    w.release(held)
    assert w.told() == ["unwant a", "evict a (update)", "revoke a", "evicted a"]


def test_who_comes_waits_for_the_new_bytes_though_the_old_ones_are_in(make: Make) -> None:
    w, s = there(make)
    other = w.open()
    held = w.use(s, "a")
    w.renew(s, "a")
    key = w.acquire(other, "a")
    assert w.told() == [f"waiting {key[1]}"]
    assert "the holders of the old bytes" in getattr(w.out[0], "why", "")
    w.release(held)
    assert [a for a in w.out if isinstance(a, CopyIn)] == [
        CopyIn(2, "a", 2, 6, ((0, 6),), in_use=6, urgency=(0, 0, 0, 2))
    ]
    w.settle()
    assert w.granted(key)


def test_another_thread_of_who_holds_it_waits_for_the_new_bytes(make: Make) -> None:
    w, s = there(make)
    held = w.use(s, "a")
    w.renew(s, "a")
    for agent in (1, 2):
        key = w.acquire(s, "a", agent=agent)
        assert w.answer(key) is None
        w.release(held)
        w.settle()
        assert w.granted(key)
        held = key
        if agent == 1:
            w.renew(s, "a")


def test_two_threads_that_each_hold_what_the_other_waits_for_anew_have_the_old_bytes(
    make: Make,
) -> None:
    """Without the updates neither would have waited."""
    w = make(10)
    s = w.open()
    for name in "ab":
        w.register(s, name, 2)
    a, b = w.use(s, "a", agent=1), w.use(s, "b", agent=2)
    w.renew(s, "a")
    w.renew(s, "b")
    first = w.acquire(s, "b", agent=1)
    assert w.answer(first) is None
    second = w.acquire(s, "a", agent=2)
    assert w.granted(second)
    assert w.answer(first) is None
    for key in (second, b):
        w.release(key)
    w.settle()
    assert w.granted(first)
    w.release(first)
    w.release(a)
    assert w.state("a") is State.ABSENT


def test_old_bytes_that_end_a_deadlock_are_given_at_once_though_another_waits_first(
    make: Make,
) -> None:
    w = make(10)
    s = w.open()
    for name, nbytes in (("a", 2), ("b", 2), ("held", 6), ("head", 6), ("c", 7)):
        w.register(s, name, nbytes)
    w.use(s, "a", agent=1)
    w.use(s, "b", agent=2)
    w.use(w.open(), "held")
    w.acquire(w.open(), "head")
    w.renew(s, "a")
    anew = w.acquire(s, "a", agent=2)
    assert w.answer(anew) is None
    w.acquire(s, "c", agent=1)
    assert w.granted(anew)


def test_who_holds_it_itself_may_take_it_again(make: Make) -> None:
    w, s = there(make)
    held = w.use(s, "a")
    w.renew(s, "a")
    again = w.acquire(s, "a", timeout=0.0)
    assert w.granted(held, again)
    w.release(held)
    assert w.state("a") is State.RESIDENT
    w.release(again)
    assert w.state("a") is State.ABSENT


def test_who_waits_for_new_bytes_takes_the_old_ones_once_a_grant_makes_it_their_holder(
    make: Make,
) -> None:
    w, s = there(make)
    w.evict_now(s, "a")
    w.settle()
    first = w.acquire(s, "a")
    w.renew(s, "a")
    second = w.acquire(s, "a")
    assert w.answer(second) is None
    w.move("a")
    assert w.granted(first, second)


def test_who_tries_is_refused_rather_than_given_old_bytes(make: Make) -> None:
    w, s = there(make)
    other = w.open()
    w.use(s, "a")
    w.renew(s, "a")
    assert w.refusal(w.acquire(other, "a", timeout=0.0)).code == "timeout"


def test_a_load_under_way_ends_before_its_master_is_dropped(make: Make) -> None:
    w, s = there(make)
    key = w.acquire(s, "a")
    w.renew(s, "a")
    assert not any(isinstance(a, DropHostCopy) for a in w.log)
    w.move("a")
    assert w.told()[:1] == ["drop host copy a"]
    assert w.granted(key), "it asked before"
    w.release(key)
    assert w.evictions() == ["a"]


def test_two_updates_during_a_load_leave_only_what_it_reads_and_what_is_next(make: Make) -> None:
    w, s = there(make)
    w.prefetch(s, "a")
    w.renew(s, "a")
    w.renew(s, "a")
    assert [a.uid for a in w.log if isinstance(a, DropHostCopy)] == [2]
    w.move("a")
    assert w.told() == ["drop host copy a", "evict a (update)", "evicted a"]
    w.acquire(s, "a")
    assert w.out == [CopyIn(3, "a", 2, 6, ((0, 6),), in_use=6, urgency=(0, 0, 0, 1))]


def test_a_load_that_fails_leaves_the_new_bytes_to_be_loaded(make: Make) -> None:
    w, s = there(make)
    key = w.acquire(s, "a")
    w.renew(s, "a")
    w.move("a", fail="injected")
    assert w.refusal(key).code == "device_failed"
    assert any(isinstance(a, DropHostCopy) and a.uid == 1 for a in w.out)
    w.acquire(s, "a")
    assert any(isinstance(a, CopyIn) and a.uid == 2 for a in w.out)


def test_one_that_is_being_revoked_is_gone_with_its_old_bytes(make: Make) -> None:
    w, s = there(make, strict=True, residency_factor=0.0)
    w.register(s, "b", 6)
    w.touch(s, "a")
    key = w.acquire(s, "b")
    w.renew(s, "a")
    assert w.state("a") is State.REVOKING
    w.settle()
    assert w.granted(key)
    assert w.evictions() == ["a"]


def test_strict_waits_until_the_worker_has_let_go(make: Make) -> None:
    w, s = there(make, strict=True)
    w.touch(s, "a")
    w.renew(s, "a")
    key = w.acquire(s, "a")
    assert w.told() == []
    w.ack("a")
    w.settle()
    assert w.granted(key)


def test_a_prefetch_is_of_the_new_bytes(make: Make) -> None:
    w, s = there(make)
    held = w.use(s, "a")
    w.renew(s, "a")
    w.prefetch(s, "a")
    w.release(held)
    assert any(isinstance(a, CopyIn) and a.uid == 2 for a in w.out)


def test_what_was_promised_before_is_kept_until_it_was_used(make: Make) -> None:
    w, s = there(make, 4)
    w.register(s, "b", 4)
    w.touch(s, "a")
    key = w.acquire(s, "a", "b")
    w.renew(s, "a")
    assert w.state("a") is State.RESIDENT
    w.settle()
    assert w.granted(key)
    w.release(key)
    assert w.evictions() == ["a"]


def test_two_that_wait_for_what_the_other_holds_in_old_bytes_are_a_deadlock(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for owner, name in ((s, "a"), (t, "b")):
        w.register(owner, name, 2)
    w.use(s, "a")
    w.use(t, "b")
    w.renew(s, "a")
    w.renew(t, "b")
    first = w.acquire(s, "b")
    second = w.acquire(t, "a")
    assert w.refusal(second).code == "deadlock"
    assert w.answer(first) is None


def test_an_update_that_makes_a_wait_hopeless_ends_it(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for owner, name, nbytes in ((s, "a", 2), (t, "b", 2), (t, "c", 6)):
        w.register(owner, name, nbytes)
    held, beside = w.use(s, "a"), w.use(t, "b")
    w.acquire(s, "b", agent=1)
    lent = w.use(w.open(), "c")
    first = w.acquire(t, "a", "c")
    w.renew(t, "b")
    second = w.acquire(s, "b")
    assert w.granted(held, beside, lent, first)
    assert w.answer(second) is None, "it holds it through another agent alone"


def test_a_holder_that_waits_itself_runs_first(make: Make) -> None:
    """The head waits for new bytes; the holder of the old ones waits for memory it can have."""
    w = make(10, residency_factor=0.0)
    s, t = w.open(), w.open()
    w.register(s, "a", 4)
    w.register(s, "b", 4)
    w.register(t, "c", 6)
    held = w.use(s, "a")
    blocker = w.use(t, "c")
    w.renew(s, "a")
    first = w.acquire(t, "a", agent=1)
    second = w.acquire(s, "b")
    assert not w.granted(first)
    w.release(blocker)
    w.settle()
    assert w.granted(second)
    w.release(second)
    w.release(held)
    w.settle()
    assert w.granted(first)


def test_an_update_given_up_leaves_nothing(make: Make) -> None:
    w, s = there(make)
    held = w.use(s, "a")
    w.update(s, "a")
    w.make_masters()
    given = w.give_up(s, "a")
    assert w.out == [DropHostCopy(2, "a"), Accept(*given)]
    w.release(held)
    assert w.evictions() == []


def test_one_given_up_while_its_master_is_made_is_dropped_when_it_is(make: Make) -> None:
    w, s = there(make)
    began = w.update(s, "a")
    given = w.give_up(s, "a")
    assert w.refusal(began).code == "bad_request"
    assert isinstance(w.answers[given], Accept)
    w.make_masters()
    assert w.out == [DropHostCopy(2, "a")]
    w.renew(s, "a")


def test_another_may_begin_while_the_master_of_one_given_up_is_still_made(make: Make) -> None:
    w, s = there(make)
    w.update(s, "a")
    w.give_up(s, "a")
    second = w.update(s, "a")
    w.make_master(2)
    assert w.out == [DropHostCopy(2, "a")]
    w.make_master(3)
    assert w.out == [Accept(*second)]


def test_what_has_taken_place_is_not_given_up(make: Make) -> None:
    w, s = there(make)
    w.renew(s, "a")
    assert w.refusal(w.give_up(s, "a")).code == "bad_request"


def test_giving_up_what_never_began_is_no_harm(make: Make) -> None:
    w, s = there(make)
    assert isinstance(w.answers[w.give_up(s, "a")], Accept)
    assert isinstance(w.answers[w.give_up(s, "unheard")], Accept)


@pytest.mark.parametrize("step", ["making", "sealing"])
def test_no_memory_for_it_changes_nothing(step: str) -> None:
    w, s = there(World)
    asked = w.update(s, "a")
    if step == "sealing":
        w.make_masters()
        asked = w.commit(s, "a")
    w.make_master(2, "host_memory")
    assert w.refusal(asked).code == "host_memory"
    assert w.out[1:] == [DropHostCopy(2, "a")]
    w.use(s, "a")
    assert w.placed[1].uid == 1
    w.renew(s, "a")


def test_a_session_that_goes_in_the_middle_takes_both_masters_along(make: Make) -> None:
    w, s = there(make)
    w.update(s, "a")
    w.make_masters()
    w.leave(s)
    assert w.dropped == {1, 2}


def test_a_session_that_goes_while_it_is_made_or_sealed_or_loaded(make: Make) -> None:
    w, s = there(make)
    w.acquire(s, "a")
    w.renew(s, "a")
    w.update(s, "a")
    w.leave(s)
    assert w.dropped == {2}
    w.settle()
    assert w.dropped == {1, 2, 3}


def test_what_is_being_updated_is_not_unregistered(make: Make) -> None:
    w, s = there(make)
    w.update(s, "a")
    w.make_masters()
    refused = w.refusal(w.unregister(s, "a"))
    assert refused.code == "in_use"
    assert "being updated" in refused.message
    w.give_up(s, "a")
    assert isinstance(w.answers[w.unregister(s, "a")], Accept)


def test_one_update_at_a_time(make: Make) -> None:
    w, s = there(make)
    w.update(s, "a")
    w.use(s, "a")
    refusal = w.refusal(w.update(s, "a"))
    assert refusal.code == "in_use"
    assert "being updated" in refusal.message


def two(make: Make) -> tuple[World, int]:
    """A world with `a` and `b` on the device, and an uncommitted update of each."""
    w = make(10)
    s = w.open()
    for name in "ab":
        w.register(s, name, 2)
        w.touch(s, name)
    for name in "ab":
        w.update(s, name)
        w.make_masters()
    return w, s


def test_several_take_place_together(make: Make) -> None:
    w, s = two(make)
    done = w.commit(s, "a", "b")
    w.make_master(3)
    assert w.out == []
    assert w.evictions() == []
    w.make_master(4)
    assert w.out[0] == Accept(*done)
    assert w.evictions() == ["a", "b"]
    assert w.dropped == {1, 2}


def test_of_several_none_takes_place_if_one_fails(make: Make) -> None:
    w, s = two(make)
    asked = w.commit(s, "a", "b")
    w.make_master(3)
    w.make_master(4, "host_memory")
    assert w.refusal(asked).code == "host_memory"
    assert w.dropped == {3, 4}
    assert w.evictions() == []
    w.renew(s, "a")


def test_several_are_given_up_together_also_while_they_are_sealed(make: Make) -> None:
    w, s = two(make)
    asked = w.commit(s, "a", "b")
    w.make_master(3)
    w.give_up(s, "a")
    assert w.refusal(asked).code == "bad_request"
    w.make_masters()
    assert w.dropped == {3, 4}
    w.renew(s, "b")


def test_a_session_that_goes_takes_all_of_several_along(make: Make) -> None:
    w, s = two(make)
    w.commit(s, "a", "b")
    w.make_master(3)
    w.leave(s)
    w.settle()
    assert w.dropped == {1, 2, 3, 4}


def test_only_updates_are_committed_together(make: Make) -> None:
    w, s = two(make)
    w.ask_register(s, "new")
    w.make_masters()
    assert w.refusal(w.commit(s, "a", "new")).code == "bad_request"
    assert w.refusal(w.commit(s, "a", "unheard")).code == "unknown_component"
    assert w.answer(w.commit(s, "new")) is None, "it is being sealed"
    assert w.answer(w.commit(s, "a", "b")) is None


def test_who_was_refused_cannot_give_up_the_update_of_another(make: Make) -> None:
    w, s = there(make)
    first = w.update(s, "a")
    w.update(s, "a")
    w.give_up(s, "a")
    w.make_masters()
    assert isinstance(w.answers[first], Accept)


def test_who_gave_back_the_old_bytes_is_wanted_no_more_though_it_was_promised_them(
    make: Make,
) -> None:
    w, s = there(make, 3)
    w.register(s, "c", 5)
    holder = w.open()
    held = w.use(holder, "a")
    w.renew(s, "a")
    assert w.told()[-1] == "want a"
    both = w.acquire(holder, "a", "c")
    w.release(held)
    assert w.told() == ["unwant a"]
    w.move("c")
    assert w.granted(both)
    assert w.told()[-1] == "want a"


def test_what_was_promised_to_an_agent_that_held_the_old_bytes_it_gets_though_it_gave_them_back(
    make: Make,
) -> None:
    w, s = there(make, 3)
    w.register(s, "c", 5)
    holder = w.open()
    first = w.acquire(holder, "a")
    w.renew(s, "a")
    both = w.acquire(holder, "a", "c")
    w.move("a")
    assert w.granted(first)
    w.release(first)
    w.move("c")
    assert w.granted(both)
    w.release(both)
    w.use(holder, "a", "c")
    assert w.placed[w.ledger.components["a"].generation].uid == w.current["a"]


def test_who_may_update_what(make: Make) -> None:
    w, s = there(make)
    other = w.open()
    w.register(s, "m", 2, mutable=True)
    w.ask_register(s, "new", 2)
    assert w.refusal(w.update(other, "a")).code == "not_owner"
    assert "write to its tensors" in w.refusal(w.update(s, "m")).message
    assert w.refusal(w.update(s, "new")).code == "unknown_component"
    assert w.refusal(w.update(s, "unheard")).code == "unknown_component"
    w.stop()
    assert w.refusal(w.update(s, "a")).code == "stopping"


def test_a_commit_before_the_master_is_made_is_refused(make: Make) -> None:
    w, s = there(make)
    w.update(s, "a")
    assert w.refusal(w.commit(s, "a")).code == "bad_request"


def test_with_the_device_down_nobody_is_given_old_bytes(make: Make) -> None:
    w, s = there(make)
    other = w.open()
    held = w.use(s, "a")
    w.send(DeviceDown(w.now, "it fell off the bus"))
    w.renew(s, "a")
    assert w.refusal(w.acquire(other, "a")).code == "device_failed"
    w.release(held)
    assert [a.reason for a in w.log if isinstance(a, Evict)] == ["update"]
    assert w.refusal(w.acquire(s, "a")).code == "device_failed"


def test_a_component_without_bytes_may_be_updated(make: Make) -> None:
    w, s = there(make, 0)
    held = w.use(s, "a")
    w.renew(s, "a")
    w.release(held)
    w.touch(s, "a")
    assert w.placed[2].uid == 2
