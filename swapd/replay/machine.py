"""A device without bytes, and a clock that only events move, around the real core."""

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import NamedTuple

from swapd.core import Residency, actions, events
from swapd.core.actions import Urgency
from swapd.core.events import AnyEvent
from swapd.log.history import copied_bytes

#: The core looks again at what waits for ever, for ever.
TICKS_IN_VAIN = 1_000


class SimulatedMachine:
    """Runs what is due, and the copies that the core orders, at a rate for each direction.

    A copy stands still for a more urgent one, as on a device. All else takes no time: host copies,
    acknowledgements, memory that is lent. `heard` is called with each event, before the core has
    it, and with each action of the core.
    """

    def __init__(
        self,
        core: Residency,
        bytes_per_s: float,
        heard: Callable[[AnyEvent | actions.AnyAction], None],
    ) -> None:
        self.core = core
        self.now = 0.0
        self._heard = heard
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._lanes = {kind: _CopyLane(self, bytes_per_s) for kind in ("in", "out")}

    def at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), do))

    def run(self) -> None:
        """Until nothing is due, and the core waits for nothing but events."""
        in_vain = 0
        while in_vain < TICKS_IN_VAIN:
            tick_at = self.core.next_deadline()
            if self._due and (tick_at is None or self._due[0][0] <= tick_at):
                in_vain = 0
                self.now, _, do = heapq.heappop(self._due)
                do()
            elif tick_at is not None:
                in_vain += not self._due
                self.now = max(self.now, tick_at)
                self.feed(events.Tick(self.now))
            else:
                return

    def feed(self, event: AnyEvent) -> None:
        self._heard(event)
        for action in self.core.handle(event):
            self._obey(action)
            self._heard(action)

    def _obey(self, action: actions.AnyAction) -> None:
        lanes = self._lanes
        match action:
            case actions.MakeHostCopy():
                self._soon(events.HostCopyMade(self.now, action.uid))
            case actions.SealHostCopy():
                self._soon(events.HostCopySealed(self.now, action.uid))
            case actions.CopyIn():
                lanes["in"].begin(action.generation, copied_bytes(action), action.urgency)
            case actions.CopyOut():
                lanes["out"].begin(action.generation, copied_bytes(action), (0, 0, 0))
            case actions.Hasten():
                lanes["in"].hasten(action.generation, action.urgency)
            case actions.StopCopy():
                if lanes["in"].stop(action.generation):
                    self._soon(events.CopyStopped(self.now, action.generation))
            case actions.SendRevoke() if action.ack:
                self._soon(
                    events.RevokeAck(self.now, action.session, action.name, action.generation)
                )
            case actions.Lend():
                self._soon(events.Lent(self.now, action.generation))
            case actions.Reclaim():
                self._soon(events.Reclaimed(self.now, action.generation))
            case actions.Fence():
                self._soon(events.SessionGone(self.now, action.session))

    def _soon(self, event: AnyEvent) -> None:
        self.at(self.now, partial(self.feed, event))

    def copied(self, lane: "_CopyLane", generation: int, took_s: float) -> None:
        if lane is self._lanes["in"]:
            self.feed(events.CopiedIn(self.now, generation, took_s))
        else:
            self.feed(events.CopiedOut(self.now, generation))


class _Copy(NamedTuple):
    left: float
    #: How long it ran.
    ran_s: float
    urgency: Urgency
    begun: float


class _CopyLane:
    """The copies of one direction: the most urgent one runs."""

    def __init__(self, machine: SimulatedMachine, bytes_per_s: float) -> None:
        self._machine, self._rate = machine, bytes_per_s
        self._copies: dict[int, _Copy] = {}
        self._running: int | None = None
        self._since = 0.0
        #: Counts up when another copy runs, or none.
        self._turn = 0

    def begin(self, generation: int, nbytes: int, urgency: Urgency) -> None:
        self._copies[generation] = _Copy(nbytes, 0.0, urgency, self._machine.now)
        self._choose()

    def hasten(self, generation: int, urgency: Urgency) -> None:
        if one := self._copies.get(generation):
            self._copies[generation] = one._replace(urgency=urgency)
            self._choose()

    def stop(self, generation: int) -> bool:
        """Whether there was such a copy."""
        found = self._copies.pop(generation, None)
        self._choose()
        return found is not None

    def _choose(self) -> None:
        now = self._machine.now
        if self._running in self._copies:
            one, so_far_s = self._copies[self._running], now - self._since
            left = max(one.left - so_far_s * self._rate, 0.0)
            self._copies[self._running] = one._replace(left=left, ran_s=one.ran_s + so_far_s)
        self._turn += 1
        self._since = now
        first = min(self._copies.items(), key=lambda item: (item[1].urgency, item[0]), default=None)
        self._running = None if first is None else first[0]
        if first is not None:
            ends = now + first[1].left / self._rate
            self._machine.at(ends, partial(self._over, first[0], self._turn))

    def _over(self, generation: int, turn: int) -> None:
        if turn != self._turn:
            return
        one = self._copies.pop(generation)
        ran_s = one.ran_s + self._machine.now - self._since
        stood_still = self._machine.now - one.begun > ran_s * (1 + 1e-9)
        self._running = None
        self._choose()
        self._machine.copied(self, generation, ran_s if stood_still else 0.0)
