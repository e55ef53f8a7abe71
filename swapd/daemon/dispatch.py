"""Passes events to the core, one at a time, and carries out its actions in order. Other parts of
the daemon see only `Inbox`."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import msgspec

from swapd.core import Residency, actions, events, explain
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.log.swap_log import SwapLog
from swapd.shared.protocol import MOVES_MAX, Account, Acquire, AnyAcquire, Move

log = logging.getLogger("swapd")

#: An action with its number in the swap log.
Numbered = tuple[AnyAction, int]
Perform = Callable[[Any], None]

#: The key that a slow action and the event that ends it have in common; None: no event ends it.
_NAMES: dict[type, Callable[[Any], object]] = {
    **dict.fromkeys(
        (
            *(actions.CopyIn, actions.CopyOut, actions.Lend, actions.Reclaim),
            *(events.CopiedIn, events.CopyStopped, events.CopiedOut, events.CopyFailed),
            *(events.Lent, events.Reclaimed),
        ),
        lambda one: one.generation,
    ),
    **dict.fromkeys(
        (
            *(actions.MakeHostCopy, actions.SealHostCopy),
            *(events.HostCopyMade, events.HostCopySealed, events.HostCopyFailed),
        ),
        lambda one: ("host copy", one.uid),
    ),
    actions.SendRevoke: lambda one: (one.session, one.generation) if one.ack else None,
    events.RevokeAck: lambda one: (one.session, one.generation),
}


class Inbox(ABC):
    """The loop, a clock, tasks, and the way to the core, for each part of the daemon. Used in the
    loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, crashed: Callable[[BaseException], None]
    ) -> None:
        """`crashed(error)` ends the daemon."""
        self.loop = loop
        self.crashed = crashed
        self._tasks: set[asyncio.Task[None]] = set()

    def clock(self) -> float:
        """Return the time for events. The loop's would be coarser: uvloop counts whole
        milliseconds."""
        return time.monotonic()

    @abstractmethod
    def post(self, event: AnyEvent) -> None:
        """Pass an event to the core."""

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run `work` as a task, at most until `stop`. An error in `work` ends the daemon."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def stop(self) -> None:
        """Cancel all tasks. What they run in threads goes on."""
        for task in list(self._tasks):
            task.cancel()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crashed(error)


class Dispatch(Inbox):
    def __init__(
        self,
        core: Residency,
        swap_log: SwapLog,
        loop: asyncio.AbstractEventLoop,
        crashed: Callable[[BaseException], None],
    ) -> None:
        super().__init__(loop, crashed)
        self._core = core
        self._swap_log = swap_log
        #: Carries out each kind of action; set before the first event.
        self.perform: Mapping[type, Perform] = {}
        #: Record number of the current action.
        self.record = 0
        self.traces = Traces()
        self._events: deque[AnyEvent] = deque()
        self._draining = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        #: Record numbers of slow actions in progress, by their keys.
        self._causes: dict[object, int] = {}
        #: Set once the daemon is stopping and no lease is held.
        self.quiet = asyncio.Event()

    def post(self, event: AnyEvent) -> None:
        """Queue an event; handle the queue unless a caller up the stack does."""
        self._events.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            while self._events:
                self._step(self._events.popleft())
        except Exception as exc:  # noqa: BLE001 - a bug in here must end the daemon, loudly
            self.crashed(exc)
        finally:
            self._draining = False
        self._set_timer()
        if self._core.ledger.stopping and self._core.quiet:
            self.quiet.set()

    def account_of(self, session: int, request: int, names: tuple[str, ...] = ()) -> Account | None:
        """Return the account for the answer to an acquire, and end its trace; None without a trace.
        Call it while the answer is carried out. `names`: all granted names, if not the requested
        ones."""
        if (traced := self.traces.open.get((session, request))) is None:
            return None
        under_way = [load for g in self._core.ledger.moves if (load := self._load(g)) is not None]
        moves = self.traces.moves(traced, frozenset(names or traced.names), under_way)
        self.traces.drop(session, request)
        left_out = max(len(moves) - MOVES_MAX, 0)
        shown = tuple(moves[:MOVES_MAX])
        return Account(self.clock(), self.record, traced.waits_for, shown, left_out)

    def _load(self, generation: int) -> Move | None:
        ledger = self._core.ledger
        move = ledger.moves.get(generation)
        if move is None or move.lane is not ledger.lane_in:
            return None
        record = self._causes.get(generation, 0)
        return Move("load", move.component.name, move.component.bytes_in, move.began, record)

    def _forget_revocations(self, session: int) -> None:
        for name in [n for n in self._causes if isinstance(n, tuple) and n[0] == session]:
            del self._causes[name]

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _step(self, event: AnyEvent) -> None:
        if isinstance(event, events.DeviceDown) and not self._core.ledger.down:
            log.critical("%s", explain.device_down(event.why))
        if self.traces.open and isinstance(event, _ENDS_OF_LOADS):
            self._note_end(event)
        done = self._core.handle(event)
        seq = self._swap_log.event(event, self._cause_of(event))
        numbered = [(a, self._swap_log.action(a, seq, event.now)) for a in done]
        for action, number in copies_first(numbered):
            self._carry_out(action, number)
        if isinstance(event, events.SessionGone):
            self._forget_revocations(event.session)

    def _note_end(self, event: events.CopiedIn | events.CopyFailed | events.CopyStopped) -> None:
        if (load := self._load(event.generation)) is not None:
            why = event.why if isinstance(event, events.CopyFailed) else ""
            self.traces.ended.append(_ended(load, event.now, why=why))

    def _carry_out(self, action: AnyAction, number: int) -> None:
        kind = type(action)
        if (name_of := _NAMES.get(kind)) and (name := name_of(action)) is not None:
            self._causes[name] = number
        if self.traces.open:
            self.traces.note(action, number, self.clock())
        if (perform := self.perform.get(kind)) is not None:
            self.record = number
            perform(action)

    def _cause_of(self, event: AnyEvent) -> int:
        if (name_of := _NAMES.get(type(event))) is None:
            return 0
        if isinstance(event, events.Reclaimed) and event.runs:
            return self._causes.get(name_of(event), 0)
        return self._causes.pop(name_of(event), 0)

    def _set_timer(self) -> None:
        at = self._core.next_deadline()
        if at == self._timer_at:
            return
        self.close()
        self._timer, self._timer_at = None, at
        if at is not None:
            # uvloop counts whole milliseconds: one late tick is better than a busy loop
            self._timer = self.loop.call_later(max(at - self.clock(), 0) + 0.001, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        self.post(events.Tick(self.clock()))


#: Session and request id.
Key = tuple[int, int]

#: Limit of ended loads kept for open accounts.
ENDED_MAX = 4096

_ENDS_OF_LOADS = (events.CopiedIn, events.CopyFailed, events.CopyStopped)


class _TracedAcquire(msgspec.Struct):
    since_s: float
    names: tuple[str, ...]
    waits_for: str = ""
    #: Evictions for this acquire, by generation.
    evictions: dict[int, Move] = {}


class Traces:
    """Traced acquires, from request to answer. Others cost one look into an empty table."""

    def __init__(self) -> None:
        self.open: dict[Key, _TracedAcquire] = {}
        #: Loads that ended while an account was open, oldest first.
        self.ended: deque[Move] = deque(maxlen=ENDED_MAX)
        #: The acquire that each eviction in progress is for, by generation.
        self._leaving: dict[int, Key] = {}

    def begin(self, session: int, request: AnyAcquire, now: float) -> None:
        names = request.names if isinstance(request, Acquire) else ()
        self.open[session, request.id] = _TracedAcquire(now, names)

    def moves(
        self, traced: _TracedAcquire, wanted: frozenset[str], under_way: Iterable[Move]
    ) -> list[Move]:
        """Return the evictions for an acquire and the loads of `wanted` since it began, in
        order."""
        loads = [load for load in self.ended if (load.ended_s or 0.0) >= traced.since_s]
        ours = (load for load in (*loads, *under_way) if load.name in wanted)
        return sorted((*traced.evictions.values(), *ours), key=lambda move: move.record)

    def drop(self, session: int, request: int) -> None:
        if (traced := self.open.pop((session, request), None)) is not None:
            for generation in traced.evictions:
                self._leaving.pop(generation, None)
        if not self.open:
            self.ended.clear()

    def session_gone(self, session: int) -> None:
        for key in [key for key in self.open if key[0] == session]:
            self.drop(*key)

    def note(self, action: AnyAction, record: int, now: float) -> None:
        match action:
            case actions.Evict(waiter=waiter) if waiter in self.open:
                move = Move("evict", action.name, 0, now, record, why=action.reason)
                self.open[waiter].evictions[action.generation] = move
                self._leaving[action.generation] = waiter
            case actions.Evicted() if action.generation in self._leaving:
                moves = self.open[self._leaving.pop(action.generation)].evictions
                move = moves[action.generation]
                moves[action.generation] = _ended(move, now, nbytes=action.bytes_back)
            case actions.Waiting() if traced := self.open.get((action.session, action.request)):
                traced.waits_for = action.why


def _ended(move: Move, now: float, **changed: Any) -> Move:
    return msgspec.structs.replace(move, ended_s=now, **changed)


def copies_first(numbered: Iterable[Numbered]) -> list[Numbered]:
    """Move loads before revocations that need no acknowledgement, whose message would delay the
    thread that begins the copy. If the daemon dies before it sends the message, the worker goes on
    with its host copy anyway."""
    done: list[Numbered] = []
    untold: list[Numbered] = []
    for one in numbered:
        action = one[0]
        if isinstance(action, actions.SendRevoke) and not action.ack:
            untold.append(one)
            continue
        if untold and not isinstance(action, actions.CopyIn | actions.Evict | actions.Evicted):
            done += untold
            untold.clear()
        done.append(one)
    return done + untold
