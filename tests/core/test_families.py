"""The rules of families, one test each: parts of one component, by a name that stands for all.

Tests take `make`, as those of `test_residency.py`.
"""

import pytest

from tests.core.test_residency import Make, outcome
from tests.core.world import World


@pytest.fixture
def make() -> Make:
    return World


# --- who may be a part of what -----------------------------------------------------------


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
