"""Threads that use components on a simulated device, and the work that is read from their log."""

from functools import partial
from itertools import count, cycle, islice
from math import isfinite

from swapd.core import Residency, actions, events
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.core.records import Rules
from swapd.log.records import Start
from swapd.log.replay import Step as Recorded
from swapd.replay.rerun import SimulatedMachine
from swapd.replay.work import RecordedWork, WorkReader
from swapd.shared import protocol

LRU = Rules(eviction="lru")
#: Of a copy; a chunk is a byte, so a component of 4 takes a second.
RATE = 4.0


class Site:
    """Threads that use components in turn, on a simulated device; and the log of that."""

    def __init__(self, chunks: int, rules: Rules = LRU) -> None:
        self.log: list[AnyEvent | AnyAction] = []
        self.machine = SimulatedMachine(Residency(chunks, 1, rules), RATE, self._heard)
        self._start = Start("0", "host", chunks, 1, rules)
        self._numbers = count(1)
        self._granted: dict[tuple[int, int], int] = {}
        #: Whether threads ask for the next before a lease that they keep is back.
        self.goes_on_at_once = False
        self._use: dict[int, tuple[float, float, float, list[str]]] = {}

    def thread(
        self,
        *names: str,
        uses: int,
        hold_s: float,
        gap_s: float = 0.0,
        kept_s: float = 0.0,
        size: int = 4,
        at: float = 0.0,
        family: str = "",
    ) -> None:
        """It uses components of its own, one after the other, each for `hold_s`, and keeps each
        lease for `kept_s` after that. `family`: they are its parts, which are streamed."""
        session = len(self._use) + 1
        order = list(islice(cycle(names), uses))
        self._use[session] = hold_s, gap_s, kept_s, order
        self.machine.at(at, partial(self._open, session, names, size, family))

    def work(self) -> RecordedWork:
        """Run it all, and read the log."""
        self.machine.run()
        reader = WorkReader()
        steps: list[Recorded] = []
        for said in self.log:
            if isinstance(said, events.Event):
                steps.append(Recorded(0, said, [], []))
            else:
                steps[-1].recorded.append(said)
        for step in steps:
            reader.note(step)
        return reader.work(self._start)

    def _open(self, session: int, names: tuple[str, ...], size: int, family: str) -> None:
        self.machine.feed(events.SessionOpened(self.machine.now, session, f"stage {session}"))
        for name in names:
            number = next(self._numbers)
            asked = protocol.Register(number, name, size, part_of=family, transient=bool(family))
            self.ask(session, asked)
        self.machine.at(self.machine.now, partial(self._commit, session, names))

    def _commit(self, session: int, names: tuple[str, ...]) -> None:
        for name in names:
            self.ask(session, protocol.Commit(next(self._numbers), name))
        self.machine.at(self.machine.now, partial(self._next, session))

    def _next(self, session: int) -> None:
        order = self._use[session][-1]
        if order:
            asked = protocol.Acquire(next(self._numbers), (order.pop(0),))
            self.ask(session, asked)

    def _heard(self, said: AnyEvent | AnyAction) -> None:
        if not isinstance(said, events.Tick):
            self.log.append(said)
        if isinstance(said, actions.Grant):
            hold_s, gap_s, kept_s, _ = self._use[said.session]
            until = self.machine.now + hold_s + kept_s
            if self.goes_on_at_once:
                self.machine.at(until - kept_s + gap_s, partial(self._next, said.session))
            if isfinite(until):
                self.machine.at(until, partial(self._release, said.session, said.request))

    def _release(self, session: int, lease: int) -> None:
        _, gap_s, kept_s, _ = self._use[session]
        self.ask(session, protocol.Release(next(self._numbers), lease, idle_s=kept_s))
        if not self.goes_on_at_once:
            self.machine.at(self.machine.now + gap_s, partial(self._next, session))

    def ask(self, session: int, request: protocol.AnyOrder) -> None:
        self.machine.feed(events.SessionRequest(self.machine.now, session, request))
