"""How long a stage keeps its lease while others wait. Pure; times are the caller's, in seconds."""

from collections.abc import Collection


class StageKeeping:
    """Decides whether a stage keeps its lease from step to step.

    Until the lease is wanted (the daemon reports that after the minimum residency), the stage keeps
    it as long as requests are in flight. From then on it finishes the requests in flight at that
    time, within a bound; with a time slice, it serves any requests until its turn has lasted that
    long. It gives way at once after a step that computed nothing, and when the waiting stage has
    enough of its output.
    """

    def __init__(self, finish_within_s: float, slice_s: float | None = None) -> None:
        self._finish_within_s = finish_within_s
        self._slice_s = slice_s
        self._since = 0.0
        #: Requests that were scheduled and have not finished; those of a stage that sleeps.
        self.in_flight: set[str] = set()
        self.asleep: set[str] = set()
        self.finished = 0
        #: Whether it never gives way while a request is in flight.
        self.whole = False
        #: Whether it also keeps its lease between requests, until it is wanted.
        self.stays = False
        #: Requests to finish before the stage gives way, and by when. None: no stage waits.
        self._asked: tuple[frozenset[str], float] | None = None

    def note(self, came: Collection[str], went: Collection[str]) -> None:
        self.asleep.difference_update(went)
        for one in went:
            if one in self.in_flight:
                self.in_flight.remove(one)
                self.finished += 1
        self.in_flight.update(came)

    def sleep(self) -> None:
        """Until `wake`, no request counts as in flight."""
        self.asleep |= self.in_flight
        self.in_flight.clear()

    def wake(self) -> None:
        self.in_flight |= self.asleep
        self.asleep.clear()

    def begin(self, now: float, *, loaded: bool = False) -> None:
        """Note the begin of a turn. `loaded`: others may have had the memory before."""
        self._since, self._asked = now, None
        if loaded:
            self.finished = 0

    def keeps(
        self,
        now: float,
        *,
        wanted: bool,
        computed: bool = True,
        enough: bool = False,
        beside: bool = False,
    ) -> bool:
        """Return whether the lease is kept between two steps.

        `wanted`: an acquire waits for it and may have it. `computed`: the last step computed
        something. `enough`: the waiting stage has enough of this stage's output. `beside`: the
        waiting stage fits beside this one once others give way, in a bounded time.
        """
        if not wanted or self.whole:
            self._asked = None
            return bool(self.in_flight) or (self.stays and not wanted)
        if beside:
            return now < self._finishing(now)[1]
        if self._slice_s is not None:
            to_finish, until = frozenset(self.in_flight), self._since + self._slice_s
        else:
            to_finish, until = self._finishing(now)
        going_on = computed and not enough and now < until
        return going_on and not to_finish.isdisjoint(self.in_flight)

    def _finishing(self, now: float) -> tuple[frozenset[str], float]:
        if self._asked is None:
            self._asked = frozenset(self.in_flight), now + self._finish_within_s
        return self._asked

    def over(self) -> int:
        """Note that the stage gave way; return the requests finished since it was loaded."""
        finished, self.finished = self.finished, 0
        return finished
