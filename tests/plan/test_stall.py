"""The closed forms against a step-by-step run: one copy engine, one that computes, two slots."""

from hypothesis import given
from hypothesis import strategies as st

from swapd.plan import advise as stall


def simulated(
    blocks: int, every: int, copy_s: float, compute_s: float, passes: int, slots: int = 2
) -> float:
    """Seconds waited in `passes` over `blocks`, of which one in `every` is streamed."""
    copied_at = computed_at = 0.0
    left_at: list[float] = []  # when each slot's block had been used, in order
    for number in range(blocks * passes):
        ready_at = 0.0
        if number % every == 0:
            free_at = left_at[-slots] if len(left_at) >= slots else 0.0
            copied_at = ready_at = max(copied_at, free_at) + copy_s
        computed_at = max(computed_at, ready_at) + compute_s
        if number % every == 0:
            left_at.append(computed_at)
    return computed_at - blocks * passes * compute_s


@given(
    streamed=st.integers(2, 16),
    every=st.integers(1, 4),
    compute=st.floats(0.01, 4.0),
    passes=st.integers(1, 20),
)
def test_streaming_waits_as_long_as_the_formula_says(
    streamed: int, every: int, compute: float, passes: int
) -> None:
    blocks, copy_s = streamed * every, 1.0
    transfer_s, share = blocks * copy_s, 1 - 1 / every
    expected = passes * stall.wait_s(transfer_s, share, blocks * compute)
    waited = simulated(blocks, every, copy_s, compute, passes)
    # the very first copy hides behind no computing, and the computing after the last hides none
    assert abs(waited - expected) <= 2 * copy_s + every * compute


@given(st.integers(2, 8), st.integers(1, 8))
def test_lru_misses_all_of_a_cycle_that_does_not_fit(n: int, room: int) -> None:
    assert stall.lru_bytes([1] * n, room) == (0 if n <= room else n)


def test_lru_spares_what_need_not_go() -> None:
    assert stall.lru_bytes([60, 8, 2], 66) == 68  # the small component fits beside either
    assert stall.lru_bytes([3, 9], 8) is None
