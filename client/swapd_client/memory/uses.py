"""Who still has bytes of a component's range: tensors' storages, views, and what makes views.

Lives here: which of them live, and what to do when none does. It is the garbage collector that
says so, in any thread and under any lock: nothing here takes one.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable


class Uses:
    """Of one range of addresses, whatever is there: it outlives the ranges of one component after
    the other that are made over the same addresses."""

    def __init__(self) -> None:
        self._living: dict[int, weakref.ref[object]] = {}
        self._numbers = itertools.count()
        #: Whether it is known who they are.
        self._known = False
        #: Called when the last has gone.
        self.ended: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        """Whether there are any, or may be."""
        return bool(self._living) or not self._known

    def add(self, things: Iterable[object]) -> None:
        """Count on these until they are no more."""
        self._known = True
        for thing in things:
            number = next(self._numbers)
            gone = self._forgetting(number)
            self._living[number] = weakref.ref(thing, gone)

    def _forgetting(self, number: int) -> Callable[[object], None]:
        def gone(_: object) -> None:
            self._living.pop(number, None)
            if not self._living and self.ended is not None:
                self.ended()

        return gone
