"""Passes events to the core, one at a time, and has its actions carried out.

Lives here: the order of actions, their numbers in the swap log, and the timer of the core.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from swapd.core import Residency, actions, events, explain
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.daemon.traces import Traces
from swapd.log.swap_log import SwapLog
from swapd.shared.protocol import Account, AnyAcquire, Move

log = logging.getLogger("swapd")

#: An action, and its number in the swap log.
Numbered = tuple[AnyAction, int]
#: Carries out an action, whose number in the swap log is the second argument.
Perform = Callable[[Any, int], None]

#: The name of a slow action, which the event that ends it has too; None: no event ends it.
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


class Dispatch:
    """The way of all events into the core, and of its actions out of it. Used in the loop."""

    #: The clock of all events: the loop's own counts whole milliseconds under uvloop.
    clock = staticmethod(time.monotonic)

    def __init__(
        self,
        core: Residency,
        swap_log: SwapLog,
        loop: asyncio.AbstractEventLoop,
        crashed: Callable[[BaseException], None],
    ) -> None:
        """`crashed(error)`: a bug, which must end the daemon."""
        self._core = core
        self._swap_log = swap_log
        self._loop = loop
        self._crashed = crashed
        #: How each kind of action is carried out; set before the first event.
        self.perform: Mapping[type, Perform] = {}
        self.traces = Traces(self.clock)
        self._events: deque[AnyEvent] = deque()
        self._draining = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        #: The record of each slow action that has not ended, by its name.
        self._causes: dict[object, int] = {}
        #: Set once the daemon stops and no lease is held.
        self.quiet = asyncio.Event()

    def post(self, event: AnyEvent) -> None:
        """Queue an event; drain unless a caller up the stack is already draining."""
        self._events.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            while self._events:
                self._step(self._events.popleft())
        except Exception as exc:  # noqa: BLE001 - a bug in here must end the daemon, loudly
            self._crashed(exc)
        finally:
            self._draining = False
        self._set_timer()
        if self._core.ledger.stopping and self._core.quiet:
            self.quiet.set()

    def trace(self, session: int, request: AnyAcquire) -> None:
        """Keep an account of this acquire until its answer."""
        ledger = self._core.ledger
        loads = {
            generation: Move(
                "load",
                move.component.name,
                move.component.bytes_in,
                move.began,
                self._causes.get(generation, 0),
            )
            for generation, move in ledger.moves.items()
            if move.lane is ledger.lane_in
        }
        self.traces.begin(session, request, loads)

    def account_of(
        self, session: int, request: int, names: tuple[str, ...], record: int
    ) -> Account | None:
        """The account for the answer to an acquire; None if it is not traced."""
        if not self.traces.open:
            return None
        return self.traces.answer(session, request, names, record)

    def forget_revocations(self, session: int) -> None:
        """The session acknowledges none any more."""
        for name in [n for n in self._causes if isinstance(n, tuple) and n[0] == session]:
            del self._causes[name]

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _step(self, event: AnyEvent) -> None:
        if isinstance(event, events.DeviceDown) and not self._core.ledger.down:
            log.critical("%s", explain.device_down(event.why))
        if self.traces.open:
            self.traces.event(event)
        done = self._core.handle(event)
        seq = self._swap_log.event(event, self._cause_of(event))
        numbered = [(a, self._swap_log.action(a, seq, event.now)) for a in done]
        for action, number in copies_first(numbered):
            self._carry_out(action, number)

    def _carry_out(self, action: AnyAction, number: int) -> None:
        kind = type(action)
        if (name_of := _NAMES.get(kind)) and (name := name_of(action)) is not None:
            self._causes[name] = number
        if self.traces.open:
            self.traces.action(action, number)
        if (perform := self.perform.get(kind)) is not None:
            perform(action, number)

    def _cause_of(self, event: AnyEvent) -> int:
        """The record of the action that the event ends, or ends in part."""
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
            # uvloop's timers count whole milliseconds: better late once than a busy loop
            self._timer = self._loop.call_later(max(at - self.clock(), 0) + 0.001, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        self.post(events.Tick(self.clock()))


def copies_first(numbered: Iterable[Numbered]) -> list[Numbered]:
    """The same in their order, except that loads begin before workers are told of evictions that
    they need not acknowledge.

    The daemon does not wait for such a worker, which may read the message when most of the copy is
    done. If the daemon dies before the message, the worker goes on with its host copy anyway. But
    the message takes time, and wakes the worker to unmap: the thread that begins the copy needs
    that time and processor.
    """
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
