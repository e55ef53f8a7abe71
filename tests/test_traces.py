"""A traced acquire hears of all actions made for it, and of no others."""

import pytest

from swapd.core.actions import CopyIn, Evict, Evicted, Waiting
from swapd.core.events import CopiedIn, CopyFailed
from swapd.daemon.traces import Traces
from swapd.shared.protocol import MOVES_MAX, Account, Acquire, AcquireWorkspace, Move

RUNS = ((0, 1),)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def traces(clock: Clock) -> Traces:
    return Traces(clock)


def load(traces: Traces, generation: int, name: str = "a", record: int = 5) -> None:
    traces.action(CopyIn(1, name, generation, 100, RUNS), record)


def answer(traces: Traces, request: int = 7) -> Account:
    account = traces.answer(1, request, (), 99)
    assert account is not None
    return account


def test_who_was_not_opened_has_none(traces: Traces) -> None:
    load(traces, 1)
    traces.action(Waiting(1, 7, ("a",), "why"), 4)
    traces.action(Evict("b", 2, "room", (1, 7)), 6)
    traces.action(Evicted("b", 2, 100, 0), 4)
    traces.event(CopiedIn(3.0, 1))
    assert traces.answer(1, 7, (), 99) is None


def test_a_load_that_began_before_it_came_is_its_own_too(traces: Traces) -> None:
    traces.begin(1, Acquire(7, ("a",)), {1: Move("load", "a", 100, 1.0, 5)})
    traces.event(CopiedIn(8.0, 1))
    assert answer(traces).moves == (Move("load", "a", 100, 1.0, 5, 8.0),)


def test_what_ended_before_it_came_is_not(traces: Traces, clock: Clock) -> None:
    traces.begin(2, Acquire(1, ("z",)), {})  # another traced one is open, so this is remembered
    load(traces, 1)
    traces.event(CopiedIn(clock(), 1))
    traces.begin(1, Acquire(7, ("a",)), {})
    assert answer(traces).moves == ()


def test_what_it_did_not_name_is_not(traces: Traces) -> None:
    traces.begin(1, Acquire(7, ("a",)), {})
    load(traces, 1, "other")
    assert answer(traces).moves == ()


def test_the_parts_that_a_family_was_granted_as_are(traces: Traces) -> None:
    traces.begin(1, Acquire(7, ("family",)), {})
    load(traces, 1, "family/0")
    account = traces.answer(1, 7, ("family/0", "family/1"), 99)
    assert account is not None
    assert [move.name for move in account.moves] == ["family/0"]
    assert account.moves[0].ended_s is None, "it was granted early"


def test_evictions_that_make_room_for_it_are(traces: Traces) -> None:
    traces.begin(1, AcquireWorkspace(7, 100), {})
    traces.action(Evict("b", 2, "room", (1, 7)), 6)
    traces.action(Evict("c", 3, "room", (1, 8)), 7)
    traces.action(Evicted("b", 2, 100, 40), 4)
    traces.action(Waiting(1, 7, (), "'b' is held"), 4)
    account = answer(traces)
    assert account.moves == (Move("evict", "b", 40, 2.0, 6, 3.0, "room"),)
    assert (account.record, account.waits_for) == (99, "'b' is held")


def test_one_that_leaves_after_the_answer_is_of_no_account(traces: Traces) -> None:
    traces.begin(1, Acquire(7, ("a",)), {})
    traces.action(Evict("b", 2, "room", (1, 7)), 6)
    assert answer(traces).moves[0].ended_s is None
    traces.action(Evicted("b", 2, 100, 40), 4)


def test_a_load_that_failed_says_how(traces: Traces) -> None:
    traces.begin(1, Acquire(7, ("a",)), {})
    load(traces, 1)
    traces.event(CopyFailed(9.0, 1, "the bus is off"))
    assert answer(traces).moves[0].why == "the bus is off"


def test_it_is_bounded(traces: Traces) -> None:
    traces.begin(1, Acquire(7, ("a",)), {})
    for generation in range(MOVES_MAX + 3):
        load(traces, generation)
    account = answer(traces)
    assert (len(account.moves), account.left_out) == (MOVES_MAX, 3)


def test_nothing_is_left_of_who_gave_up_or_is_gone(traces: Traces) -> None:
    for request in (7, 8):
        traces.begin(1, Acquire(request, ("a",)), {})
        traces.action(Evict("b", request, "room", (1, request)), 6)
    traces.drop(1, 7)
    traces.session_gone(1)
    for generation in (7, 8):
        traces.action(Evicted("b", generation, 100, 0), 4)
    assert not traces.open
    assert traces.answer(1, 7, (), 99) is None
