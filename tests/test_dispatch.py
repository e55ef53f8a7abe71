"""The daemon carries out the core's orders in sequence, except that copies begin early; a traced
acquire hears of all moves made for it, and of no others."""

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from swapd.core.actions import (
    AnyAction,
    CopyIn,
    CopyOut,
    Evict,
    Evicted,
    Fence,
    Grant,
    Lend,
    SendRevoke,
    Waiting,
)
from swapd.core.events import CopiedIn, CopyFailed, SessionGone, Tick
from swapd.daemon.dispatch import Dispatch, copies_first
from swapd.shared.protocol import MOVES_MAX, Account, Acquire, Move
from tests.posted import Posted

EVICT, EVICTED = Evict("a", 1, "room"), Evicted("a", 1, 6, 0)
TELL = SendRevoke(1, "a", 1, False)
ASK = SendRevoke(1, "a", 1, True)
COPY_IN = CopyIn(2, "b", 2, 6, ((0, 6),))
GRANT = Grant(1, 7, (), 0.0, True)


def carried_out(*ordered: AnyAction) -> list[AnyAction]:
    numbered = [(action, number) for number, action in enumerate(ordered)]
    done = copies_first(numbered)
    assert sorted(done, key=lambda one: one[1]) == numbered, "each once, with its number"
    return [action for action, _ in done]


def test_a_copy_begins_before_a_worker_is_told_that_need_not_acknowledge() -> None:
    done = carried_out(EVICT, TELL, EVICTED, COPY_IN, GRANT)
    assert done == [EVICT, EVICTED, COPY_IN, TELL, GRANT]


def test_several_evictions_are_told_in_their_order_after_all_copies_that_follow_them() -> None:
    evict, tell = Evict("c", 3, "room"), SendRevoke(2, "c", 3, False)
    evicted, copy = Evicted("c", 3, 6, 0), CopyIn(3, "d", 4, 6, ((6, 6),))
    done = carried_out(EVICT, TELL, EVICTED, evict, tell, evicted, COPY_IN, copy, GRANT)
    assert done == [EVICT, EVICTED, evict, evicted, COPY_IN, copy, TELL, tell, GRANT]


def test_whoever_must_acknowledge_is_told_in_its_turn() -> None:
    ordered = (EVICT, ASK, COPY_IN, GRANT)
    assert carried_out(*ordered) == list(ordered)


def test_nothing_else_is_overtaken() -> None:
    """A copy in may follow a copy out; a lending asks workers for memory after their Revoke."""
    for other in (CopyOut(2, "b", 2, 6, ((0, 6),)), Lend(1, "w", 5, ((0, 6),)), GRANT):
        ordered = (EVICT, TELL, EVICTED, other, COPY_IN)
        assert carried_out(*ordered) == [EVICT, EVICTED, TELL, other, COPY_IN]


def test_what_is_last_is_told_all_the_same() -> None:
    assert carried_out(EVICT, TELL, EVICTED) == [EVICT, EVICTED, TELL]
    assert carried_out(GRANT) == [GRANT]
    assert carried_out() == []


# --- tasks -------------------------------------------------------------------------------


async def test_a_task_ends_the_daemon_by_an_error_and_not_by_its_end_or_its_cancelling() -> None:
    posted, errors = Posted(), list[Any]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))

    async def fails() -> None:
        raise ZeroDivisionError("a bug")

    waits = posted.inbox.start(asyncio.Event().wait())  # type: ignore[arg-type]
    await posted.inbox.start(asyncio.sleep(0))
    posted.inbox.stop()
    await asyncio.wait([waits])
    assert waits.cancelled()
    assert errors == []
    posted.inbox.start(fails())
    assert str(await posted.crashes.get()) == "a bug"
    assert posted.crashes.empty()


# --- revocations -------------------------------------------------------------------------


def test_nothing_is_left_of_a_revocation_that_follows_the_fence_of_its_session() -> None:
    """Both come from one event, and the session ends while the fence is carried out."""
    orders: dict[type, list[AnyAction]] = {Tick: [Fence(1, "late"), ASK], SessionGone: []}
    ledger = SimpleNamespace(stopping=False)
    core: Any = SimpleNamespace(
        ledger=ledger, handle=lambda event: orders[type(event)], next_deadline=lambda: None
    )
    log: Any = SimpleNamespace(event=lambda *_: 5, action=lambda *_: 6)
    nothing: Any = None
    dispatch = Dispatch(core, log, nothing, pytest.fail)  # type: ignore[arg-type]
    dispatch.perform = {
        Fence: lambda _: dispatch.post(SessionGone(9.0, 1)),
        SendRevoke: lambda _: None,
    }
    dispatch.post(Tick(9.0))
    assert not dispatch._causes


# --- the end ------------------------------------------------------------------------------


def test_a_stop_waits_for_leases_and_only_a_stop_waits() -> None:
    ledger = SimpleNamespace(stopping=False)
    core: Any = SimpleNamespace(
        ledger=ledger, quiet=True, handle=lambda event: [], next_deadline=lambda: None
    )
    log: Any = SimpleNamespace(event=lambda *_: 5)
    nothing: Any = None
    dispatch = Dispatch(core, log, nothing, pytest.fail)  # type: ignore[arg-type]
    for ledger.stopping, core.quiet in ((False, True), (True, False), (True, True)):
        dispatch.post(Tick(9.0))
        assert dispatch.quiet.is_set() == (ledger.stopping and core.quiet)


# --- traced acquires ---------------------------------------------------------------------


class Core:
    """Loads of 100 bytes, under way from time 1 on."""

    def __init__(self) -> None:
        self.ledger: Any = SimpleNamespace(moves={}, lane_in="in", down="", stopping=False)

    def load(self, generation: int, name: str = "a") -> None:
        component = SimpleNamespace(name=name, bytes_in=100)
        self.ledger.moves[generation] = SimpleNamespace(
            component=component, lane="in", began=float(generation)
        )

    def handle(self, event: Any) -> list[Any]:
        self.ledger.moves.pop(event.generation)
        return []

    def next_deadline(self) -> None:
        return None


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def dispatch(core: Core) -> Dispatch:
    log: Any = SimpleNamespace(event=lambda *_: 5, action=lambda *_: 6)
    nothing: Any = None
    made: Any = Dispatch(core, log, nothing, pytest.fail)  # type: ignore[arg-type]
    made.clock = lambda: 9.0
    made.record = 99
    return made  # type: ignore[no-any-return]


def answer(dispatch: Dispatch, names: tuple[str, ...] = ()) -> Account:
    account = dispatch.account_of(1, 7, names)
    assert account is not None
    return account


def test_its_loads_are_those_of_its_names_that_had_not_ended(
    core: Core, dispatch: Dispatch
) -> None:
    dispatch.traces.begin(2, Acquire(1, ("z",)), 0.0)  # another one, so ended loads are kept
    for generation, name in ((1, "a"), (2, "a"), (3, "b"), (4, "family/0")):
        core.load(generation, name)
    dispatch.post(CopiedIn(3.0, 1))
    dispatch.traces.begin(1, Acquire(7, ("a", "family")), 4.0)
    dispatch.post(CopyFailed(5.0, 2, "the bus is off"))
    account = answer(dispatch, ("a", "family/0"))
    assert account.moves == (
        Move("load", "a", 100, 2.0, 0, 5.0, "the bus is off"),
        Move("load", "family/0", 100, 4.0, 0),
    )
    assert dispatch.account_of(1, 7) is None


def test_evictions_that_make_room_for_it_are(dispatch: Dispatch) -> None:
    note = dispatch.traces.note
    dispatch.traces.begin(1, Acquire(7, ("a",)), 1.0)
    note(Evict("b", 2, "room", (1, 7)), 6, 2.0)
    note(Evict("c", 3, "room", (1, 8)), 7, 2.0)
    note(Evicted("b", 2, 100, 40), 8, 3.0)
    note(Evict("d", 4, "room", (1, 7)), 9, 4.0)
    note(Waiting(1, 7, (), "'b' is held"), 10, 4.0)
    account = answer(dispatch)
    evicted = Move("evict", "b", 40, 2.0, 6, 3.0, "room")
    assert account.moves == (evicted, Move("evict", "d", 0, 4.0, 9, why="room"))
    assert (account.record, account.waits_for) == (99, "'b' is held")
    note(Evicted("d", 4, 100, 40), 11, 5.0)  # of no account any more


def test_it_is_bounded(core: Core, dispatch: Dispatch) -> None:
    dispatch.traces.begin(1, Acquire(7, ("a",)), 0.0)
    for generation in range(MOVES_MAX + 3):
        core.load(generation)
    account = answer(dispatch)
    assert (len(account.moves), account.left_out) == (MOVES_MAX, 3)


def test_nothing_is_left_of_who_gave_up_or_is_gone(dispatch: Dispatch) -> None:
    traces = dispatch.traces
    for request in (7, 8):
        traces.begin(1, Acquire(request, ("a",)), 0.0)
        traces.note(Evict("b", request, "room", (1, request)), 6, 1.0)
    traces.drop(1, 7)
    traces.session_gone(1)
    for generation in (7, 8):
        traces.note(Evicted("b", generation, 100, 0), 4, 2.0)
    traces.note(CopyIn(1, "a", 9, 100, ((0, 1),)), 5, 2.0)
    assert not traces.open
    assert dispatch.account_of(1, 7) is None


# --- the daemon's work, in tasks ---------------------------------------------------------


async def test_an_error_of_work_ends_the_daemon_and_its_end_or_cancelling_does_not() -> None:
    posted = Posted()
    wrong = ValueError("wrong")

    async def fail() -> None:
        raise wrong

    done = posted.inbox.start(asyncio.sleep(0))
    never = posted.inbox.start(asyncio.Event().wait())  # type: ignore[arg-type]
    await done
    posted.inbox.stop()
    await asyncio.wait([never])
    assert never.cancelled()
    posted.inbox.start(fail())
    assert await posted.crashes.get() is wrong
    assert posted.crashes.empty()


async def test_nothing_is_kept_of_work_that_has_ended() -> None:
    inbox = Posted().inbox
    work = inbox.start(asyncio.sleep(0))
    await work
    await asyncio.sleep(0)  # its callbacks
    gone = weakref.ref(work)
    del work
    gc.collect()
    assert gone() is None
