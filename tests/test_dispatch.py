"""The daemon carries out the core's orders in sequence, except that copies begin early."""

from swapd.core.actions import (
    AnyAction,
    CopyIn,
    CopyOut,
    Evict,
    Evicted,
    Grant,
    Lend,
    SendRevoke,
)
from swapd.daemon.dispatch import copies_first

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
