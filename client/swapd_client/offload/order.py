"""The order in which a component's parts are used. Pure.

At first the order of declaration; then the order of the last pass. Passes may differ: a step cache
skips blocks, a model may call one block twice.
"""

from collections.abc import Sequence


class Order:
    """The known order. Passes of several threads may read and teach it at once."""

    def __init__(self, parts: int) -> None:
        #: The order of the last pass; and of the last complete one, if recent passes skipped parts.
        self._last = self._whole = tuple(range(parts))

    def expected(self) -> "Expected":
        return Expected(self._last, self._whole)

    def learn(self, seen: Sequence[int]) -> None:
        if self._last[: len(seen)] == tuple(seen):
            return  # as expected, or ended early: an error says nothing about the next pass
        self._last = tuple(seen)
        if not _is_within(seen, self._whole):
            self._whole = self._last


class Expected:
    def __init__(self, last: tuple[int, ...], whole: tuple[int, ...]) -> None:
        self._order = last
        self._whole = whole
        self._at = 0

    @property
    def coming(self) -> tuple[int, ...]:
        return self._order[self._at :]

    @property
    def first(self) -> tuple[int, ...]:
        return self._order

    def used(self, part: int) -> None:
        """The pass used this part, expected or not: go on from there."""
        for order, start in ((self._order, self._at), (self._whole, 0)):
            if part in order[start:]:
                self._order, self._at = order, order.index(part, start) + 1
                return


def _is_within(seen: Sequence[int], whole: Sequence[int]) -> bool:
    rest = iter(whole)
    return all(part in rest for part in seen)
