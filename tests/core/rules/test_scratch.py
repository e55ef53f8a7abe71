"""Memory that loads as zeros, and the fate of the bytes that its worker wrote.

The World checks every byte: zeros where nothing was saved, and saved bytes in their places.
"""

from swapd.core.actions import (
    CopyIn,
    CopyOut,
    Evict,
    Evicted,
    Grant,
    Lost,
    MakeHostCopy,
    Refuse,
    SealHostCopy,
)
from swapd.core.events import SessionEnds
from swapd.core.records import Key
from swapd.core.states import State
from swapd.core.status import component_status
from swapd.shared.protocol import Placement, Ranges, Scratch, UsedRanges
from tests.core.world import Make, World


def pair(make: Make, scratch: Scratch = "saved", **rules: object) -> tuple[World, int, int]:
    """A worker with scratch `kv` of 6, and another with `b` of 6; only one fits."""
    w = make(10, **rules)
    s, t = w.open(), w.open()
    w.register(s, "kv", 6, scratch=scratch)
    w.register(t, "b", 6)
    return w, s, t


def placed(w: World, key: Key) -> Placement:
    answer = w.answers[key]
    assert isinstance(answer, Grant)
    (placement,) = answer.placements
    return placement


def last_in(w: World) -> CopyIn:
    return [a for a in w.log if isinstance(a, CopyIn) and a.name == "kv"][-1]


def last_out(w: World) -> CopyOut:
    return [a for a in w.log if isinstance(a, CopyOut) and a.name == "kv"][-1]


def use(w: World, session: int, *said: Ranges) -> int:
    """Use it, declare these ranges worth saving, and return when its contents began."""
    key = w.use(session, "kv")
    began = placed(w, key).contents
    number = w.scratch["kv"].number
    w.release(key, used=tuple(UsedRanges("kv", number + i, r) for i, r in enumerate(said, 1)))
    return began


# --- registration --------------------------------------------------------------------------


def test_what_is_dropped_has_a_host_copy_that_takes_no_memory(make: Make) -> None:
    w, *_ = pair(make, "dropped")
    assert [a.empty for a in w.log if isinstance(a, MakeHostCopy)] == [True, False]
    assert [a.name for a in w.log if isinstance(a, SealHostCopy)] == ["kv", "b"]


# --- contents ------------------------------------------------------------------------------


def test_it_comes_in_as_zeros_and_nothing_is_copied(make: Make) -> None:
    for scratch in ("dropped", "saved"):
        w, s, _ = pair(make, scratch)
        w.use(s, "kv")
        assert last_in(w).only == ()
        assert w.ledger.lane_in.nbytes == 0


def test_what_is_dropped_leaves_without_a_copy_and_begins_anew(make: Make) -> None:
    w, s, t = pair(make, "dropped")
    first = use(w, s)
    w.acquire(t, "b")
    w.ack("kv")
    assert [a for a in w.out if isinstance(a, Evicted | CopyOut | Lost)] == [
        Evicted("kv", 1, 6, 0)
    ], "it is gone at once, and nobody needs to hear of a loss"
    w.settle()
    w.release(next(iter(w.leases)))
    assert use(w, s) == last_in(w).generation != first
    assert (w.ledger.lane_in.nbytes, w.ledger.lane_out.nbytes) == (6, 0), "those of b"


def test_what_is_saved_comes_back_as_it_was(make: Make) -> None:
    w, s, t = pair(make)
    first = use(w, s)
    w.touch(t, "b")
    assert last_out(w).only is None
    assert use(w, s) == first, "its worker may go on with what it has there"
    assert last_in(w).only is None
    assert w.ledger.lane_out.nbytes == 6


def test_only_what_its_owner_says_is_used_is_saved_and_the_rest_is_zeros(make: Make) -> None:
    w, s, t = pair(make)
    first = use(w, s, ((0, 1), (3, 2)))
    w.touch(t, "b")
    assert last_out(w).only == ((0, 1), (3, 2))
    assert Evicted("kv", 1, 6, 3) in w.log
    assert use(w, s) == first
    assert last_in(w).only == ((0, 1), (3, 2))
    assert (w.ledger.lane_in.nbytes, w.ledger.lane_out.nbytes) == (6 + 3, 3)


def test_what_was_said_counts_until_something_else_is_said(make: Make) -> None:
    w, s, t = pair(make)
    use(w, s, ((0, 1),))
    w.touch(t, "b")
    use(w, s)
    w.touch(t, "b")
    assert last_out(w).only == ((0, 1),)
    use(w, s, ((1, 5),))
    w.touch(t, "b")
    assert last_out(w).only == ((1, 5),)


def test_if_nothing_of_it_is_used_nothing_is_saved_and_it_begins_anew(make: Make) -> None:
    w, s, t = pair(make)
    first = use(w, s, ())
    w.touch(t, "b")
    assert [a for a in w.log if isinstance(a, CopyOut | Lost)] == []
    assert use(w, s, ((0, 2),)) != first
    w.touch(t, "b")
    assert last_out(w).only == ((0, 2),)


def test_what_nobody_wrote_to_since_is_not_saved_again(make: Make) -> None:
    w, s, t = pair(make)
    first = use(w, s, ((0, 2),))
    w.touch(t, "b")
    w.prefetch(s, "kv")
    w.settle()
    w.touch(t, "b")
    assert len([a for a in w.log if isinstance(a, CopyOut)]) == 1
    assert use(w, s) == first
    assert last_in(w).only == ((0, 2),)


def test_who_missed_that_it_began_anew_hears_of_it_with_the_next_grant(make: Make) -> None:
    w, s, t = pair(make, "dropped")
    first = use(w, s)
    w.touch(t, "b")
    w.prefetch(s, "kv")
    w.settle()
    w.touch(t, "b")
    w.prefetch(s, "kv")
    w.settle()
    key = w.acquire(s, "kv")
    assert w.granted(key), "it is in, and has been for a while"
    assert placed(w, key).contents == last_in(w).generation > first + 1


def test_scratch_without_bytes_is_saved_and_comes_back_as_any(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "kv", 0, policy="sequential", scratch="saved")
    first = use(w, s)
    w.settle()
    assert last_out(w).only is None
    assert use(w, s) == first


def test_what_is_filled_comes_in_with_its_contents_which_began_before(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "kv", 6, scratch="saved", filled=True)
    w.register(t, "b", 6)
    assert use(w, s, ()) == 0
    assert last_in(w).only is None
    w.touch(t, "b")
    assert use(w, s) == last_in(w).generation
    assert last_in(w).only == ()


# --- whose statement counts ----------------------------------------------------------------


def test_a_word_that_comes_late_is_ignored(make: Make) -> None:
    w, s, t = pair(make)
    key = w.use(s, "kv")
    w.release(
        key,
        used=(
            UsedRanges("kv", 7, ((0, 1),)),
            UsedRanges("kv", 7, ()),
            UsedRanges("kv", 6, ((5, 1),)),
        ),
    )
    w.touch(t, "b")
    assert last_out(w).only == ((0, 1),)


def test_ranges_beyond_its_end_are_ignored_and_what_is_right_comes_after(make: Make) -> None:
    w, s, t = pair(make)
    key = w.use(s, "kv")
    w.release(key, used=(UsedRanges("kv", 9, ((0, 7),)), UsedRanges("kv", 1, ((4, 2),))))
    w.touch(t, "b")
    assert last_out(w).only == ((4, 2),)


def test_nobody_says_what_is_used_of_what_is_another_s(make: Make) -> None:
    w, s, t = pair(make)
    held = w.use(s, "kv")
    also = w.acquire(t, "kv")
    w.release(also, used=(UsedRanges("kv", 5, ()),))
    w.release(held)
    w.touch(t, "b")
    assert last_out(w).only is None


def test_nothing_is_said_of_what_is_no_scratch_or_dropped_or_unknown(make: Make) -> None:
    w, s, t = pair(make, "dropped")
    w.register(s, "m", 2, mutable=True)
    keys = w.use(s, "kv"), w.use(s, "m")
    said = tuple(UsedRanges(name, 1, ((0, 1),)) for name in ("kv", "m", "no such"))
    for key in keys:
        w.release(key, used=said)
    w.touch(t, "b")
    w.unregister(s, "m")
    w.settle()
    (out,) = [a for a in w.log if isinstance(a, CopyOut)]
    assert (out.name, out.only) == ("m", None)


def test_what_is_said_when_it_is_being_saved_already_changes_nothing(make: Make) -> None:
    w, s, t = pair(make)
    w.register(s, "other", 1)
    other = w.use(s, "other")
    use(w, s)
    w.acquire(t, "b")
    w.ack("kv")
    assert w.state("kv") is State.WRITING_BACK
    w.release(other, used=(UsedRanges("kv", 1, ((0, 1),)),))
    w.move("kv")
    assert Evicted("kv", 2, 6, 6) in w.log
    assert w.ledger.lane_out.nbytes == 6


# --- saves and loads that fail -------------------------------------------------------------


def failing(make: Make) -> tuple[World, int, int, Key]:
    """`kv` is being saved to make room for `b`; both were used before."""
    w, s, t = pair(make)
    use(w, s)
    key = w.acquire(t, "b")
    w.ack("kv")
    return w, s, t, key


def test_if_the_save_fails_it_leaves_all_the_same_and_who_waits_is_not_refused(make: Make) -> None:
    w, s, _, key = failing(make)
    w.move("kv", fail="bus")
    lost, evicted = (a for a in w.out if isinstance(a, Lost | Evicted))
    assert evicted == Evicted("kv", 1, 6, 0)
    assert isinstance(lost, Lost)
    assert lost.why == "saving 'kv' failed (bus): its contents are lost, and begin anew as zeros"
    w.settle()
    assert w.granted(key)
    w.release(key)
    assert use(w, s) == last_in(w).generation > 1
    assert last_in(w).only == ()


def test_if_the_save_fails_what_was_saved_before_does_not_come_back(make: Make) -> None:
    w, s, t = pair(make)
    use(w, s)
    w.touch(t, "b")
    use(w, s)
    w.acquire(t, "b")
    w.ack("kv")
    w.move("kv", fail="bus")
    w.settle()
    w.release(next(iter(w.leases)))
    use(w, s)
    assert last_in(w).only == ()


def test_what_is_lost_is_lost_once_and_zeros_are_not_saved(make: Make) -> None:
    w, s, t, key = failing(make)
    w.move("kv", fail="bus")
    w.settle()
    w.release(key)
    w.prefetch(s, "kv")
    w.settle()
    w.touch(t, "b")
    w.leave(s)
    assert len([a for a in w.log if isinstance(a, CopyOut)]) == 1
    assert len([a for a in w.log if isinstance(a, Lost)]) == 1


def test_who_waits_for_scratch_whose_save_fails_gets_it_as_new(make: Make) -> None:
    w, s, _, first = failing(make)
    again = w.acquire(s, "kv")
    w.move("kv", fail="bus")
    w.settle()
    assert w.granted(first)
    w.release(first)
    w.settle()
    assert placed(w, again).contents == last_in(w).generation


def test_if_the_save_fails_it_is_unregistered_all_the_same(make: Make) -> None:
    w, s, _, _ = failing(make)
    key = w.unregister(s, "kv")
    w.move("kv", fail="bus")
    assert not isinstance(w.answers[key], Refuse)
    assert "kv" not in w.ledger.components


def test_a_load_that_fails_leaves_what_was_saved(make: Make) -> None:
    w, s, t = pair(make)
    first = use(w, s, ((0, 2),))
    w.touch(t, "b")
    key = w.acquire(s, "kv", early=True)
    assert w.granted(key)
    w.move("kv", fail="bus")
    w.settle()
    w.release(key)
    assert use(w, s) == first
    assert last_in(w).only == ((0, 2),)


def test_a_load_that_fails_is_not_said_to_be_in_host_memory(make: Make) -> None:
    w, s, _ = pair(make, "dropped")
    key = w.acquire(s, "kv")
    w.move("kv", fail="bus")
    refusal = w.refusal(key)
    assert refusal.code == "device_failed"
    assert refusal.message == "bringing in 'kv' failed (bus); try again"


def test_with_the_device_down_who_waits_for_what_is_being_dropped_is_refused(make: Make) -> None:
    w, s, t = pair(make, "dropped")
    use(w, s)
    w.acquire(t, "b")
    again = w.acquire(s, "kv")
    w.lose()
    assert w.refusal(again).code == "device_failed", "it will not be there"


# --- early, strict, families, the end ------------------------------------------------------


def test_an_early_grant_says_whether_its_contents_are_new(make: Make) -> None:
    w, s, t = pair(make)
    key = w.acquire(s, "kv", early=True)
    assert w.state("kv") is State.LOADING
    assert placed(w, key).contents == 1
    w.settle()
    w.release(key)
    w.touch(t, "b")
    key = w.acquire(s, "kv", early=True)
    assert w.state("kv") is State.LOADING
    assert placed(w, key).contents == 1


def test_what_is_said_under_an_early_lease_counts(make: Make) -> None:
    w, s, t = pair(make)
    key = w.acquire(s, "kv", early=True)
    w.release(key, used=(UsedRanges("kv", 1, ((0, 3),)),))
    w.settle()
    w.touch(t, "b")
    assert last_out(w).only == ((0, 3),)


def test_parts_of_a_family_begin_each_for_itself(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "kv/1", 3, part_of="kv", scratch="saved")
    w.register(s, "kv/2", 3, part_of="kv", scratch="dropped")
    w.register(t, "b", 6)
    began = []
    for _ in range(2):
        key = w.use(s, "kv")
        answer = w.answers[key]
        assert isinstance(answer, Grant)
        began.append({p.name: p.contents for p in answer.placements})
        w.release(key, used=(UsedRanges("kv/1", 1, ((0, 1),)),))
        w.register(s, "fill", 8) if "fill" not in w.owner else None
        w.touch(s, "fill")
    assert began[0]["kv/1"] == began[1]["kv/1"]
    assert began[0]["kv/2"] != began[1]["kv/2"]


def test_it_is_unregistered_while_it_is_saved(make: Make) -> None:
    w, s, _, first = failing(make)
    key = w.unregister(s, "kv")
    assert key not in w.answers
    w.move("kv")
    assert not isinstance(w.answers[key], Refuse)
    w.settle()
    assert w.granted(first)


def test_it_may_be_registered_anew_as_something_else(make: Make) -> None:
    w, s, _ = pair(make)
    use(w, s)
    w.unregister(s, "kv")
    w.settle()
    w.register(s, "kv", 6)
    assert placed(w, w.use(s, "kv")).contents == 0
    assert last_in(w).only is None


def test_what_a_living_process_may_still_write_is_not_reused_until_it_ends(make: Make) -> None:
    for scratch in ("dropped", "saved"):
        w, s, t = pair(make, scratch)
        use(w, s)
        w.leave(s, alive=True)
        assert w.ledger.pool.free == 4
        w.exit(s)
        assert w.ledger.pool.free == 10
        w.use(t, "b")


def test_lost_is_said_of_what_would_have_been_saved_and_of_nothing_else(make: Make) -> None:
    said: list[tuple[Scratch, Ranges | None, bool]] = [
        ("dropped", None, False),
        ("saved", None, True),
        ("saved", ((0, 1),), True),
        ("saved", (), False),
    ]
    for scratch, ranges, lost in said:
        w, s, _ = pair(make, scratch)
        use(w, s, *([] if ranges is None else [ranges]))
        w.leave(s)
        why = [a.why for a in w.log if isinstance(a, Lost)]
        assert bool(why) == lost, (scratch, ranges)
        assert all("since the last save" in words for words in why)


def test_a_session_that_ends_in_steps_says_what_is_lost_once(make: Make) -> None:
    said: list[tuple[Scratch, int]] = [("dropped", 0), ("saved", 1)]
    for scratch, times in said:
        w, s, _ = pair(make, scratch)
        use(w, s)
        out = w.core.handle(SessionEnds(w.now, s, 100, False))
        assert len([a for a in out if isinstance(a, Lost)]) == times


def test_it_takes_turns_with_what_it_excludes_and_has_the_policies_of_all(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "kv", 2, policy="alternating", group="g", scratch="saved")
    w.register(s, "other", 2, policy="alternating", group="g")
    first = use(w, s)
    w.touch(s, "other")
    assert [a.reason for a in w.log if isinstance(a, Evict)] == ["alternating"]
    assert use(w, s) == first


def test_status_says_that_it_is_scratch(make: Make) -> None:
    w, *_ = pair(make)
    kinds = {n: component_status(w.ledger, c, 0.0).kind for n, c in w.ledger.components.items()}
    assert kinds == {"kv": "scratch", "b": "component"}


# --- the order of evictions ----------------------------------------------------------------


def evicted_for(w: World, session: int, name: str) -> list[str]:
    """The components evicted for its load."""
    before = len(w.log)
    w.release(w.use(session, name))
    return [a.name for a in w.log[before:] if isinstance(a, Evict)]


def test_scratch_for_which_nothing_is_copied_goes_before_what_was_used_less_recently(
    make: Make,
) -> None:
    said: list[tuple[Scratch, tuple[Ranges, ...], str]] = [
        ("dropped", (), "kv"),
        ("saved", ((),), "kv"),
        ("saved", (((0, 2),),), "weights"),
        ("saved", (), "weights"),
    ]
    for scratch, ranges, first in said:
        w = make(14)
        s, t = w.open(), w.open()
        w.register(s, "kv", 6, scratch=scratch)
        w.register(s, "weights", 6)
        w.register(t, "b", 6)
        w.release(w.use(s, "weights"))
        use(w, s, *ranges)
        assert evicted_for(w, t, "b") == [first], (scratch, ranges)


def test_scratch_that_has_what_was_saved_of_it_is_not_free(make: Make) -> None:
    w = make(14)
    s, t = w.open(), w.open()
    w.register(s, "kv", 6, scratch="saved")
    w.register(s, "weights", 6)
    w.register(t, "b", 12)
    use(w, s, ((0, 2),))
    assert evicted_for(w, t, "b") == ["kv"]
    w.register(t, "c", 6)
    w.release(w.use(s, "weights"))
    w.prefetch(s, "kv")
    assert evicted_for(w, t, "c") == ["weights"]
