"""In which order the parts of a component are used. Pure.

At first that is taken to be the order in which they were declared; then it is as in the last
pass. Passes may differ: a step cache skips blocks, a model may call one block twice.
"""

from collections.abc import Sequence


class Order:
    """What is known of the order. Passes of several threads may read and teach it at once."""

    def __init__(self, parts: int) -> None:
        #: As in the last pass; and as in one of which the last ones were a part.
        self._last = self._whole = tuple(range(parts))

    def expected(self) -> "Expected":
        """What to expect of a pass that begins."""
        return Expected(self._last, self._whole)

    def learn(self, seen: Sequence[int]) -> None:
        """A pass used these parts, one after the other."""
        if self._last[: len(seen)] == tuple(seen):
            return  # as expected, or it ended early: an error says nothing of the next pass
        self._last = tuple(seen)
        if not _is_within(seen, self._whole):
            self._whole = self._last


class Expected:
    """How far a pass has come, and what is expected of the rest of it."""

    def __init__(self, last: tuple[int, ...], whole: tuple[int, ...]) -> None:
        self._order = last
        self._whole = whole
        self._at = 0

    @property
    def coming(self) -> tuple[int, ...]:
        """The parts that come next, in order."""
        return self._order[self._at :]

    @property
    def first(self) -> tuple[int, ...]:
        """The parts that the next pass begins with, in order."""
        return self._order

    def used(self, part: int) -> None:
        """This is the one that came: go on from there, whether it was expected or not."""
        for order, start in ((self._order, self._at), (self._whole, 0)):
            if part in order[start:]:
                self._order, self._at = order, order.index(part, start) + 1
                return


def _is_within(seen: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether `seen` is `whole` with some left out."""
    rest = iter(whole)
    return all(part in rest for part in seen)
