"""The ledger of free chunks: none lost, none lent twice, as few runs as possible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapd.core.chunks import ChunkPool, count, without
from swapd.shared.protocol import Runs


def numbers(runs: Runs) -> list[int]:
    return [i for first, n in runs for i in range(first, first + n)]


def fragmented(total: int, held: Runs) -> ChunkPool:
    """A pool of `total` in which just `held` is lent out."""
    pool = ChunkPool(total)
    pool.take(count(held), prefer=held)
    return pool


def test_without_keeps_the_order_and_merges_neighbours() -> None:
    runs = ((4, 3), (0, 2), (2, 2))
    assert without(runs, ((5, 1),)) == ((4, 1), (6, 1), (0, 4))
    assert without(runs, runs) == ()
    assert without(runs, ()) == ((4, 3), (0, 4))


def test_a_new_pool_is_one_free_run() -> None:
    pool = ChunkPool(4)
    assert pool.free == 4
    assert pool.runs() == ((0, 4),)
    assert repr(pool) == "<ChunkPool 4/4 free in 1 runs>"


def test_an_empty_pool_has_no_runs() -> None:
    pool = ChunkPool(0)
    assert pool.runs() == ()
    assert pool.take(0) == ()


def test_one_run_is_taken_where_one_is_large_enough() -> None:
    pool = fragmented(20, ((6, 1), (10, 1)))  # free: 6, 3 and 9
    assert pool.take(3) == ((7, 3),)


def test_the_largest_runs_go_first_where_none_is_large_enough() -> None:
    pool = fragmented(20, ((6, 1), (10, 1)))
    assert pool.take(11) == ((11, 9), (0, 2))


def test_the_same_chunks_come_again_if_they_are_free() -> None:
    pool = ChunkPool(10)
    first = pool.take(3)
    runs = pool.take(4)
    pool.give(first)
    pool.give(runs)
    assert pool.take(4, prefer=runs) == runs


def test_other_chunks_come_if_one_of_the_preferred_is_taken() -> None:
    pool = ChunkPool(10)
    assert pool.take(4) == ((0, 4),)
    assert pool.take(4, prefer=((2, 4),)) == ((4, 4),)


def test_preferred_chunks_of_another_size_are_not_taken() -> None:
    pool = ChunkPool(10)
    assert pool.take(3, prefer=((5, 4),)) == ((0, 3),)


def test_more_than_is_free_is_an_error_and_changes_nothing() -> None:
    pool = ChunkPool(3)
    with pytest.raises(ValueError, match="4 chunks asked, 3 free"):
        pool.take(4)
    assert pool.runs() == ((0, 3),)


@pytest.mark.parametrize("runs", [((3, 2),), ((0, 3),), ((1, 2),), ((4, 1),)])
def test_chunks_that_are_free_already_cannot_be_given_back(runs: Runs) -> None:
    pool = ChunkPool(5)
    pool.take(2, prefer=((1, 2),))  # free: 0, 3, 4
    with pytest.raises(ValueError, match="free already"):
        pool.give(runs if runs != ((1, 2),) else ((1, 3),))


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=40))
def test_no_chunk_is_lost_or_lent_twice(total: int, steps: list[tuple[bool, int]]) -> None:
    pool = ChunkPool(total)
    lent: list[Runs] = []
    for taking, n in steps:
        if taking and n <= pool.free:
            largest = max((length for _, length in pool.runs()), default=0)
            runs = pool.take(n)
            assert count(runs) == n
            assert len(runs) <= 1 or largest < n
            lent.append(runs)
        elif not taking and lent:
            pool.give(lent.pop(n % len(lent)))
        held = [i for runs in lent for i in numbers(runs)]
        free = numbers(pool.runs())
        assert sorted(held + free) == list(range(total))
        assert pool.free == len(free)
        ends = [first + length for first, length in pool.runs()]
        starts = [first for first, _ in pool.runs()]
        assert all(end < start for end, start in zip(ends, starts[1:], strict=False)), "not merged"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_what_was_preferred_and_free_is_what_comes(sizes: list[int]) -> None:
    pool = ChunkPool(sum(sizes))
    lent = [pool.take(n) for n in sizes]
    for runs in lent:
        pool.give(runs)
    for runs in reversed(lent):
        assert pool.take(count(runs), prefer=runs) == runs
