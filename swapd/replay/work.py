"""The work in a swap log: who asked for what, and how long after what. Pure.

A thread asks again some time after it got what it asked for before, and holds a lease for some
time. Both times stay under other settings; only waiting changes.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import msgspec

from swapd.core import actions, events
from swapd.core.events import AnyEvent
from swapd.log.history import copied_bytes
from swapd.log.records import Start
from swapd.log.replay import Step as Recorded
from swapd.log.replay import replay
from swapd.shared import protocol

Key = tuple[int, int]
#: A thread, by the label of its process (with the pid) and its number. It may have several
#: sessions.
Actor = tuple[str, int]

Asking = protocol.Acquire | protocol.AcquireWorkspace | protocol.AcquireStart
#: Requests that later acquires of the session may need.
_NEEDED = (
    protocol.Register,
    protocol.Commit,
    protocol.Update,
    protocol.GiveUp,
    protocol.Unregister,
)


#: A lease was kept if its release comes later than this after the last use.
KEPT_LEAST_S = 1e-3


class ReplayTally(msgspec.Struct):
    loads: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    evictions: int = 0
    refused: int = 0
    #: Acquires without an answer at the end.
    waiting: int = 0
    seconds: float = 0.0
    #: Seconds from each acquire until its bytes were there, without refused tries.
    waits: list[float] = []
    #: All leased names, each time that an acquire got its bytes and some names were new.
    uses: list[frozenset[str]] = []

    def note(self, said: AnyEvent | actions.AnyAction) -> None:
        match said:
            case actions.CopyIn(joins=""):
                self.loads += 1
                self.bytes_in += copied_bytes(said)
            case actions.CopyOut():
                self.bytes_out += copied_bytes(said)
            case actions.Evict(reason=reason):
                self.evictions += reason != "joined"
            case actions.Refuse():
                self.refused += not said.tried

    def there(self, waited_s: float, leased: frozenset[str]) -> None:
        self.waits.append(waited_s)
        if not self.uses or not leased <= self.uses[-1]:
            self.uses.append(leased)


class WorkStep(NamedTuple):
    """An event from outside, `delay_s` after the last of the steps `after` is over. An acquire is
    over once its bytes are there or it is refused."""

    event: AnyEvent
    after: tuple[int, ...]
    delay_s: float
    #: Of a release: the last part of the delay, in which nobody used the lease.
    kept_s: float = 0.0
    #: Of an acquire: it never had its bytes. Of another request: it was refused.
    in_vain: bool = False


class RecordedWork(NamedTuple):
    start: Start
    steps: list[WorkStep]
    happened: ReplayTally
    #: Rate of copies to the device while there were any; None if there were none.
    bytes_per_s: float | None

    def requests(self) -> Iterator[tuple[int, int, protocol.AnyOrder]]:
        """Yield (step, session, request)."""
        for number, step in enumerate(self.steps):
            if isinstance(step.event, events.SessionRequest):
                yield number, step.event.session, step.event.request


def read_work(lines: Iterable[bytes], start: Start) -> RecordedWork:
    """Return the work in a run of the log, whose first record is `start`. Raises: as `replay`."""
    reader = WorkReader()
    for recorded in replay(lines):
        reader.note(recorded)
    return reader.work(start)


class CopiesUnderWay:
    """Tracks copies in progress, what all leases hold, and when all bytes of an acquire are there,
    also after an early grant."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        #: Granted keys that wait for copies of these names.
        self._pending: dict[Key, set[str]] = {}
        self.held: dict[Key, tuple[str, ...]] = {}

    def heard(self, said: AnyEvent | actions.AnyAction) -> None:
        match said:
            case actions.CopyIn():
                self._names[said.generation] = said.name
            case events.SessionRequest(
                request=protocol.Release(lease=lease) | protocol.Cancel(acquire=lease)
            ):
                self._released((said.session, lease))
            case events.SessionGone(session=session) | events.SessionEnds(session=session):
                for key in [k for k in self.held if k[0] == session]:
                    self._released(key)

    def ends(self, generation: int) -> list[Key]:
        """End a copy; return the keys that have all their bytes now."""
        name = self._names.pop(generation, None)
        done = []
        for key, names in list(self._pending.items()):
            names.discard(name or "")
            if not names:
                del self._pending[key]
                done.append(key)
        return done

    def granted(self, grant: actions.Grant, names: tuple[str, ...], step: WorkStep) -> bool:
        """Return whether all bytes are there. `names`: those that the acquire in `step` has."""
        key = grant.session, grant.request
        for lease in spares(step) if grant.spent else ():
            self._released((key[0], lease))
        self.held[key] = grant.names or names
        if pending := set(self.held[key]) & set(self._names.values()):
            self._pending[key] = pending
        return not pending

    def _released(self, key: Key) -> None:
        self._pending.pop(key, None)
        self.held.pop(key, None)

    def leased(self) -> frozenset[str]:
        return frozenset(chain.from_iterable(self.held.values()))


def spares(step: WorkStep) -> tuple[int, ...]:
    assert isinstance(step.event, events.SessionRequest)
    return tuple(one.lease for one in getattr(step.event.request, "spare", ()))


class _Demand(NamedTuple):
    step: int
    actor: Actor
    names: tuple[str, ...]
    at: float


class WorkReader:
    def __init__(self) -> None:
        self._steps: list[WorkStep] = []
        self._first: float | None = None
        self._now = 0.0
        #: When each step was over, by its number.
        self._over: dict[int, float] = {}
        self._asked: dict[Key, _Demand] = {}
        #: The steps of requests other than acquires.
        self._others: dict[Key, int] = {}
        self._labels: dict[int, str] = {}
        self._last: dict[Actor, int] = {}
        #: By session: the last step that later ones need, and the steps that are over, in the order
        #: of their ends.
        self._needed: dict[int, int] = {}
        self._done: dict[int, list[int]] = {}
        self._copies = CopiesUnderWay()
        self._outcome = ReplayTally()
        self._moved = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._loading: dict[int, int] = {}

    def work(self, start: Start) -> RecordedWork:
        waiting = sum(1 for one in self._asked.values() if one.step not in self._over)
        happened, seconds = self._outcome, self._now - (self._first or 0.0)
        happened.waiting, happened.seconds = waiting, seconds
        rate = self._moved / self._busy_s if self._busy_s else None
        return RecordedWork(start, self._steps, happened, rate)

    def note(self, recorded: Recorded) -> None:
        event = recorded.event
        self._now = event.now
        self._copies.heard(event)
        if self._first is None:
            self._first = event.now
        match event:
            case events.SessionOpened(session=session, label=label):
                self._labels[session] = label
                self._needed[session] = self._add(event, (), event.now - self._first)
                self._end(session, self._needed[session])
            case events.SessionRequest(request=request):
                self._note_request(event, request)
            case events.SessionGone(session=session) | events.SessionEnds(session=session):
                self._note_gone(session)
            case events.CopiedIn() | events.CopyStopped() | events.CopyFailed():
                self._note_copied(event.generation, whole=isinstance(event, events.CopiedIn))
        for action in recorded.recorded:
            self._note_action(action)

    def _note_request(self, event: events.SessionRequest, request: protocol.AnyOrder) -> None:
        session = event.session
        if session not in self._needed:
            return  # the session is ending
        match request:
            case protocol.Acquire() | protocol.AcquireWorkspace() | protocol.AcquireStart():
                self._note_acquire(event, request)
            case protocol.Release(lease=lease) | protocol.Cancel(acquire=lease):
                self._note_release(event, request, (session, lease))
            case _:
                number = self._others[session, request.id] = self._add_later(
                    event, self._done_of(session)
                )
                self._end(session, number)
                if isinstance(request, _NEEDED):
                    self._needed[session] = number

    def _note_acquire(self, event: events.SessionRequest, request: Asking) -> None:
        session = event.session
        actor = (self._labels[session], getattr(request, "agent", 0))
        before = self._last.get(actor)
        after = self._done_of(session) if before is None else (before,)
        number = self._last[actor] = self._add_later(event, (*after, self._needed[session]))
        names = getattr(request, "names", ())
        self._asked[session, request.id] = _Demand(number, actor, names, self._now)

    def _note_release(
        self, event: events.SessionRequest, request: protocol.Release | protocol.Cancel, key: Key
    ) -> None:
        asked = self._asked.pop(key, None)
        if asked is None:
            return
        if asked.step not in self._over:
            return self._give_up(asked)
        kept_s = request.idle_s if isinstance(request, protocol.Release) else 0.0
        if kept_s > KEPT_LEAST_S:  # the client gave it back later; the thread did not wait for it
            number = self._add_later(event, (asked.step,), kept_s)
        else:
            number = self._add_later(event, (asked.step, self._last[asked.actor]))
            self._last[asked.actor] = number
        self._end(key[0], number)

    def _give_up(self, asked: _Demand) -> None:
        """Change an acquire that never had its bytes, so that in a replay it waits no longer than
        it did."""
        step = self._steps[asked.step]
        assert isinstance(step.event, events.SessionRequest)
        patient = msgspec.structs.replace(step.event.request, timeout_s=self._now - asked.at)
        event = msgspec.structs.replace(step.event, request=patient)
        self._steps[asked.step] = step._replace(event=event, in_vain=True)
        self._over[asked.step] = self._now

    def _note_gone(self, session: int) -> None:
        for key in [k for k in self._asked if k[0] == session]:
            asked = self._asked.pop(key)
            if asked.step not in self._over:
                self._give_up(asked)
        done = self._done.pop(session, [])
        if session in self._needed:
            self._add_later(
                events.SessionGone(self._now, session), (*done, self._needed.pop(session))
            )

    def _note_action(self, action: actions.AnyAction) -> None:
        self._outcome.note(action)
        self._copies.heard(action)
        match action:
            case actions.CopyIn():
                self._loading[action.generation] = copied_bytes(action)
                if self._busy_since is None:
                    self._busy_since = self._now
            case actions.Grant():
                key = (action.session, action.request)
                asked = self._asked.get(key)
                if asked and self._copies.granted(action, asked.names, self._steps[asked.step]):
                    self._there(key)
            case actions.Refuse():
                self._note_refused((action.session, action.request))

    def _note_refused(self, key: Key) -> None:
        number = self._others.get(key)
        if (asked := self._asked.pop(key, None)) is not None:
            number = asked.step
            self._end(key[0], number)
        if number is not None:
            self._steps[number] = self._steps[number]._replace(in_vain=True)

    def _note_copied(self, generation: int, *, whole: bool) -> None:
        for key in self._copies.ends(generation):
            self._there(key)
        if generation in self._loading:
            nbytes = self._loading.pop(generation)
            self._moved += nbytes if whole else 0
            if not self._loading and self._busy_since is not None:
                self._busy_s += self._now - self._busy_since
                self._busy_since = None

    def _there(self, key: Key) -> None:
        asked = self._asked[key]
        self._outcome.there(self._now - asked.at, self._copies.leased())
        self._end(key[0], asked.step)

    # --- steps ---------------------------------------------------------------------------

    def _done_of(self, session: int) -> tuple[int, ...]:
        return tuple(self._done.get(session, ())[-1:])

    def _end(self, session: int, number: int) -> None:
        self._over[number] = self._now
        self._done.setdefault(session, []).append(number)

    def _add_later(self, event: AnyEvent, after: Iterable[int], kept_s: float = 0.0) -> int:
        over = {one: self._over[one] for one in after if one in self._over}
        since = max(over.values(), default=self._now)
        return self._add(event, tuple(over), self._now - since, kept_s)

    def _add(
        self, event: AnyEvent, after: tuple[int, ...], delay_s: float, kept_s: float = 0.0
    ) -> int:
        self._steps.append(WorkStep(event, after, delay_s, min(kept_s, delay_s)))
        number = len(self._steps) - 1
        if not isinstance(event, events.SessionRequest) or not isinstance(event.request, Asking):
            self._over[number] = self._now
        return number
