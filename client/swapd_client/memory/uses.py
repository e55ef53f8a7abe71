"""The objects with bytes in a component's range: storages of tensors, views, makers of views.

Lives here: whether any is alive, and the action after the last. The garbage collector calls in any
thread and under any lock, so nothing here takes one.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable


class Uses:
    """The users of a range of addresses. The next component at these addresses takes it over."""

    def __init__(self) -> None:
        self._living: dict[int, weakref.ref[object]] = {}
        self._numbers = itertools.count()
        #: Whether `add` was called: before that, the users are unknown.
        self._known = False
        #: Called when the last has gone.
        self.ended: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        """Whether there are any, or may be."""
        return bool(self._living) or not self._known

    def add(self, things: Iterable[object]) -> None:
        """Count these until they are collected."""
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
