"""What follows something that is used comes in before it is asked for, and delays nobody."""

import pytest

from swapd.core.actions import Accept, Foresee, Foreseen
from swapd.core.prefetch import FOLLOWED_MAX
from swapd.core.states import State
from swapd.shared.protocol import Policy, Release
from tests.core.world import Make, World


def stages(make: Make, room: int, *names: str) -> tuple[World, int]:
    """Components of 5 chunks each that follow one another in a circle."""
    w = make(room, residency_factor=0.0)
    s = w.open()
    for name in names:
        w.register(s, name, 5)
    for name, after in zip(names, (names[-1], *names), strict=False):
        w.follows(s, name, after=after)
    return w, s


def came(w: World) -> list[tuple[str, str]]:
    return [(a.name, a.outcome) for a in w.log if isinstance(a, Foreseen)]


def foreseen(w: World) -> list[str]:
    return [a.name for a in w.log if isinstance(a, Foresee)]


def test_what_follows_is_in_when_it_is_asked_for(make: Make) -> None:
    w, s = stages(make, 10, "a", "b", "c")
    held = w.use(s, "a")
    for name in ("b", "c", "a", "b", "c"):
        w.settle()
        w.release(held)
        held = w.acquire(s, name)
        assert w.granted(held), "it waits for nothing"
    assert came(w) == [(name, "in") for name in ("b", "c", "a", "b", "c")]


def test_what_the_rules_name_follows_whatever_sessions_say(make: Make) -> None:
    w = make(10, residency_factor=0.0, order=(("a", "b", "a"),))
    for _ in range(2):
        s = w.open()
        for name in ("a", "b", "c"):
            w.register(s, name, 5)
        w.follows(s, "c", after="a")
        w.follows(s, "c", after="b", seen=True)
        w.touch(s, "a")
        w.touch(s, "b")
        assert came(w)[0] == ("b", "in")
        w.leave(s)
        w.settle()
        w.log.clear()


def test_the_record_says_what_it_saved(make: Make) -> None:
    w, s = stages(make, 10, "a", "b")
    w.acquire(s, "a")
    w.move("a")
    w.sleep(1.0)
    w.move("b")
    w.sleep(4.0)
    w.acquire(s, "b")
    (foreseen,) = [a for a in w.log if isinstance(a, Foreseen)]
    assert (foreseen.after, foreseen.outcome, foreseen.saved_s) == ("a", "in", 1.0)


def test_of_a_family_it_is_the_time_of_all_loads_together(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 5)
    for part in ("b/0", "b/1"):
        w.register(s, part, 2, part_of="b")
    w.follows(s, "b", after="a")
    w.acquire(s, "a")
    w.move("a")
    for part in ("b/0", "b/1"):
        w.sleep(1.0)
        w.move(part)
    w.sleep(4.0)
    w.acquire(s, "b")
    (foreseen,) = [a for a in w.log if isinstance(a, Foreseen)]
    assert (foreseen.outcome, foreseen.saved_s) == ("in", 2.0)


def test_what_is_coming_is_joined(make: Make) -> None:
    w, s = stages(make, 10, "a", "b")
    w.acquire(s, "a")
    w.move("a")
    w.sleep(0.5)
    w.acquire(s, "b")
    (foreseen,) = [a for a in w.log if isinstance(a, Foreseen)]
    assert (foreseen.outcome, foreseen.saved_s) == ("coming", 0.5)


def test_it_takes_no_memory_that_is_held_or_waited_for(make: Make) -> None:
    w, s = stages(make, 5, "a", "b")
    t = w.open()
    w.register(t, "x", 5)
    held = w.use(s, "a")
    waiter = w.acquire(t, "x")
    w.release(held)
    w.settle()
    assert w.granted(waiter)
    w.acquire(s, "b")
    w.release(waiter)
    w.settle()
    assert came(w) == [("b", "no_room")]


def test_what_is_there_already_or_cannot_come_in_any_more_is_not_foreseen(make: Make) -> None:
    w, s = stages(make, 10, "a", "b")
    w.touch(s, "b")
    w.log.clear()
    w.touch(s, "a")
    assert foreseen(w) == []
    w.register(s, "c", 5)
    w.follows(s, "c", after="a")
    w.lose("it fell off the bus")
    w.use(s, "a")
    assert foreseen(w) == []


def test_a_prefetch_that_waits_keeps_what_may_go_for_it_and_its_time(make: Make) -> None:
    w = make(15)
    s = w.open()
    for name in ("old", "a", "x", "b"):
        w.register(s, name, 5)
    for name in ("old", "a"):
        w.touch(s, name)
    held = w.use(s, "x")
    w.follows(s, "b", after="a")
    w.prefetch(s, "b", over=("x",), timeout=60.0)
    w.touch(s, "a")
    w.settle()
    assert w.ledger.components["old"].on_device, "only `x` may go for it"
    w.sleep(60.0)
    w.release(held)
    w.settle()
    assert not w.ledger.components["b"].on_device


def test_it_goes_for_whoever_asks(make: Make) -> None:
    w, s = stages(make, 10, "a", "b")
    w.register(s, "x", 5)
    w.use(s, "a")
    w.settle()
    asked = w.acquire(s, "x")
    w.settle()
    assert w.granted(asked)
    assert came(w) == [("b", "in_vain")]


def test_what_mostly_comes_in_vain_is_not_loaded_until_it_has_come_true_again(make: Make) -> None:
    w, s = stages(make, 10, "a", "b")
    w.register(s, "x", 10)
    for name in ("a", "x", "b", "x") * 20:
        w.touch(s, name)
    assert 3 <= came(w).count(("b", "in_vain")) <= 6
    assert came(w).count(("b", "in")) == 0
    w.follows(s, after="b")
    for name in ("a", "b", "x") * 10:
        w.touch(s, name)
    assert came(w).count(("b", "in")) > 3


def test_it_may_be_said_of_names_that_are_not_there_yet(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.follows(s, "b", after="a")
    w.register(s, "a", 5)
    w.release(w.use(s, "a"))
    w.register(t, "b", 5)
    w.use(s, "a")
    assert w.foreseen == {"b"}


def test_who_says_it_anew_replaces_it_and_without_names_takes_it_back(make: Make) -> None:
    w, s = stages(make, 10, "a", "b", "c")
    w.follows(s, "c", after="a")
    held = w.use(s, "a")
    assert w.foreseen == {"c"}
    w.follows(s, after="a")
    assert w.foreseen == set()
    w.settle()
    w.release(held)
    w.use(s, "a")
    assert came(w) == [("c", "taken_back")]


@pytest.mark.parametrize("room", [10, 15])
def test_what_its_thread_keeps_gives_way_to_what_follows_if_there_is_no_room(
    make: Make, room: int
) -> None:
    w, s = stages(make, room, "a", "b", "c")
    w.touch(s, "b")
    w.touch(s, "c")
    kept = w.use(s, "a")
    w.settle()
    asked = w.acquire(s, "b", holds=(), spare=(Release(0, kept[1]),))
    assert w.granted(asked), "it is in"
    assert (kept in w.ledger.leases) == (room == 15)
    w.settle()
    w.release(asked)
    assert w.granted(w.acquire(s, "c"))


def test_it_ends_with_the_session_that_said_it(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 5)
    w.register(s, "b", 5)
    w.follows(t, "b", after="a")
    w.leave(t)
    w.use(s, "a")
    assert w.foreseen == set()


def test_a_follower_that_has_no_room_stops_nothing(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 5)
    w.register(s, "large", 10)
    w.follows(s, "large", after="a")
    for _ in range(3):
        held = w.use(s, "a")
        asked = w.acquire(s, "large", agent=1)
        w.release(held)
        w.settle()
        w.release(asked)
    assert came(w) == [("large", "no_room")] * 3


def test_many_may_follow_and_no_more_than_the_table_holds(make: Make) -> None:
    w = make(10)
    s = w.open()
    for i in range(FOLLOWED_MAX):
        w.follows(s, "x", after=f"c{i}")
    assert "takes no more" in w.refusal(w.follows(s, "x", after="one more")).message
    nothing = w.answer(w.follows(s, after="one more"))
    assert isinstance(nothing, Accept), "there is nothing to take back"
    w.follows(s, "y", after="c0")
    w.follows(s, after="c1")
    w.follows(s, "x", after="one more")


def test_what_was_seen_replaces_nothing_that_was_declared(make: Make) -> None:
    w, s = stages(make, 10, "a", "b", "c")
    t = w.open()
    w.follows(t, "c", after="a", seen=True)
    w.use(s, "a")
    assert w.foreseen == {"b"}
    w.follows(s, after="a")
    w.follows(t, "b", after="a", seen=True)
    w.follows(t, "c", after="a", seen=True)
    w.release(w.use(s, "a"))
    w.follows(s, "b", after="a")
    w.use(s, "a")
    assert foreseen(w) == ["b", "c", "b"]


def test_what_was_seen_leaves_room_in_the_table_for_what_is_declared(make: Make) -> None:
    w = make(10)
    s = w.open()
    for i in range(FOLLOWED_MAX // 2):
        w.follows(s, "x", after=f"c{i}", seen=True)
    assert "takes no more" in w.refusal(w.follows(s, "x", after="one more", seen=True)).message
    w.follows(s, "y", after="c0", seen=True)
    w.follows(s, "x", after="one more")
    assert len(w.ledger.followers) == FOLLOWED_MAX // 2 + 1


def by_parts(make: Make, room: int, parts: int) -> tuple[World, int]:
    """Families "a" and "b" of so many parts of one chunk. "b" follows "a"."""
    w = make(room, residency_factor=0.0)
    s = w.open()
    for family in ("a", "b"):
        for i in range(parts):
            w.register(s, f"{family}/{i}", 1, part_of=family)
    w.follows(s, "b", after="a")
    return w, s


def step(w: World, s: int, part: str) -> bool:
    """Use a part for a while in which all copies end; return whether it was in."""
    w.sleep(0.1)
    lease = w.acquire(s, part)
    was_in = w.granted(lease)
    w.settle()
    w.release(lease)
    return was_in


def there(w: World, family: str) -> list[str]:
    return [c.name for c in w.ledger.components.values() if c.on_device and c.side == family]


def test_it_leaves_room_for_the_parts_that_are_still_needed_before_it(make: Make) -> None:
    w, s = by_parts(make, 5, 4)
    for i in range(4):
        step(w, s, f"a/{i}")
        assert there(w, "b") == [f"b/{n}" for n in range(i + 1)]
    assert all(step(w, s, f"b/{i}") for i in range(4))
    assert came(w) == [("b", "in")]


def test_what_a_use_never_has_gets_no_room(make: Make) -> None:
    w, s = by_parts(make, 5, 4)
    for _ in range(2):
        for part in ("a/0", "a/1", "b/0", "b/1", "b/2"):
            step(w, s, part)
    w.register(s, "x", 5)
    w.touch(s, "x")
    step(w, s, "a/0")
    step(w, s, "a/1")
    assert len(there(w, "b")) == 4


def test_parts_that_are_in_stay_until_their_use_has_had_them(make: Make) -> None:
    w, s = by_parts(make, 5, 4)
    w.follows(s, after="a")
    for i in range(4):
        step(w, s, f"a/{i}")
    w.follows(s, "b", after="a")
    step(w, s, "a/0")
    assert len(there(w, "a")) == 4
    assert there(w, "b") == ["b/0"]


def test_a_part_that_another_has_is_counted_once(make: Make) -> None:
    w, s = by_parts(make, 6, 4)
    w.follows(s, after="a")
    w.use(s, "a/3", agent=1)
    w.follows(s, "b", after="a")
    step(w, s, "a/0")
    assert there(w, "b") == ["b/0", "b/1"]


def test_it_stays_while_the_family_before_it_takes_the_room_of_its_own_used_parts(
    make: Make,
) -> None:
    w, s = by_parts(make, 4, 4)
    for i in range(4):
        step(w, s, f"a/{i}")
    assert len(there(w, "b")) == 4
    assert "in_vain" not in dict(came(w)).values()


def test_a_use_that_goes_on_ends_a_prediction_that_took_its_room(make: Make) -> None:
    w, s = by_parts(make, 5, 4)
    for i in range(4):
        step(w, s, f"a/{i}")
    for _ in range(8):
        for i in range(4):
            step(w, s, f"a/{i}")
    assert all(step(w, s, f"a/{i}") for i in range(4)), "its room is its own again"
    assert came(w) == [("b", "in_vain")]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("policy", ["lru", "alternating"])
def test_a_loop_keeps_its_place_from_its_second_use_on(
    make: Make, policy: Policy, strict: bool
) -> None:
    """Such as the steps of a DiT before its VAE: nobody says which is the last."""
    w = make(10, residency_factor=0.0, strict=strict)
    s = w.open()
    for name, chunks in (("dit", 9), ("vae", 2)):
        w.register(s, name, chunks, policy=policy, group="g" if policy == "alternating" else None)
    w.follows(s, "vae", after="dit")
    for picture in range(3):
        for _ in range(20):
            w.release(w.use(s, "dit"))  # perhaps "dit" is on its way out when it is asked for
        w.sleep(0.1)
        assert w.evictions().count("dit") == 1 + picture
        w.touch(s, "vae")
    assert came(w)[0] == ("vae", "in_vain")
    assert [outcome for _, outcome in came(w)].count("in_vain") == 1


def test_a_follower_comes_in_beside_a_loop(make: Make) -> None:
    w = make(11, residency_factor=0.0)
    s = w.open()
    w.register(s, "dit", 9)
    w.register(s, "vae", 2)
    w.register(s, "encoder", 2)
    w.follows(s, "vae", after="dit")
    for _ in range(3):
        w.touch(s, "encoder")
        for _ in range(5):
            w.touch(s, "dit")
        assert w.state("vae") == State.RESIDENT
        w.touch(s, "vae")
    assert came(w) == [("vae", "in")] * 3


def test_what_is_used_once_before_its_follower_gives_it_its_place(make: Make) -> None:
    w = make(10, residency_factor=0.0)
    s = w.open()
    w.register(s, "dit", 9)
    w.register(s, "vae", 2)
    w.follows(s, "vae", after="dit")
    for uses in (3, 1, 1):
        for _ in range(uses):
            w.touch(s, "dit")
        w.settle()
        came_in = w.state("vae") == State.RESIDENT
        w.touch(s, "vae")
    assert came_in
