"""A round of turns copies twice the bytes that do not fit, and no cache."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swapd.plan.advice import CHUNK_BYTES
from swapd.plan.arena import Turn, by_layer_bytes, kept_bytes, whole_bytes
from swapd.shared.vm import round_up

MIB = 1 << 20


def turn(layers: int, layer: int, rest: int = 0, cache: int = 0) -> Turn:
    """A turn with so many layers of `layer` bytes, other weights, and a cache of whole chunks."""
    return Turn(
        taken=layers * round_up(layer, CHUNK_BYTES) + round_up(rest, CHUNK_BYTES),
        copied=layers * layer + rest,
        cache=cache * CHUNK_BYTES,
        layers=layers,
        layer_taken=round_up(layer, CHUNK_BYTES),
        layer_bytes=layer,
    )


turns = st.lists(
    st.builds(
        turn,
        st.integers(1, 12),
        st.integers(1, 200).map(lambda n: n * MIB),
        st.integers(0, 300).map(lambda n: n * MIB),
        st.integers(0, 20),
    ),
    min_size=1,
    max_size=4,
)


@given(turns, st.integers(0, 80))
def test_beside_each_turn_there_is_room_for_what_the_others_keep(
    found: list[Turn], more: int
) -> None:
    room = max(t.taken + t.cache for t in found) + more * CHUNK_BYTES
    kept = kept_bytes(found, room)
    for number, one in enumerate(found):
        assert 0 <= kept[number] <= one.taken
        others = sum(kept) - kept[number]
        assert one.taken + one.cache + others <= room


@given(turns, st.integers(0, 80))
def test_at_most_what_does_not_fit_moves_twice_and_a_layer_of_each(
    found: list[Turn], more: int
) -> None:
    room = max(t.taken + t.cache for t in found) + more * CHUNK_BYTES
    short = max(0, sum(t.taken + t.cache for t in found) - room)
    layers = sum(t.layer_taken for t in found)
    moved = by_layer_bytes(found, room)
    assert moved <= 2 * short + layers
    assert moved <= whole_bytes(found, room) <= sum(t.copied for t in found)
    if short == 0:
        assert moved == 0


def test_no_other_choice_of_layers_keeps_more() -> None:
    found = [turn(3, CHUNK_BYTES, cache=1), turn(2, CHUNK_BYTES), turn(1, CHUNK_BYTES, cache=2)]
    for room in range(4, 9):
        best = 0
        for kept in itertools.product(range(4), range(3), range(2)):
            sizes = [t.taken + t.cache - k * CHUNK_BYTES for t, k in zip(found, kept, strict=True)]
            if max(sizes) + sum(kept) * CHUNK_BYTES <= room * CHUNK_BYTES:
                best = max(best, sum(kept))
        assert sum(kept_bytes(found, room * CHUNK_BYTES)) == best * CHUNK_BYTES
