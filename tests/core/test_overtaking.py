"""Enough waiters overtake that every wait ends, and no more than that."""

from collections.abc import Callable, Set
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapd.core.deadlock import must_run_first
from swapd.core.deadlock import stuck as stuck_among
from swapd.core.records import Key
from tests.core import driver
from tests.core.pool import SetPool
from tests.core.world import World

#: Name to size.
SIZES = {"a": 1, "b": 2, "c": 2, "d": 3, "e": 4, "f": 5}
TOTAL = 10

names = st.sets(st.sampled_from(sorted(SIZES)))


def fits(wanted: Set[str]) -> bool:
    return sum(SIZES[name] for name in wanted) <= TOTAL


@given(
    asked=names,
    wants=st.dictionaries(st.integers(0, 5), names, max_size=5),
    shares=st.permutations(sorted(SIZES)),
)
def test_a_smallest_set_overtakes_and_one_of_it_can_go_at_once(
    asked: set[str], wants: dict[int, set[str]], shares: list[str]
) -> None:
    holds: dict[int, set[str]] = {agent: set() for agent in wants}
    for agent, name in zip(wants, shares, strict=False):
        holds[agent].add(name)
    pool = SetPool(wants, holds, fits)
    if not fits(asked) or not fits(pool.held()) or stuck_among(wants, pool.copy()):
        return
    first = must_run_first(list(wants), pool, lambda left: fits(asked | left.held()))
    held = set().union(*holds.values())
    if not first:
        assert fits(asked | held), "nobody need run, yet there is no room"
        return
    assert any(fits(wants[a] | held) for a in first), "nobody can go"
    assert fits(asked | after(first, wants, holds)), "too few"
    for agent in first:
        assert not fits(asked | after(first - {agent}, wants, holds)), f"{agent} overtook in vain"


def after(running: set[int], wants: dict[int, set[str]], holds: dict[int, set[str]]) -> set[str]:
    """The names held when all of `running` that can run have run."""
    left = set(wants)
    while True:
        held = set().union(*(holds[a] for a in left))
        able = {a for a in left & running if fits(wants[a] | held)}
        if not able:
            return held
        left -= able


@pytest.mark.parametrize("seed", driver.seeds(30))
def test_every_wait_ends_though_who_waits_releases_nothing(seed: int) -> None:
    """Each agent does one thing at a time: it waits, acquires more, or releases."""
    random = Random(seed)
    w = World(TOTAL, residency_factor=random.choice((0.0, 8.0)))
    owner = w.open()
    for name, size in SIZES.items():
        group = "g" if name in "bd" and seed % 2 else None
        w.register(owner, name, size, "alternating" if group else "lru", group)
    agents: dict[int, list[Key]] = {w.open(): [] for _ in range(5)}

    def step(act: Callable[[int], None]) -> None:
        waiting = {key[0] for key in w.waiting}
        free = [agent for agent in agents if agent not in waiting]
        if free:
            act(random.choice(free))
        w.settle()

    def take(agent: int) -> None:
        asked = random.sample(sorted(SIZES), random.choice((1, 1, 1, 2)))
        agents[agent].append(w.acquire(agent, *asked))

    def give(agent: int) -> None:
        if agents[agent]:
            w.release(agents[agent].pop(random.randrange(len(agents[agent]))))

    for _ in range(80):
        step(random.choice((take, give)))
        assert len({key[0] for key in w.waiting}) < len(agents), "all wait, and none is refused"
    for _ in range(2000):
        if not w.waiting and not w.leases:
            break
        step(give)
    w.sleep(10.0)
    assert not w.waiting, "who waits behind others waits forever"
