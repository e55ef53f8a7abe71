"""When a stage keeps its lease from step to step, and when it gives way.

Pure: what came, what went, what time it is. No lease, no thread, no vLLM. A stage whose lease
nobody wants keeps it while requests are in flight. One whose lease is wanted (the daemon says so
when the stage has had its quantum) finishes what is in flight by then, within a bound, and no
request that came later; a step that had nothing to compute gives way at once.
"""

from collections.abc import Iterable


class Turns:
    """The turns of one stage. Times are seconds on the caller's clock."""

    def __init__(self, finish_within_s: float) -> None:
        """`finish_within_s`: how long what is in flight may take when somebody waits."""
        self._finish_within_s = finish_within_s
        #: Requests that were scheduled and have not finished.
        self.in_flight: set[str] = set()
        #: How many finished since the turn began.
        self.finished = 0
        #: What is to finish before the stage gives way, and by when. None: nobody waits.
        self._asked: tuple[frozenset[str], float] | None = None

    def note(self, came: Iterable[str], went: Iterable[str]) -> None:
        """Requests that are scheduled for the first time, and those that ended."""
        for one in went:
            if one in self.in_flight:
                self.in_flight.remove(one)
                self.finished += 1
        self.in_flight.update(came)

    def keeps(self, now: float, *, wanted: bool, computed: bool = True) -> bool:
        """Whether the lease is kept, asked between two steps.

        `wanted`: somebody waits for it, and is to have it. `computed`: the last step did something.
        """
        if not wanted:
            self._asked = None
            return bool(self.in_flight)
        if self._asked is None:
            self._asked = frozenset(self.in_flight), now + self._finish_within_s
        to_finish, until = self._asked
        return computed and now < until and not to_finish.isdisjoint(self.in_flight)

    def over(self) -> int:
        """The turn is over: how many requests finished in it."""
        self._asked = None
        finished, self.finished = self.finished, 0
        return finished
