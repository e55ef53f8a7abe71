"""Runs the work of a log on a simulated device, under other settings, with the real core."""

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import NamedTuple

import msgspec

from swapd.core import Residency, actions, events
from swapd.core.actions import Urgency
from swapd.core.events import AnyEvent
from swapd.core.records import Rules
from swapd.log.history import copied_bytes
from swapd.replay.work import (
    Asking,
    CopiesUnderWay,
    Key,
    RecordedWork,
    ReplayTally,
    WorkStep,
    spares,
)
from swapd.shared import protocol

#: Ticks with nothing else due after which a run ends: the core looks again at what waits for ever.
TICKS_IN_VAIN = 1_000


class SimulatedMachine:
    """Runs what is due, and the copies that the core orders, at one rate for each direction. Only
    events move its clock.

    A copy pauses for a more urgent one. Everything else takes no time. `heard` gets each event,
    before the core does, and each action of the core.
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
        """Run until nothing is due, and the core waits only for events."""
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
            case actions.CopyIn(joins=""):
                lanes["in"].begin(action.generation, copied_bytes(action), action.urgency)
            case actions.CopyOut():
                lanes["out"].begin(action.generation, copied_bytes(action), (0, 0, 0))
            case actions.Hasten():
                lanes["in"].hasten(action.generation, action.urgency)
            case actions.StopCopy():
                if lanes["in"].stop(action.generation):
                    self._soon(events.CopyStopped(self.now, action.generation))
            case _:
                if event := _answer(action, self.now):
                    self._soon(event)

    def _soon(self, event: AnyEvent) -> None:
        self.at(self.now, partial(self.feed, event))

    def copied(self, lane: "_CopyLane", generation: int, took_s: float) -> None:
        if lane is self._lanes["in"]:
            self.feed(events.CopiedIn(self.now, generation, took_s))
        else:
            self.feed(events.CopiedOut(self.now, generation))


def _answer(action: actions.AnyAction, now: float) -> AnyEvent | None:
    match action:
        case actions.CopyIn(generation=generation):  # it joins another: nothing is copied
            return events.CopiedIn(now, generation)
        case actions.MakeHostCopy(uid=uid):
            return events.HostCopyMade(now, uid)
        case actions.SealHostCopy(uid=uid):
            return events.HostCopySealed(now, uid)
        case actions.SendRevoke(ack=True) as revoke:
            return events.RevokeAck(now, revoke.session, revoke.name, revoke.generation)
        case actions.Lend(generation=generation):
            return events.Lent(now, generation)
        case actions.Reclaim(generation=generation):
            return events.Reclaimed(now, generation)
        case actions.Fence(session=session):
            return events.SessionGone(now, session)
        case _:
            return None


class _Copy(NamedTuple):
    left: float
    ran_s: float
    urgency: Urgency
    begun: float


class _CopyLane:
    def __init__(self, machine: SimulatedMachine, bytes_per_s: float) -> None:
        self._machine, self._rate = machine, bytes_per_s
        self._copies: dict[int, _Copy] = {}
        self._running: int | None = None
        self._since = 0.0
        #: Counts up at each choice of the running copy.
        self._turn = 0

    def begin(self, generation: int, nbytes: int, urgency: Urgency) -> None:
        self._copies[generation] = _Copy(nbytes, 0.0, urgency, self._machine.now)
        self._choose()

    def hasten(self, generation: int, urgency: Urgency) -> None:
        if one := self._copies.get(generation):
            self._copies[generation] = one._replace(urgency=urgency)
            self._choose()

    def stop(self, generation: int) -> bool:
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


def run_again(work: RecordedWork, rules: Rules, chunks: int, bytes_per_s: float) -> ReplayTally:
    return _Rerun(work, rules, chunks, bytes_per_s).run()


class _ReplayedRequest(NamedTuple):
    step: int
    names: tuple[str, ...]
    at: float
    #: Spare leases that the acquire ended, and that no release in the log ends.
    spares: tuple[int, ...]


class _Rerun:
    def __init__(self, work: RecordedWork, rules: Rules, chunks: int, bytes_per_s: float) -> None:
        self._steps = work.steps
        core = Residency(chunks, work.start.chunk_bytes, rules)
        self._machine = SimulatedMachine(core, bytes_per_s, self._heard)
        self._outcome, self._copies = ReplayTally(), CopiesUnderWay()
        #: By step: the steps after it, and how many steps it still waits for.
        self._then: dict[int, list[int]] = {}
        self._waits_for: list[int] = []
        for number, step in enumerate(work.steps):
            self._waits_for.append(len(step.after))
            for before in step.after:
                self._then.setdefault(before, []).append(number)
        #: Acquires that do not have their bytes yet.
        self._asked: dict[Key, _ReplayedRequest] = {}
        #: Leases whose release is in the log.
        self._ends = {
            (session, request.lease)
            for _, session, request in work.requests()
            if isinstance(request, protocol.Release)
        }
        #: Unused leases to release later: the step, and the end of the use.
        self._kept: dict[Key, tuple[int, float]] = {}
        self._hurried: set[int] = set()

    def run(self) -> ReplayTally:
        for number, step in enumerate(self._steps):
            if not step.after:
                self._machine.at(step.delay_s, partial(self._do, number))
        self._machine.run()
        self._outcome.waiting, self._outcome.seconds = len(self._asked), self._machine.now
        return self._outcome

    # --- steps ---------------------------------------------------------------------------

    def _over(self, number: int) -> None:
        for after in self._then.get(number, ()):
            self._waits_for[after] -= 1
            if not self._waits_for[after]:
                step = self._steps[after]
                when = self._machine.now + step.delay_s - step.kept_s
                self._machine.at(when, partial(self._do, after))

    def _do(self, number: int) -> None:
        step, now = self._steps[number], self._machine.now
        match step.event:
            case events.SessionRequest(session=session, request=protocol.Release() as release):
                self._end_use(number, step, (session, release.lease))
            case events.SessionRequest(session=session, request=request):
                if isinstance(request, Asking):
                    self._note_asked(number, session, request)
                self._machine.feed(events.SessionRequest(now, session, request))
                if not isinstance(request, Asking):
                    self._over(number)
            case event:
                self._machine.feed(msgspec.structs.replace(event, now=now))
                self._over(number)

    def _note_asked(self, number: int, session: int, request: Asking) -> None:
        names = getattr(request, "names", ())
        spared = spares(self._steps[number])
        ended = tuple(lease for lease in spared if (session, lease) not in self._ends)
        self._asked[session, request.id] = _ReplayedRequest(number, names, self._machine.now, ended)

    # --- leases --------------------------------------------------------------------------

    def _end_use(self, number: int, step: WorkStep, key: Key) -> None:
        """End the use of a lease. Its client keeps it for a while, unless it is wanted."""
        if key[0] in self._hurried or not step.kept_s:
            return self._release(key, number, self._machine.now)
        self._kept[key] = number, self._machine.now
        self._machine.at(self._machine.now + step.kept_s, partial(self._give_back, key))

    def _give_back(self, key: Key) -> None:
        if key in self._kept:
            self._release(key, *self._kept.pop(key))

    def _release(self, key: Key, number: int, unused_since: float) -> None:
        event = self._steps[number].event
        assert isinstance(event, events.SessionRequest)
        idle_s = self._machine.now - unused_since
        request = msgspec.structs.replace(event.request, idle_s=idle_s)
        self._machine.feed(events.SessionRequest(self._machine.now, key[0], request))
        self._over(number)

    def _heard(self, said: AnyEvent | actions.AnyAction) -> None:
        self._copies.heard(said)
        match said:
            case events.CopiedIn() | events.CopyStopped():
                for key in self._copies.ends(said.generation):
                    self._there(key)
            case actions.Grant():
                self._note_granted((said.session, said.request), said)
            case actions.Refuse():
                if asked := self._asked.pop((said.session, said.request), None):
                    self._machine.at(self._machine.now, partial(self._over, asked.step))
            case actions.SendHurry(session=session):
                (self._hurried.add if said.waits else self._hurried.discard)(session)
                if said.waits:
                    self._give_back_kept(session)
            case actions.SendWanted(session=session) if said.wanted:
                self._give_back_kept(session, said.name)
        self._outcome.note(said)

    def _note_granted(self, key: Key, grant: actions.Grant) -> None:
        asked = self._asked[key]
        if not grant.spent:
            for lease in asked.spares:
                self._give_up((key[0], lease))
        if self._copies.granted(grant, asked.names, self._steps[asked.step]):
            self._there(key)

    def _there(self, key: Key) -> None:
        asked = self._asked.pop(key)
        self._outcome.there(self._machine.now - asked.at, self._copies.leased())
        if self._steps[asked.step].in_vain:
            self._give_up(key)
        self._machine.at(self._machine.now, partial(self._over, asked.step))

    def _give_up(self, key: Key) -> None:
        """Release a lease whose end is not in the log: it was refused or spent."""
        now = self._machine.now
        event = events.SessionRequest(now, key[0], protocol.Release(0, key[1]))
        self._machine.at(now, partial(self._machine.feed, event))

    def _give_back_kept(self, session: int, name: str | None = None) -> None:
        for key in [k for k in self._kept if k[0] == session]:
            if name is None or name in self._copies.held.get(key, ()):
                self._machine.at(self._machine.now, partial(self._give_back, key))
