"""Requests of people who watch: pins, and evictions."""

import pytest

from swapd.core.actions import Accept, CopyOut, Evict, Refuse
from swapd.core.events import DeviceDown
from swapd.core.states import State
from tests.core.world import Make, World, outcome


def accepted(w: World, key: tuple[int, int]) -> bool:
    return isinstance(w.answers[key], Accept)


def family(w: World, session: int) -> None:
    for part in ("rest", "0", "1", "2"):
        w.register(session, f"f/{part}", part_of="f")


def test_what_is_pinned_stays_until_it_is_unpinned(make: Make) -> None:
    w = make(4)
    s, looker = w.open(), w.open()
    for name in "abc":
        w.register(s, name, 2)
    w.touch(s, "a")
    w.touch(s, "b")
    assert accepted(w, w.pin(looker, "a")), "anybody may"
    w.touch(s, "c")
    assert w.evictions() == ["b"], "though it was used later"
    w.leave(looker)
    w.touch(s, "b")
    assert w.evictions() == ["b", "c"], "the one who asked may go"
    assert accepted(w, w.pin(s, "a", False))
    w.touch(s, "c")
    w.touch(s, "b")
    assert "a" in w.evictions()


def test_a_pin_brings_nothing_in_and_goes_with_the_name(make: Make) -> None:
    w = make(4)
    s = w.open()
    w.register(s, "a", 2)
    assert accepted(w, w.pin(s, "a"))
    assert w.moves == {}
    assert w.ledger.components["a"].pinned
    w.unregister(s, "a")
    w.register(s, "a", 2)
    assert not w.ledger.components["a"].pinned


def test_of_a_family_the_parts_that_are_kept_are_pinned(make: Make) -> None:
    w = make(5)
    s = w.open()
    family(w, s)
    w.register(s, "a", 3)
    w.resize(s, "f", 2)
    assert accepted(w, w.pin(s, "f"))
    policies = [c.policy for c in w.ledger.families["f"].values()]
    assert policies == ["permanent", "sequential", "permanent", "sequential"]
    for part in "012":
        w.touch(s, f"f/{part}")
    w.touch(s, "f/rest")
    w.touch(s, "a")
    assert w.ledger.components["f/1"].on_device
    assert accepted(w, w.pin(s, "f", False))
    assert [c.policy for c in w.ledger.families["f"].values()].count("lru") == 2


def test_nothing_is_pinned_that_leaves_another_no_room(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 5)
    refusal = w.refusal(w.pin(s, "a"))
    assert refusal.code == "too_large"
    assert "a cannot stay" in refusal.message
    assert "b would not fit any more" in refusal.message
    assert accepted(w, w.pin(s, "b", False)), "it is not pinned, which is what was asked"


def test_nothing_is_pinned_that_leaves_one_that_waits_no_room(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for name, chunks in (("a", 3), ("b", 4), ("c", 4)):
        w.register(s, name, chunks)
    held = w.use(s, "a")
    waiting = w.acquire(t, "b", "c")
    refusal = w.refusal(w.pin(s, "a"))
    assert refusal.code == "too_large"
    assert "waits for" in refusal.message
    w.release(held)
    w.settle()
    assert w.granted(waiting)


def test_nothing_is_pinned_that_leaves_a_stage_between_two_turns_no_room(make: Make) -> None:
    """Its next acquire would be refused, and end it."""
    w = make(10)
    s, looker = w.open(), w.open()
    for name, chunks in (("a", 3), ("b", 4), ("c", 4)):
        w.register(s, name, chunks)
    turn = w.acquire(s, "b", "c")
    w.settle()
    w.release(turn)
    refusal = w.refusal(w.pin(looker, "a"))
    assert refusal.code == "too_large"
    assert "the largest turn of" in refusal.message
    assert accepted(w, w.pin(looker, "b")), "it is in the turn itself"
    w.unregister(s, "c")
    assert accepted(w, w.pin(looker, "a"))


@pytest.mark.parametrize("ask", ["acquire", "register"])
def test_a_request_that_never_fits_beside_pins_is_refused_with_the_way_out(
    make: Make, ask: str
) -> None:
    w = make(10)
    s, looker = w.open(), w.open()
    for name, chunks in (("a", 2), ("x", 1), ("b", 4), ("c", 4)):
        w.register(s, name, chunks)
    w.touch(s, "a")
    w.touch(s, "x")
    for name in ("a", "x"):
        assert accepted(w, w.pin(looker, name))

    def request() -> tuple[int, int]:
        if ask == "acquire":
            return w.acquire(s, "b", "c")
        return w.ask_register(s, "stays", 8, policy="permanent")

    refusal = w.refusal(request())
    assert refusal.code == "too_large"
    assert "a (2 B)" in refusal.message
    assert "Pinned: a, x;" in refusal.message
    assert "swapd unpin a" in refusal.message
    assert accepted(w, w.pin(s, "a", False)), "anybody may"
    key = request()
    w.settle()
    assert key not in w.waiting
    assert not isinstance(w.answers.get(key), Refuse)


def test_one_that_waits_is_refused_when_it_fits_no_more_beside_a_pin(make: Make) -> None:
    w = make(10)
    s, looker, dying = w.open(), w.open(), w.open()
    w.register(s, "a", 2)
    w.register(s, "big", 7)
    w.register(dying, "written", 2, mutable=True)
    w.touch(s, "a")
    assert accepted(w, w.pin(looker, "a"))
    w.use(dying, "written")
    key = w.acquire(s, "big")
    assert key in w.waiting
    w.leave(dying, alive=True)
    w.settle()
    assert "swapd unpin a" in w.refusal(key).message


def test_a_refusal_names_no_pin_of_what_would_stay_without_it(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "stays", 4, policy="permanent")
    for name, chunks in (("b", 4), ("c", 4)):
        w.register(s, name, chunks)
    w.touch(s, "stays")
    assert accepted(w, w.pin(s, "stays"))
    assert "inned" not in w.refusal(w.acquire(s, "b", "c")).message


def test_a_member_of_an_alternating_group_is_not_pinned(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", policy="alternating", group="g")
    refusal = w.refusal(w.pin(s, "a"))
    assert refusal.code == "conflict"
    assert "group g" in refusal.message


def test_what_is_leaving_is_pinned_only_when_it_is_out(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", mutable=True)
    w.touch(s, "a")
    w.evict_now(s, "a")
    assert w.refusal(w.pin(s, "a")).code == "in_use"
    w.settle()
    assert accepted(w, w.pin(s, "a"))


def test_what_was_registered_to_stay_cannot_be_unpinned_or_evicted(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", policy="permanent")
    w.touch(s, "a")
    assert w.refusal(w.pin(s, "a", False)).code == "conflict"
    assert accepted(w, w.pin(s, "a"))
    assert accepted(w, w.pin(s, "a", False))
    refusal = w.refusal(w.evict_now(s, "a"))
    assert refusal.code == "conflict"
    assert 'registered as "permanent"' in refusal.message


def test_an_idle_component_leaves_when_it_is_asked_to(make: Make) -> None:
    w = make(10)
    s, looker = w.open(), w.open()
    w.register(s, "a")
    w.touch(s, "a")
    key = w.evict_now(looker, "a")
    assert accepted(w, key)
    assert [a.reason for a in w.log if isinstance(a, Evict)] == ["asked"]
    assert w.ledger.components["a"].state is State.ABSENT
    assert accepted(w, w.evict_now(looker, "a")), "it is out"
    assert accepted(w, w.pin(s, "a"))
    w.touch(s, "a")
    assert "pinned" in w.refusal(w.evict_now(looker, "a")).message


def test_what_was_written_is_saved_before_it_leaves(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", mutable=True)
    w.touch(s, "a")
    assert accepted(w, w.evict_now(s, "a"))
    w.settle()
    assert sum(isinstance(a, CopyOut) for a in w.log) == 1


def test_what_is_in_use_stays_and_its_holder_is_named(make: Make) -> None:
    w = make(10)
    s, looker = w.open(), w.open()
    w.register(s, "a", mutable=True)
    coming = w.acquire(s, "a")
    assert "is coming in" in w.refusal(w.evict_now(looker, "a")).message
    w.settle()
    refusal = w.refusal(w.evict_now(looker, "a"))
    assert refusal.code == "in_use"
    assert f"session {s}" in refusal.message
    assert "being written to" in refusal.message
    w.release(coming)
    assert accepted(w, w.evict_now(looker, "a"))


def test_what_somebody_waits_for_is_not_evicted(make: Make) -> None:
    w = make(6)
    s, t = w.open(), w.open()
    w.register(s, "a", 2)
    w.register(s, "b", 4)
    w.register(s, "c", 4)
    w.touch(s, "a")
    held = w.use(s, "b")
    waiting = w.acquire(t, "a", "c")
    assert w.refusal(w.evict_now(s, "a")).code == "in_use"
    w.release(held)
    w.settle()
    assert w.granted(waiting)
    assert w.evictions() == ["b"]


def test_of_a_family_all_that_is_idle_leaves_or_nothing(make: Make) -> None:
    w = make(10)
    s = w.open()
    family(w, s)
    for part in ("rest", "0", "1"):
        w.touch(s, f"f/{part}")
    held = w.use(s, "f/1")
    assert w.refusal(w.evict_now(s, "f")).code == "in_use"
    assert w.evictions() == []
    w.release(held)
    assert accepted(w, w.evict_now(s, "f"))
    assert sorted(w.evictions()) == ["f/0", "f/1", "f/rest"]


def test_nothing_is_evicted_that_could_not_come_back(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a")
    w.touch(s, "a")
    w.send(DeviceDown(w.now, "it fell off the bus"))
    assert w.refusal(w.evict_now(s, "a")).code == "device_failed"


def test_nobody_pins_or_evicts_what_is_not_there_or_in_a_daemon_that_stops(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "talker")
    assert "did you mean 'talker'?" in w.refusal(w.pin(s, "talkr")).message
    assert w.refusal(w.evict_now(s, "x")).code == "unknown_component"
    w.stop()
    assert w.refusal(w.pin(s, "talker")).code == "stopping"
    assert w.refusal(w.evict_now(s, "talker")).code == "stopping"
    assert outcome(w) == [f"refuse {w.out[0].request} stopping"]  # type: ignore[union-attr]
