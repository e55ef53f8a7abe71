"""Who fits beside the later grant of the head of the queue goes first; the head waits no longer."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from swapd.core.actions import Waiting
from swapd.core.records import Key
from tests.core.driver import EXAMPLES
from tests.core.world import Make, World, outcome

CHUNKS = 40


def waiting(w: World, size: int, name: str, **how: Any) -> Key:
    session = w.open()
    w.register(session, name, size)
    return w.acquire(session, name, **how)


def test_who_fits_beside_the_head_does_not_wait_for_its_holders(make: Make) -> None:
    w = make(CHUNKS)
    a = w.open()
    w.register(a, "a", 16)
    w.use(a, "a")
    head = waiting(w, 32, "b")
    assert outcome(w) == []
    small = waiting(w, 4, "c")
    w.settle()
    assert w.granted(small)
    assert not w.granted(head)


def test_all_that_go_first_fit_beside_the_head_together(make: Make) -> None:
    w = make(CHUNKS)
    a = w.open()
    w.register(a, "a", 16)
    held = w.use(a, "a")
    head = waiting(w, 32, "b")
    small = [waiting(w, 3, f"c{i}") for i in range(3)]
    w.settle()
    assert [w.granted(key) for key in small] == [True, True, False]
    w.release(held)
    w.settle()
    assert w.granted(head)
    assert not w.granted(small[2])


def test_it_takes_no_component_that_the_head_needs(make: Make) -> None:
    w = make(CHUNKS)
    a, b = w.open(), w.open()
    w.register(a, "a", 26)
    w.register(b, "mine", 10)
    w.register(b, "more", 20)
    w.touch(b, "mine")
    w.use(a, "a")
    w.acquire(b, "mine", "more")
    waiting(w, 6, "c")
    w.settle()
    assert w.evictions() == []


def test_who_holds_leases_already_does_not_go_first(make: Make) -> None:
    """What it holds may be what the head waits for; another thread of it holds nothing."""
    w = make(CHUNKS)
    a, b = w.open(), w.open()
    for session, name, size in ((a, "a", 16), (b, "b", 2), (b, "more", 3), (b, "other", 3)):
        w.register(session, name, size)
    held = w.use(a, "a")
    w.use(b, "b")
    head = waiting(w, 32, "head")
    same, another = w.acquire(b, "more"), w.acquire(b, "other", agent=1)
    w.settle()
    assert [w.granted(key) for key in (same, another)] == [False, True]
    w.release(held)
    w.settle()
    assert w.granted(head, same)


def test_nobody_goes_first_while_one_that_comes_back_soon_is_idle(make: Make) -> None:
    """Its next lease is none yet, but the head would have to fit beside it, too."""
    w = make(CHUNKS)
    a, b = w.open(), w.open()
    w.register(a, "a", 16)
    w.register(b, "b", 5)
    held, lease = w.use(a, "a"), w.acquire(b, "b")
    w.now = 0.1
    w.settle()
    w.release(lease)
    lease = w.acquire(b, "b")
    head = waiting(w, 32, "head")
    w.release(lease)
    waiting(w, 8, "c")
    w.acquire(b, "b")
    w.release(held)
    w.settle()
    assert w.granted(head)


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[int], int, list[int], list[int]]:
    """Chunks of the leases, of the head and of those behind it; the order of the releases."""
    leases = draw(st.lists(st.integers(1, 16), min_size=1, max_size=6))
    while sum(leases) > CHUNKS:
        leases.pop()
    head = draw(st.integers(CHUNKS - sum(leases) + 1, CHUNKS))
    small = draw(st.lists(st.integers(1, 12), max_size=4))
    return leases, head, small, draw(st.permutations(range(len(leases))))


def releases_until_granted(
    leases: list[int], head: int, small: list[int], order: list[int], *, idle: int
) -> int:
    """How many leases end before the head is granted. The small ones keep theirs."""
    w = World(CHUNKS)
    a = w.open()
    if idle <= CHUNKS - sum(leases):
        w.register(a, "idle", idle)
        w.touch(a, "idle")
    for i, size in enumerate(leases):
        w.register(a, f"a{i}", size)
    held = [w.use(a, f"a{i}", agent=i) for i in range(len(leases))]
    key = waiting(w, head, "head")
    for i, size in enumerate(small):
        waiting(w, size, f"c{i}")
    w.settle()
    for count, i in enumerate(order, 1):
        w.release(held[i])
        w.settle()
        if w.granted(key):
            return count
    raise AssertionError("the head was never granted")


@settings(max_examples=EXAMPLES // 2)
@given(queues(), st.integers(1, 8))
def test_the_head_waits_for_no_more_releases_than_without_them(
    queue: tuple[list[int], int, list[int], list[int]], idle: int
) -> None:
    leases, head, small, order = queue
    alone = releases_until_granted(leases, head, [], order, idle=idle)
    among = releases_until_granted(leases, head, small, order, idle=idle)
    assert among == alone


def test_who_waits_hears_who_is_ahead_and_why(make: Make) -> None:
    w = make(CHUNKS)
    a, b = w.open("holder"), w.open("first")
    w.register(a, "a", 16)
    w.register(b, "b", 32)
    w.use(a, "a")
    w.acquire(b, "b", priority=3)
    late = waiting(w, 24, "c", timeout=1)
    (record,) = (r for r in w.log if isinstance(r, Waiting) and r.request == late[1])
    w.sleep(1.0)
    for said in (record.why, w.refusal(late).message):
        assert "first" in said
        assert "has priority 3 and needs 32 B" in said
        assert "holder" in said
