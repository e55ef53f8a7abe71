"""A traced acquire hears of all actions made for it, and of no others."""

import pytest

from swapd.core.actions import CopyIn, Evict, Evicted, Waiting
from swapd.core.events import CopiedIn, CopyFailed
from swapd.daemon.accounts import Accounts
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
def accounts(clock: Clock) -> Accounts:
    return Accounts(clock)


def load(accounts: Accounts, generation: int, name: str = "a", record: int = 5) -> None:
    accounts.load(CopyIn(1, name, generation, 100, RUNS), record)


def answer(accounts: Accounts, request: int = 7) -> Account:
    account = accounts.answer(1, request, (), 99)
    assert account is not None
    return account


def test_who_was_not_opened_has_none(accounts: Accounts) -> None:
    load(accounts, 1)
    accounts.waiting(Waiting(1, 7, ("a",), "why"))
    accounts.evict(Evict("b", 2, "room", (1, 7)), 6)
    accounts.evicted(Evicted("b", 2, 100, 0))
    accounts.moved(CopiedIn(3.0, 1))
    assert accounts.answer(1, 7, (), 99) is None


def test_a_load_that_began_before_it_came_is_its_own_too(accounts: Accounts) -> None:
    load(accounts, 1)
    accounts.open(1, Acquire(7, ("a",)))
    accounts.moved(CopiedIn(8.0, 1))
    assert answer(accounts).moves == (Move("load", "a", 100, 1.0, 5, 8.0),)


def test_what_ended_before_it_came_is_not(accounts: Accounts, clock: Clock) -> None:
    accounts.open(2, Acquire(1, ("z",)))  # another traced one is open, so this is remembered
    load(accounts, 1)
    accounts.moved(CopiedIn(clock(), 1))
    accounts.open(1, Acquire(7, ("a",)))
    assert answer(accounts).moves == ()


def test_what_it_did_not_name_is_not(accounts: Accounts) -> None:
    accounts.open(1, Acquire(7, ("a",)))
    load(accounts, 1, "other")
    assert answer(accounts).moves == ()


def test_the_parts_that_a_family_was_granted_as_are(accounts: Accounts) -> None:
    accounts.open(1, Acquire(7, ("family",)))
    load(accounts, 1, "family/0")
    account = accounts.answer(1, 7, ("family/0", "family/1"), 99)
    assert account is not None
    assert [move.name for move in account.moves] == ["family/0"]
    assert account.moves[0].ended_s is None, "it was granted early"


def test_evictions_that_make_room_for_it_are(accounts: Accounts) -> None:
    accounts.open(1, AcquireWorkspace(7, 100))
    accounts.evict(Evict("b", 2, "room", (1, 7)), 6)
    accounts.evict(Evict("c", 3, "room", (1, 8)), 7)
    accounts.evicted(Evicted("b", 2, 100, 40))
    accounts.waiting(Waiting(1, 7, (), "'b' is held"))
    account = answer(accounts)
    assert account.moves == (Move("evict", "b", 40, 2.0, 6, 3.0, "room"),)
    assert (account.record, account.waits_for) == (99, "'b' is held")


def test_one_that_leaves_after_the_answer_is_of_no_account(accounts: Accounts) -> None:
    accounts.open(1, Acquire(7, ("a",)))
    accounts.evict(Evict("b", 2, "room", (1, 7)), 6)
    assert answer(accounts).moves[0].ended_s is None
    accounts.evicted(Evicted("b", 2, 100, 40))


def test_a_load_that_failed_says_how(accounts: Accounts) -> None:
    accounts.open(1, Acquire(7, ("a",)))
    load(accounts, 1)
    accounts.moved(CopyFailed(9.0, 1, "the bus is off"))
    assert answer(accounts).moves[0].why == "the bus is off"


def test_it_is_bounded(accounts: Accounts) -> None:
    accounts.open(1, Acquire(7, ("a",)))
    for generation in range(MOVES_MAX + 3):
        load(accounts, generation)
    account = answer(accounts)
    assert (len(account.moves), account.left_out) == (MOVES_MAX, 3)


def test_nothing_is_left_of_who_gave_up_or_is_gone(accounts: Accounts) -> None:
    for request in (7, 8):
        accounts.open(1, Acquire(request, ("a",)))
        accounts.evict(Evict("b", request, "room", (1, request)), 6)
    accounts.drop(1, 7)
    accounts.session_gone(1)
    for generation in (7, 8):
        accounts.evicted(Evicted("b", generation, 100, 0))
    assert not len(accounts)
    assert accounts.answer(1, 7, (), 99) is None
