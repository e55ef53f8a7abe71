"""Filling, waiting, sharing: every `ask` is answered once, unless its component is gone."""

import pytest

from swapd.core.contents import Contents, DueHostCopy


class Desk:
    """A Contents, and the answer to each uid: the host copy to share, or None to fill its own."""

    def __init__(self) -> None:
        self.contents = Contents()
        self.told: dict[int, list[int | None]] = {}

    def ask(self, uid: int, session: int | None = None, key: str = "x", until: float = 30) -> None:
        self.told[uid] = []
        due = self.contents.ask(uid, session or 100 + uid, key, until)
        self.tell([due] if due else [])

    def seal(self, uid: int) -> None:
        self.tell(self.contents.sealed(uid))

    def drop(self, uid: int) -> None:
        self.tell(self.contents.gone(uid))

    def tell(self, all_due: list[DueHostCopy]) -> None:
        for due in all_due:
            self.told[due.uid].append(due.original or None)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_the_first_fills_and_who_comes_after_the_seal_shares(desk: Desk) -> None:
    desk.ask(1)
    desk.seal(1)
    desk.ask(2)
    desk.ask(3, key="y")
    assert desk.told == {1: [None], 2: [1], 3: [None]}


def test_who_comes_meanwhile_waits_for_the_seal(desk: Desk) -> None:
    for uid in (1, 2, 3):
        desk.ask(uid)
    assert desk.told == {1: [None], 2: [], 3: []}
    desk.seal(1)
    assert desk.told == {1: [None], 2: [1], 3: [1]}
    assert desk.contents.next_deadline() is None


def test_if_the_first_goes_the_next_fills_and_the_others_wait_for_that(desk: Desk) -> None:
    for uid in (1, 2, 3):
        desk.ask(uid)
    desk.drop(1)
    assert desk.told == {1: [None], 2: [None], 3: []}
    desk.seal(2)
    assert desk.told[3] == [2]


def test_the_bytes_are_there_as_long_as_anybody_has_them(desk: Desk) -> None:
    desk.ask(1)
    desk.seal(1)
    desk.ask(2)
    desk.drop(1)
    desk.ask(3)
    assert desk.told[3] == [2]
    desk.drop(2)
    desk.drop(3)
    desk.ask(4)
    assert desk.told[4] == [None]


def test_who_goes_while_it_waits_is_told_nothing(desk: Desk) -> None:
    desk.ask(1)
    desk.ask(2)
    desk.drop(2)
    desk.seal(1)
    assert desk.told[2] == []


def test_who_has_waited_too_long_fills_its_own_and_others_may_share_that(desk: Desk) -> None:
    for uid, until in ((1, 10.0), (2, 20.0), (3, 30.0)):
        desk.ask(uid, until=until)
    assert desk.contents.next_deadline() == 20.0
    desk.tell(desk.contents.expired(19.9))
    assert desk.told[2] == []
    desk.tell(desk.contents.expired(20.0))
    assert desk.told == {1: [None], 2: [None], 3: []}
    desk.seal(2)
    assert desk.told[3] == [2]
    desk.seal(1)
    assert desk.told == {1: [None], 2: [None], 3: [2]}


def test_two_that_load_the_same_in_another_order_do_not_wait_for_each_other(desk: Desk) -> None:
    desk.ask(1, session=7, key="x")
    desk.ask(2, session=8, key="y")
    desk.ask(3, session=7, key="y")
    desk.ask(4, session=8, key="x")
    assert desk.told == {1: [None], 2: [None], 3: [], 4: [None]}


def test_nor_do_three(desk: Desk) -> None:
    for i, key in enumerate("xyz", 1):
        desk.ask(i, session=i, key=key)
    desk.ask(10, session=1, key="y")
    desk.ask(11, session=2, key="z")
    desk.ask(12, session=3, key="x")
    assert [desk.told[uid] for uid in (10, 11, 12)] == [[], [], [None]]


def test_nor_when_the_turn_of_another_comes(desk: Desk) -> None:
    desk.ask(1, session=1, key="x")
    desk.ask(2, session=3, key="y")
    desk.ask(3, session=2, key="y")
    desk.ask(4, session=2, key="x")
    desk.ask(5, session=3, key="x")
    desk.drop(1)
    assert [desk.told[uid] for uid in (3, 4, 5)] == [[], [None], [None]]


def test_a_session_does_not_wait_for_itself(desk: Desk) -> None:
    desk.ask(1, session=7)
    desk.ask(2, session=7)
    assert desk.told[2] == [None]


def test_who_fills_its_own_shares_it_though_the_first_is_gone(desk: Desk) -> None:
    desk.ask(1, session=7)
    desk.ask(2, session=7)
    desk.drop(1)
    desk.seal(2)
    desk.ask(3)
    assert desk.told[3] == [2]


def test_nothing_is_left_when_all_are_gone(desk: Desk) -> None:
    for uid in (1, 2, 3):
        desk.ask(uid)
    desk.seal(1)
    for uid in (1, 2, 3, 4):
        desk.drop(uid)
        desk.seal(uid)
    assert not desk.contents
    assert not desk.contents._contents
    assert not desk.contents._waiting
