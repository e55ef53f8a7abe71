"""Clients of a simulated device: no daemon, no clock, no bytes.

Each request is a session of its own that acquires one model. The device runs one granted request
at a time, in the order of the grants, and copies one model at a time.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Literal, NamedTuple

from swapd.core import Residency, actions, events
from swapd.core.events import AnyEvent
from swapd.core.records import Rules
from swapd.core.sharing import usual_s, worth
from swapd.core.states import State
from swapd.replay.rerun import SimulatedMachine
from swapd.shared import protocol

#: Who asks for what when. "at once": each request, when it arrives, so that loads run beside other
#: requests. "in order": each, once the one before it was granted: first come, first served. "one":
#: a server that asks when nothing else runs, and for what is in before what came first, as often as
#: the rules let somebody be overtaken.
Asking = Literal["at once", "in order", "one"]

#: The session that registers all models; those of the requests follow.
OWNER = 0
#: The request of a session, and its lease.
ASKED = 1


class Request(NamedTuple):
    arrives_s: float
    model: str
    exec_s: float


class Served(NamedTuple):
    """What became of a trace."""

    #: By request, in order of arrival: seconds until it ran, and its place among the grants.
    waited_s: list[float]
    place: list[int]
    loads: int
    loaded: int  # in the unit of the sizes
    #: The longest time that one was overtaken while it was the first to wait.
    overtaken: int


class Clients:
    """Run one trace.

    `sizes` of the models and `room` have one unit; `load_s`: the time to load so much.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        load_s: float,
        room: int,
        rules: Rules,
        asking: Asking = "at once",
    ) -> None:
        self.core = Residency(room, 1, rules)
        self._machine = SimulatedMachine(self.core, 1.0 / load_s, self._heard)
        self._sizes, self._load_s, self._asking = sizes, load_s, asking
        self._numbers = count(1)
        #: Requests that have arrived and are not asked for: all, and by model.
        self._waiting: dict[int, None] = {}
        self._of: dict[str, deque[int]] = {name: deque() for name in sizes}
        self._overtaken = self._most_overtaken = 0
        self._use_s = 0.0
        self._asked = 0
        #: Requests that were granted and do not run yet, and whether one runs.
        self._ready: deque[int] = deque()
        self._runs = False
        self._waited_s: dict[int, float] = {}
        self._place: dict[int, int] = {}
        self._loaded = 0
        self._machine.feed(events.SessionOpened(0.0, OWNER, "owner"))
        for name, size in sizes.items():
            self._ask(OWNER, protocol.Register(next(self._numbers), name, size))
        self._machine.run()  # the host copies are made
        for name in sizes:
            self._ask(OWNER, protocol.Commit(next(self._numbers), name))
        self._machine.run()

    def run(self, requests: Sequence[Request]) -> Served:
        """Serve the requests, which are sorted by arrival."""
        self._requests = requests
        for i, request in enumerate(requests):
            self._machine.at(request.arrives_s, partial(self._arrive, i))
        self._machine.run()
        every = range(len(requests))
        return Served(
            [self._waited_s[i] for i in every],
            [self._place[i] for i in every],
            self.core.ledger.loads,
            self._loaded,
            self._most_overtaken,
        )

    # --- requests ------------------------------------------------------------------------

    def _arrive(self, i: int) -> None:
        self._waiting[i] = None
        self._of[self._requests[i].model].append(i)
        self._ask_next()

    def _ask_next(self) -> None:
        while self._waiting and self._may_ask():
            i = next(iter(self._waiting))
            if self._asking == "one":
                i = self._chosen(i)
            del self._waiting[i]
            self._of[self._requests[i].model].remove(i)
            self._asked += 1
            self._machine.feed(events.SessionOpened(self._machine.now, OWNER + 1 + i, "client"))
            self._ask(OWNER + 1 + i, protocol.Acquire(ASKED, (self._requests[i].model,)))

    def _may_ask(self) -> bool:
        if self._asking == "one":
            return self._asked == len(self._place) and not (self._runs or self._ready)
        return self._asking == "at once" or self._asked == len(self._place)

    def _chosen(self, first: int) -> int:
        """The request to ask for: the oldest of those whose model is in, or the first."""
        bound = worth(self._load_s * self._sizes[self._requests[first].model], self._use_s)
        known = self.core.ledger.components
        if self._overtaken < min(bound, self.core.rules.overtake):
            is_in = (of[0] for name, of in self._of.items() if of and _is_in(known[name].state))
            chosen = min(is_in, default=first)
        else:
            chosen = first
        self._overtaken = self._overtaken + 1 if chosen != first else 0
        self._most_overtaken = max(self._most_overtaken, self._overtaken)
        return chosen

    def _granted(self, i: int) -> None:
        self._place[i] = len(self._place)
        self._ready.append(i)
        self._machine.at(self._machine.now, self._ask_next)
        self._run_next()

    def _run_next(self) -> None:
        if self._ready and not self._runs:
            i = self._ready.popleft()
            self._waited_s[i] = self._machine.now - self._requests[i].arrives_s
            self._runs = True
            self._machine.at(self._machine.now + self._requests[i].exec_s, partial(self._ran, i))

    def _ran(self, i: int) -> None:
        self._use_s = usual_s(self._use_s, self._requests[i].exec_s)
        self._runs = False
        self._run_next()
        self._ask(OWNER + 1 + i, protocol.Release(ASKED, ASKED))
        self._machine.feed(events.SessionGone(self._machine.now, OWNER + 1 + i))
        self._ask_next()

    # --- the core ------------------------------------------------------------------------

    def _ask(self, session: int, request: protocol.AnyOrder) -> None:
        self._machine.feed(events.SessionRequest(self._machine.now, session, request))

    def _heard(self, said: AnyEvent | actions.AnyAction) -> None:
        match said:
            case actions.CopyIn():
                self._loaded += self._sizes[said.name]
            case actions.Grant():
                self._most_overtaken = max(self._most_overtaken, said.overtaken)
                self._granted(said.session - OWNER - 1)
            case actions.Refuse() | actions.StopCopy():
                raise AssertionError(f"no request of a trace leads to this: {said}")


def _is_in(state: State) -> bool:
    return state in (State.RESIDENT, State.LOADING)
