"""Every event in any order, and every slow action may fail: the guarantees hold.

`World` checks after each step; `wind_up` checks that every wait ends.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from swapd.core import Residency
from swapd.core.actions import CopyIn, CopyOut, Lost
from tests.core import driver
from tests.core.driver import EXAMPLES, Choices, Move
from tests.core.world import World

T = TypeVar("T")

#: The rules of the core: the first are its defaults.
FACTORS, PATIENCES_S = (8.0, 0.0), (30.0, 1.0)


class Drawn(Choices):
    """Choices that Hypothesis makes, and shrinks: towards the first option."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def pick(self, options: Sequence[T]) -> T:
        return self._data.draw(st.sampled_from(options))


def does(move: Move) -> Callable[..., None]:
    def step(self: "Machine", data: st.DataObject) -> None:
        move(self.w, Drawn(data))

    step.__name__ = move.__name__
    return step


class Machine(RuleBasedStateMachine):
    w: World

    @initialize(
        strict=st.booleans(),
        factor=st.sampled_from(FACTORS),
        patience_s=st.sampled_from(PATIENCES_S),
        sessions=st.integers(1, 3),
        mutable_one_in=st.sampled_from((3, 1)),
        scratch_one_in=st.sampled_from((3, 1)),
        keep_host=st.sampled_from((0, 4, 100)),
        found=st.integers(0, 2),
    )
    def start(
        self,
        strict: bool,
        factor: float,
        patience_s: float,
        sessions: int,
        mutable_one_in: int,
        scratch_one_in: int,
        keep_host: int,
        found: int,
    ) -> None:
        self.w = World(
            10,
            mutable_one_in=mutable_one_in,
            scratch_one_in=scratch_one_in,
            strict=strict,
            residency_factor=factor,
            patience_s=patience_s,
            residency_bound_s=0.5,
            keep_host=keep_host,
        )
        for nbytes in range(1, found + 1):
            self.w.find("before", nbytes, "the same")
        for _ in range(sessions):
            self.w.open()

    def teardown(self) -> None:
        if hasattr(self, "w"):
            driver.wind_up(self.w)


RUNNABLE: dict[Move, Callable[[World], object]] = {
    driver.leave: lambda w: len(w.sessions) > 1,
    driver.exit_process: lambda w: w.still_running,
    driver.commit: lambda w: w.owner,
    driver.unregister: lambda w: w.owner,
    driver.update: lambda w: w.owner,
    driver.update_several: lambda w: w.owner,
    driver.give_up: lambda w: w.owner,
    driver.acquire: lambda w: w.owner and w.sessions,
    driver.acquire_workspace: lambda w: w.sessions,
    driver.start: lambda w: w.sessions,
    driver.end_start: lambda w: w.starters,
    driver.prefetch: lambda w: w.owner and w.sessions,
    driver.resize: lambda w: any(w.part_of[n] for n in w.owner) and w.sessions,
    driver.pin: lambda w: w.owner and w.sessions,
    driver.evict_now: lambda w: w.owner and w.sessions,
    driver.forget: lambda w: w.kept and w.sessions,
    driver.release: lambda w: w.leases,
    driver.come_back: lambda w: w.leases,
    driver.give_way: lambda w: w.leases and w.wanted,
    driver.cancel: lambda w: w.waiting or w.leases,
    driver.end_master: lambda w: w.making,
    driver.end_move: lambda w: w.moves,
    driver.step: lambda w: w.moves,
    driver.end_ack: lambda w: w.acks,
    driver.fenced_leave: lambda w: set(w.fenced) & w.sessions,
}


def _rule(move: Move) -> object:
    runnable = RUNNABLE.get(move, lambda w: True)
    step: Any = rule(data=st.data())(does(move))
    return precondition(lambda self: bool(runnable(self.w)))(step)  # type: ignore[no-untyped-call]


for _move, _often in driver.MOVES.items():
    for _i in range(1 + (_often >= 6) + (_often >= 10)):
        setattr(Machine, f"{_move.__name__}_{_i}", _rule(_move))


@pytest.mark.timeout(1.1 * EXAMPLES)
def test_the_guarantees_hold_whatever_happens_in_whatever_order() -> None:
    some = settings(stateful_step_count=60, max_examples=EXAMPLES // 2)
    run_state_machine_as_test(Machine, settings=some)


@pytest.mark.timeout(1.1 * EXAMPLES)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("patience_s", PATIENCES_S)
@pytest.mark.parametrize("factor", FACTORS)
def test_the_guarantees_hold_over_long_runs(factor: float, patience_s: float, strict: bool) -> None:
    """A step costs a fifth of one that Hypothesis chooses."""
    drive = partial(
        driver.drive,
        strict=strict,
        residency_factor=factor,
        patience_s=patience_s,
        keep_host=0 if strict else 5,
        steps=300,
    )
    as_it_is = (factor, patience_s) == (FACTORS[0], PATIENCES_S[0])
    for seed in driver.seeds(10 if as_it_is else 3):
        drive(Residency, seed)


@pytest.mark.timeout(1.1 * EXAMPLES)
def test_no_byte_is_lost_while_copies_go_both_ways() -> None:
    in_part = begun_anew = 0
    seeds = driver.seeds(40)
    for seed in seeds:
        strict = seed % 4 == 1
        w = driver.drive(Residency, seed, steps=400, strict=strict, moves=driver.BOTH_WAYS)
        in_part += sum(isinstance(a, CopyIn | CopyOut) and bool(a.only) for a in w.log)
        begun_anew += sum(isinstance(a, Lost) and "begin anew" in a.why for a in w.log)
    assert in_part > len(seeds) / 2
    assert begun_anew > 0


@pytest.mark.timeout(1.1 * EXAMPLES)
def test_no_byte_is_wrong_while_twins_share_chunks() -> None:
    joined = 0
    seeds = driver.seeds(30)
    for seed in seeds:
        w = driver.drive(Residency, seed, steps=400, strict=seed % 4 == 1, twin_one_in=1)
        joined += sum(isinstance(a, CopyIn) and bool(a.joins) for a in w.log)
    assert joined > len(seeds) / 4
