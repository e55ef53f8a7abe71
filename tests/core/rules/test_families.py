"""The rules of families, one test each: parts of one component, under one name for all."""

from typing import Any

import pytest

from swapd.core import families
from swapd.core.actions import Accept, Evict, Grant
from swapd.core.events import DeviceDown
from swapd.core.status import forecast
from swapd.shared import protocol
from tests.core.world import Make, World, outcome

# --- valid parts -------------------------------------------------------------------------


def test_a_family_belongs_to_one_session(make: Make) -> None:
    w = make(10)
    s, t = w.open("first"), w.open("second")
    w.register(s, "f/1", part_of="f")
    refusal = w.refusal(w.ask_register(t, "f/2", part_of="f"))
    assert refusal.code == "duplicate_name"
    assert "first" in refusal.message
    w.leave(s)
    w.register(t, "f/2", part_of="f")


def test_a_family_and_a_component_cannot_have_one_name(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "f/1", part_of="f")
    w.register(s, "a")
    assert w.refusal(w.ask_register(s, "f")).code == "duplicate_name"
    assert w.refusal(w.ask_register(s, "b", part_of="a")).code == "duplicate_name"
    assert w.refusal(w.ask_register(s, "g", part_of="g")).code == "bad_request"
    assert w.refusal(w.ask_register(s, "g", part_of="workspace 1.1")).code == "bad_request"


def test_the_name_of_a_family_is_free_again_with_its_last_part(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in ("f/1", "f/2"):
        w.register(s, name, part_of="f")
    w.unregister(s, "f/1")
    assert w.refusal(w.ask_register(s, "f")).code == "duplicate_name"
    w.unregister(s, "f/2")
    w.register(s, "f")


# --- alternating groups ------------------------------------------------------------------


def test_parts_of_one_family_do_not_exclude_each_other(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in ("e/1", "e/2"):
        w.register(s, name, 2, policy="alternating", group="g", part_of="e")
    w.register(s, "dit", 4, policy="alternating", group="g")
    w.touch(s, "dit")
    w.acquire(s, "e/1", "e/2")
    assert outcome(w) == [
        "evict dit (alternating)",
        "revoke dit",
        "copy in e/1",
        "copy in e/2",
    ]
    w.settle()


def test_a_part_stays_when_another_of_its_family_comes_in(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in ("e/1", "e/2"):
        w.register(s, name, 2, policy="alternating", group="g", part_of="e")
    w.touch(s, "e/1")
    w.touch(s, "e/2")
    assert w.evictions() == []


def test_two_families_of_one_group_exclude_each_other(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in ("e/1", "e/2"):
        w.register(s, name, 2, policy="alternating", group="g", part_of="e")
    for name in ("f/1", "f/2"):
        w.register(s, name, 2, policy="alternating", group="g", part_of="f")
    w.touch(s, "e/1")
    w.touch(s, "e/2")
    held = w.use(s, "f/1")
    assert w.evictions() == ["e/1", "e/2"]
    refusal = w.refusal(w.acquire(s, "f/1", "e/1", agent=1))
    assert refusal.code == "conflict"
    w.release(held)


def test_a_rival_leaves_once_for_several_parts(make: Make) -> None:
    w = make(10, strict=True)
    s = w.open()
    for name in ("e/1", "e/2"):
        w.register(s, name, 3, policy="alternating", group="g", part_of="e")
    w.register(s, "dit", 5, policy="alternating", group="g")
    w.touch(s, "dit")
    w.acquire(s, "e/1", "e/2")
    assert outcome(w) == ["evict dit (alternating)", "revoke dit (ack)"]
    w.ack("dit")
    assert outcome(w) == ["copy in e/1", "copy in e/2"]


# --- one name for all parts --------------------------------------------------------------


def test_a_familys_name_stands_for_its_parts(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for name in ("f/1", "f/2"):
        w.register(s, name, 2, part_of="f")
    w.register(s, "a", 2)
    own = w.use(s, "a", "f")
    grant = w.answers[own]
    assert isinstance(grant, Grant)
    assert grant.names == ("a", "f/1", "f/2")
    assert [p.name for p in grant.placements] == ["a", "f/1", "f/2"]
    others = w.use(t, "f")
    w.release(own)
    assert {c.name for c in w.ledger.idle} == {"a"}
    w.release(others)
    assert {c.name for c in w.ledger.idle} == {"a", "f/1", "f/2"}


def test_a_name_that_has_no_parts_is_granted_as_it_was_asked_for(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "f/1", part_of="f")
    grant = w.answers[w.use(s, "f/1")]
    assert isinstance(grant, Grant)
    assert grant.names == ()


def test_a_family_that_is_not_there_whole_is_waited_for(make: Make) -> None:
    w = make(10)
    s = w.open()
    first, second = w.ask_register(s, "f/1", part_of="f"), w.ask_register(s, "f/2", part_of="f")
    w.make_masters()
    w.commit(s, "f/1")
    w.make_masters()
    assert "'f/2' is still being registered" in w.refusal(w.acquire(s, "f")).message
    key = w.acquire(s, "f", await_registration=True)
    w.commit(s, "f/2")
    w.make_masters()
    w.settle()
    assert w.granted(key)
    assert w.leases[key] == {"f/1", "f/2"}
    assert w.answers.keys() >= {first, second}


def test_who_waits_for_a_family_that_nobody_has_registered_gets_its_parts(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    key = w.acquire(t, "f", await_registration=True)
    w.register(s, "f/1", part_of="f")
    w.settle()
    assert w.granted(key)


def test_who_waits_for_a_family_gets_the_parts_that_it_had_then(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "f/1", 2, part_of="f")
    w.register(s, "a", 6)
    w.register(s, "b", 10)
    held = w.use(s, "b")
    key = w.acquire(s, "a", "f", agent=1, early=True)
    w.register(s, "f/2", 3, part_of="f")
    w.release(held)
    assert w.granted(key)
    assert w.leases[key] == {"a", "f/1"}


def test_a_family_is_prefetched_part_by_part(make: Make) -> None:
    w = make(3)
    s = w.open()
    for name in ("f/1", "f/2"):
        w.register(s, name, 2, part_of="f")
    w.prefetch(s, "f")
    assert outcome(w) == ["accept 5", "copy in f/1"]
    w.settle()


def test_refusals_speak_of_a_family_by_its_name(make: Make) -> None:
    w = make(3)
    s = w.open()
    for name in ("f/1", "f/2"):
        w.register(s, name, 2, part_of="f")
    w.register(s, "a", 1)
    too_large = w.refusal(w.acquire(s, "f", "a"))
    assert too_large.code == "too_large"
    assert too_large.message.startswith("f + a needs 5 B")
    unknown = w.refusal(w.acquire(s, "nothing"))
    assert "registered: a, f." in unknown.message
    held = w.use(s, "a")
    late = w.refusal(w.acquire(s, "f/1", "a", timeout=0.0))
    assert "f/1 + a not granted" in late.message
    w.release(held)


# --- eviction at release -----------------------------------------------------------------


def test_a_grant_says_what_leaves_when_it_is_released(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "f/1", part_of="f")
    w.register(s, "f/2", part_of="f", policy="sequential")
    grant = w.answers[w.use(s, "f")]
    assert isinstance(grant, Grant)
    assert [p.transient for p in grant.placements] == [False, True]


# --- keeping a part of it ----------------------------------------------------------------


def family(w: World, session: int, blocks: int = 4, nbytes: int = 2, **kind: Any) -> None:
    """`f`: one byte outside of blocks, and blocks of `nbytes` each."""
    w.register(session, "f/rest", 1, part_of="f", **kind)
    for i in range(blocks):
        w.register(session, f"f/{i}", nbytes, part_of="f", **kind)


def kept(w: World) -> list[str]:
    return [c.name for c in w.ledger.families["f"].values() if c.policy != "sequential"]


def test_what_is_kept_is_spread_and_the_rest_of_it_passes_through(make: Make) -> None:
    w = make(20)
    s = w.open()
    family(w, s)
    key = w.resize(s, "f", 5)
    assert isinstance(w.answers[key], Accept)
    assert kept(w) == ["f/rest", "f/1", "f/3"]
    w.resize(s, "f", 4)
    assert kept(w) == ["f/rest", "f/2"], "the last byte is too few for another"
    w.resize(s, "f", 5)
    for i in range(4):
        w.touch(s, f"f/{i}")
    assert w.evictions() == ["f/0", "f/2"]
    w.resize(s, "f", 9)
    assert kept(w) == ["f/rest", "f/0", "f/1", "f/2", "f/3"]


def test_idle_parts_that_are_not_kept_any_more_leave_at_once(make: Make) -> None:
    w = make(20)
    s = w.open()
    family(w, s)
    for i in range(4):
        w.touch(s, f"f/{i}")
    held = w.use(s, "f/0")
    w.resize(s, "f", 0)
    assert kept(w) == ["f/rest"], "without it nothing could run"
    assert w.evictions() == ["f/1", "f/2", "f/3"]
    assert {a.reason for a in w.log if isinstance(a, Evict)} == {"resized"}
    w.release(held)
    assert w.evictions()[3:] == ["f/0"]


def test_what_a_waiter_names_stays_until_it_was_used(make: Make) -> None:
    w = make(8)
    s, t = w.open(), w.open()
    family(w, s, blocks=1)
    w.register(t, "a", 5)
    w.touch(s, "f/0")
    w.register(s, "b", 2)
    held = w.use(s, "b")
    waiting = w.acquire(t, "a", "f/0")
    w.resize(s, "f", 0)
    assert w.evictions() == []
    w.cancel(waiting)
    assert w.evictions() == ["f/0"]
    w.release(held)


def test_without_a_number_as_much_is_kept_as_there_is_room_for(make: Make) -> None:
    w = make(12)
    s = w.open()
    w.register(s, "vae", 2, policy="permanent")
    family(w, s)
    w.resize(s, "f")
    assert len(kept(w)) == 5, "all of it fits"
    w.register(s, "more", 2, policy="permanent")
    assert kept(w) == ["f/rest", "f/2"], "two others have room beside it"


def test_it_has_what_comes_to_stay_beside_it_and_its_room_when_that_goes(make: Make) -> None:
    w = make(12)
    s, t = w.open(), w.open()
    family(w, s)
    w.resize(s, "f")
    for name in ("f/0", "f/1"):
        w.touch(s, name)
    w.register(t, "vae", 4, policy="permanent")
    assert kept(w) == ["f/rest", "f/2"]
    assert w.evictions() == ["f/0", "f/1"]
    w.leave(t)
    assert len(kept(w)) == 5
    w.resize(s, "f", 5)
    w.register(s, "vae", 1, policy="permanent")
    assert kept(w) == ["f/rest", "f/1", "f/3"], "it was told how much to keep"


def test_a_part_that_comes_or_goes_later_changes_what_is_kept_of_it(make: Make) -> None:
    w = make(12)
    s = w.open()
    family(w, s)
    w.resize(s, "f")
    assert len(kept(w)) == 5
    w.register(s, "f/4", 4, part_of="f")
    assert kept(w) == ["f/rest", "f/2"], "two others have room beside it"
    w.unregister(s, "f/4")
    assert len(kept(w)) == 5


def test_its_parts_are_looked_at_only_when_the_room_has_changed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = make(12)
    s = w.open()
    family(w, s)
    w.resize(s, "f")
    w.register(s, "vae", 4, policy="permanent")
    monkeypatch.setattr(families, "keep", None)
    w.touch(s, "f/2")


def test_parts_of_a_family_that_never_leaves_do_when_they_are_not_kept(make: Make) -> None:
    w = make(20)
    s = w.open()
    family(w, s, policy="permanent")
    held = w.use(s, "f")
    w.resize(s, "f", 5)
    w.release(held)
    assert w.evictions() == ["f/0", "f/2"]
    w.touch(s, "f/0")
    w.resize(s, "f", 1)
    assert w.evictions() == ["f/0", "f/2", "f/0", "f/1", "f/3"]
    w.prefetch(s, "f/1")
    w.settle()
    assert {c.name for c in w.ledger.idle} == {"f/1"}
    w.resize(s, "f", 9)
    assert not w.ledger.idle


def test_what_passes_through_does_not_count_though_what_is_kept_never_leaves(make: Make) -> None:
    w = make(8)
    s = w.open()
    w.register(s, "vae", 2, policy="permanent")
    family(w, s, policy="permanent", transient=True)
    assert kept(w) == []
    w.resize(s, "f", 3)
    assert kept(w) == ["f/rest", "f/2"]
    w.touch(s, "vae")
    for i in range(4):
        w.touch(s, f"f/{i}")
    assert w.evictions() == ["f/0", "f/1", "f/3"]


def test_no_more_is_kept_than_leaves_room_for_what_passes_through(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "vae", 2, policy="permanent")
    family(w, s, policy="permanent", transient=True)
    w.resize(s, "f", 8)
    assert kept(w) == ["f/rest", "f/1", "f/3"]
    held = w.use(s, "vae", "f/rest", "f/1", "f/3")
    w.touch(s, "f/0")
    w.release(held)


def test_what_is_in_no_block_and_never_leaves_must_fit(make: Make) -> None:
    w = make(8)
    s = w.open()
    w.register(s, "vae", 6, policy="permanent")
    family(w, s, policy="permanent", transient=True)
    refusal = w.refusal(w.resize(s, "f", 0))
    assert refusal.code == "too_large"
    assert "f needs 3" in refusal.message
    assert "another policy" in refusal.message
    assert kept(w) == []


def test_who_does_not_fit_beside_what_never_leaves_from_now_on_is_refused(make: Make) -> None:
    w = make(6)
    s, t = w.open(), w.open()
    family(w, s, blocks=2, policy="permanent")
    w.register(t, "a", 4)
    w.resize(s, "f", 1)
    held = w.use(s, "f")
    key = w.acquire(t, "a")
    assert key in w.waiting
    w.resize(s, "f", 5)
    assert w.refusal(key).code == "too_large"
    w.release(held)


def test_what_was_read_ahead_in_vain_goes_before_what_is_kept(make: Make) -> None:
    w = make(6)
    s = w.open()
    family(w, s)
    w.resize(s, "f", 3)
    for name in ("f/rest", "f/2"):
        w.touch(s, name)
    w.prefetch(s, "f/0")
    w.settle()
    w.register(s, "a", 3)
    asked = protocol.ForecastRequest(1, ("a",))
    foretold = forecast(w.core, asked, s, w.now)
    assert isinstance(foretold, protocol.Forecast)
    assert [v.name for v in foretold.victims] == ["f/0"]
    w.touch(s, "a")
    assert w.evictions() == ["f/0"]


def test_a_sequential_component_that_was_prefetched_in_vain_goes_first(make: Make) -> None:
    w = make(4)
    s = w.open()
    w.register(s, "kept", 2)
    w.register(s, "once", 2, policy="sequential")
    w.register(s, "next", 2)
    w.touch(s, "kept")
    w.prefetch(s, "once")
    w.settle()
    w.touch(s, "next")
    assert w.evictions() == ["once"]


def test_nothing_goes_so_that_what_passes_through_is_there_ahead(make: Make) -> None:
    w = make(5)
    s = w.open()
    family(w, s)
    w.resize(s, "f", 3)
    for name in ("f/rest", "f/2"):
        w.touch(s, name)
    w.prefetch(s, "f/0", "f/1")
    w.settle()
    assert w.evictions() == []
    w.touch(s, "f/0")
    w.settle()
    assert w.evictions() == ["f/0"]
    assert "f/1" in w.ledger.idle, "there is room now"


def test_parts_that_pass_through_still_exclude_the_rivals_of_their_group(make: Make) -> None:
    w = make(20)
    s = w.open()
    family(w, s, policy="alternating", group="g")
    w.register(s, "encoder", 2, policy="alternating", group="g")
    w.resize(s, "f", 1)
    w.touch(s, "encoder")
    w.acquire(s, "f/0")
    assert outcome(w)[0] == "evict encoder (alternating)"
    w.settle()


def test_a_part_that_passes_through_stays_when_the_device_is_down(make: Make) -> None:
    w = make(20)
    s = w.open()
    family(w, s)
    w.touch(s, "f/0")
    w.send(DeviceDown(w.now, "broken"))
    w.resize(s, "f", 0)
    assert w.evictions() == []
    assert w.granted(w.acquire(s, "f/0"))


def test_only_families_are_resized(make: Make) -> None:
    w = make(20)
    s, t = w.open(), w.open("operator")
    family(w, s)
    w.register(s, "a")
    assert isinstance(w.answers[w.resize(t, "f", 1)], Accept), "anybody may"
    assert "registered whole" in w.refusal(w.resize(s, "a", 1)).message
    assert "resize that" in w.refusal(w.resize(s, "f/0", 1)).message
    assert "in parts: f." in w.refusal(w.resize(s, "nothing")).message
    assert w.refusal(w.resize(s, "f", -1)).code == "bad_request"


# --- the order of evictions --------------------------------------------------------------


def test_a_part_that_comes_in_does_not_push_out_those_that_are_needed_next(make: Make) -> None:
    w = make(7)
    s = w.open()
    family(w, s)
    w.register(s, "encoder", 3)
    w.touch(s, "encoder")
    for _ in range(3):
        for part in ("f/rest", "f/0", "f/1", "f/2", "f/3"):
            w.touch(s, part)
    # the most recent part is needed last: a pass copies one part, not all
    assert w.evictions() == ["encoder", "f/2", "f/1", "f/0"]


def test_an_idle_part_of_what_runs_goes_after_all_others(make: Make) -> None:
    w = make(7)
    s = w.open()
    family(w, s)
    w.register(s, "encoder", 2)
    w.touch(s, "f/0")
    pass_ = w.use(s, "f/rest")
    w.touch(s, "f/1")
    w.touch(s, "encoder")
    w.touch(s, "f/2")
    assert w.evictions() == ["encoder"]
    w.touch(s, "f/3")
    assert w.evictions() == ["encoder", "f/2"]
    w.release(pass_)
