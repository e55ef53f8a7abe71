"""What is needed last goes first, once the order of uses is known; else the least recently used."""

import math
import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from swapd.core.foresight import REMEMBERED, THINGS_MAX, Candidate, Chain, Foresight, going
from swapd.core.states import State
from tests.core.driver import EXAMPLES
from tests.core.world import Make, World


def stages(make: Make, room: int, sizes: Iterable[int], **rules: object) -> tuple[World, int]:
    w = make(room, residency_factor=0.0, **rules)
    s = w.open()
    for name, size in zip("abcdefgh", sizes, strict=False):
        w.register(s, name, size)
    return w, s


def loads(w: World, session: int, names: Iterable[str]) -> int:
    before = w.ledger.loads
    for name in names:
        w.touch(session, name)
    return w.ledger.loads - before


def test_a_cycle_that_does_not_fit_loads_every_other_time(make: Make) -> None:
    w, s = stages(make, 20, (10, 10, 10))
    loads(w, s, "abc" * 4)
    assert loads(w, s, "abc" * 10) == 15
    w, s = stages(make, 20, (10, 10, 10), eviction="lru")
    loads(w, s, "abc" * 4)
    assert loads(w, s, "abc" * 10) == 30


def test_what_is_in_no_order_goes_as_by_lru(make: Make) -> None:
    w, s = stages(make, 20, (10, 10, 10))
    for name in "abacabcb":
        w.touch(s, name)
    assert w.state("a") is State.ABSENT


def test_a_family_goes_whole_and_as_one_of_the_cycle(make: Make) -> None:
    w = make(20, residency_factor=0.0)
    s = w.open()
    for i in range(5):
        w.register(s, f"dit/{i}", 2, part_of="dit")
    for name in "ab":
        w.register(s, name, 10)
    loads(w, s, ["dit", "a", "b"] * 4)
    assert loads(w, s, ["dit", "a", "b"] * 2) == 1 + 5 + 1


def test_what_goes_away_is_forgotten(make: Make) -> None:
    w, s = stages(make, 20, (10, 10, 10))
    loads(w, s, "abc" * 4)
    w.unregister(s, "b")
    w.settle()
    loads(w, s, "ac" * 3)
    w.leave(s)
    foresight = w.ledger.foresight
    assert not vars(foresight)["_known"]
    assert not foresight.expected(20, ())


def test_a_step_of_a_loop_is_no_new_use() -> None:
    chain = Chain()
    for name in "aaabbbccc" * 3:
        chain.use(name, 1)
    expected = chain.expected(2)
    assert expected["a"] < expected["b"] < expected["c"]


def test_an_order_that_lasts_stays_known() -> None:
    chain = Chain()
    for name in "abc" * 3:
        chain.use(name, 1)
    for _ in range(3 * REMEMBERED):
        for name in "abc":
            chain.use(name, 1)
        expected = chain.expected(2)
        assert expected["a"] < expected["b"] < expected["c"]


def test_what_comes_in_no_order_stays_by_how_often_it_is_used() -> None:
    chain, of_chance = Chain(), random.Random(5)
    for name in of_chance.choices("abcdef", (12, 8, 5, 3, 2, 1), k=2000):
        chain.use(name, 1)
    expected = chain.expected(3)
    assert sorted("abcdef", key=expected.__getitem__) == list("abcdef")


def test_what_cannot_stay_beside_the_next_goes_before_what_is_needed_later() -> None:
    pictures = {"text": 10, "dit": 24, "vae": 1, "text2": 16, "dit2": 28, "vae2": 1}
    chain, of_chance = Chain(), random.Random(5)
    for _ in range(50):
        often = of_chance.random() < 0.7
        for name in ("text", "dit", "vae") if often else ("text2", "dit2", "vae2"):
            chain.use(name, pictures[name])
    expected = chain.expected(48, ["text2"])
    assert expected["text"] < expected["dit"] == math.inf
    there = [Candidate(name, pictures[name]) for name in ("text", "dit", "vae")]
    assert going(3, there, expected) == [Candidate("dit", 24)]


def test_with_very_many_components_nothing_is_foreseen() -> None:
    foresight = Foresight()
    names = [f"c{i}" for i in range(THINGS_MAX + 1)]
    for name in names:
        foresight.know(name)
    for name in names * 3:
        foresight.use(name, 1, 2)
    assert not foresight.rules


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 9)), unique_by=lambda x: x[0]),
    st.integers(0, 60),
    st.data(),
)
def test_what_goes_is_enough_and_none_of_it_is_needless(
    sizes: list[tuple[str, int]], need: int, data: st.DataObject
) -> None:
    candidates = [Candidate(*one) for one in sizes]
    chain = Chain()
    for name in data.draw(st.lists(st.sampled_from("abcdef"), max_size=40)):
        chain.use(name, dict(sizes).get(name, 1))
    for expected in (None, chain.expected(data.draw(st.integers(9, 40)))):
        chosen = going(need, candidates, expected)
        freed = sum(one.chunks for one in chosen)
        if need > sum(size for _, size in sizes):
            assert set(chosen) == set(candidates)
            continue
        assert freed >= need
        assert all(freed - one.chunks < need for one in chosen)


@settings(deadline=None, max_examples=EXAMPLES // 15)
@given(st.lists(st.sampled_from("abcde"), min_size=100, max_size=200), st.integers(1, 4))
def test_it_moves_hardly_more_than_lru_whatever_the_order(requests: list[str], room: int) -> None:
    moved = {}
    for eviction in ("lru", "next_use"):
        w, s = stages(World, room, (1, 1, 1, 1, 1), eviction=eviction)
        moved[eviction] = loads(w, s, requests)
    assert moved["next_use"] <= 1.2 * moved["lru"] + 5
