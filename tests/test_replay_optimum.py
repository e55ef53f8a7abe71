"""The fewest bytes that any choice of evictions loads: as many as trying every choice finds."""

import random
from functools import cache
from itertools import combinations

import pytest

from swapd.core import events
from swapd.log.records import Start
from swapd.replay import optimum
from swapd.replay.optimum import Fewest, Names, fewest, fewest_of
from swapd.replay.work import RecordedWork, ReplayTally, WorkStep
from swapd.shared import protocol
from tests.replayed import LRU


class Case:
    """Uses of a few components, of one or two at a time that fit together."""

    def __init__(self, seed: int, *, alike: bool) -> None:
        rng = random.Random(seed)
        names = "abcde"[: rng.randint(2, 5)]
        self.sizes = {name: 1 if alike else rng.randint(1, 5) for name in names}
        self.room = max(*self.sizes.values(), rng.randint(2, 9))
        drawn = (frozenset(rng.sample(names, rng.choice((1, 1, 2)))) for _ in range(12))
        self.uses = [use for use in drawn if sum(self.sizes[n] for n in use) <= self.room]

    def fewest(self) -> Fewest:
        return fewest(self.uses, self.sizes, self.room)

    def by_trying_all(self) -> int:
        """The fewest of all sets that could stay, the small ones too."""

        @cache
        def least(i: int, there: Names) -> int:
            if i == len(self.uses):
                return 0
            asked, others = self.uses[i], sorted(there - self.uses[i])
            cost = sum(self.sizes[name] for name in asked - there)
            stay = (s for n in range(len(others) + 1) for s in combinations(others, n))
            ends = (asked.union(some) for some in stay)
            fit = (end for end in ends if sum(self.sizes[n] for n in end) <= self.room)
            return cost + min(least(i + 1, end) for end in fit)

        return least(0, Names())


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_of_evictions_loads_fewer_and_one_loads_so_few(seed: int) -> None:
    case = Case(seed, alike=False)
    assert case.fewest() == Fewest(case.by_trying_all(), True)


@pytest.mark.parametrize("alike", [False, True])
def test_where_choices_are_too_many_no_choice_loads_less_than_the_bound(
    alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimum, "_TRIED_MAX", 0)
    exact = 0
    for seed in range(200):
        case = Case(seed, alike=alike)
        bound, least = case.fewest(), case.by_trying_all()
        assert bound.nbytes <= least
        assert bound.nbytes == least or not bound.exact
        exact += bound.exact
    assert exact > 50


def test_a_component_takes_whole_chunks_and_costs_its_bytes() -> None:
    uses = [Names("a"), Names("b")] * 3
    assert fewest(uses, {"a": 5, "b": 4}, 3, 4) == Fewest(9, True)
    assert fewest(uses, {"a": 5, "b": 5}, 3, 4) == Fewest(30, True)


def test_twins_are_loaded_once_for_all() -> None:
    """A load of a component whose twin is in copies nothing."""
    asked = [
        protocol.Register(1, "a", 8, content="x"),
        protocol.Register(2, "b", 8, content="x"),
        protocol.Register(3, "c", 8, content="y"),
    ]
    steps = [WorkStep(events.SessionRequest(0.0, 1, one), (), 0.0) for one in asked]
    tally = ReplayTally(uses=[Names("a"), Names("b")] * 3)
    work = RecordedWork(Start("0", "host", 1, 8, LRU), steps, tally, None)
    assert fewest_of(work, tally, 1) == Fewest(8, False)
    tally = ReplayTally(uses=[Names("a"), Names("c")] * 3)
    assert fewest_of(work, tally, 1).nbytes == 48


def test_many_components_of_one_size_have_an_exact_answer_at_once() -> None:
    names = [f"model-{i}" for i in range(75)]
    rng = random.Random(1)
    uses = [Names((name,)) for name in rng.choices(names, k=5000)]
    sizes = dict.fromkeys(names, 8)
    found = fewest(uses, sizes, 8, 4)
    assert found.exact
    assert found.nbytes < 8 * len(uses)
    assert not fewest(uses, dict.fromkeys(names, 7), 8, 4).exact
