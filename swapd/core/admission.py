"""The life of an acquire: it waits, and the core admits or refuses it.

A name that is not registered yet parks it. Then it is queued (for memory), admitted (all its
components are resident or loading, and promised to it), and at last granted. The core may refuse it
in each of these states. The step that orders a copy also makes the promise. May not live here:
whether an acquire can be admitted (`verdict.py`), and whose turn it is (`planner.py`).
"""

from itertools import islice, takewhile
from operator import attrgetter

from swapd.core import explain, leases, requests, transfers, verdict, workspaces
from swapd.core.actions import Grant, Waiting
from swapd.core.counts import observe
from swapd.core.hold_and_wait import HoldAndWait
from swapd.core.ledger import Ledger
from swapd.core.orders import Ranked
from swapd.core.queue import Parked, WaitQueue
from swapd.core.records import Component, Key, Waiter
from swapd.core.states import State
from swapd.core.verdict import Refused, Shared
from swapd.shared.protocol import Acquire, Code

_seq = attrgetter("seq")
_order = attrgetter("order")


class Admission:
    """All waiters for components of `ledger`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._seq = 0
        self.queue = WaitQueue(ledger.rules.patience_s)
        self.parked = Parked()
        #: Queued waiters whose agent held a lease when they were queued.
        self.entangled = HoldAndWait(ledger)
        #: Those of them whose Waiting record is still to be made.
        self.untold: dict[Key, Waiter] = {}
        #: Queued waiters, those that need most memory first.
        self.largest: Ranked[Key] = Ranked()

    @property
    def somebody_waits(self) -> bool:
        """Whether a waiter or a prefetch waits for memory."""
        return bool(self.queue.queued or self._ledger.prefetches)

    # --- in ------------------------------------------------------------------------------

    def waiter(self, session: int, asked: Acquire) -> Waiter:
        now = self._ledger.now
        self._seq += 1
        return Waiter(
            session=session,
            request=asked.id,
            agent=asked.agent,
            asked=asked.names,
            names=self._ledger.expand(asked.names),
            priority=asked.priority,
            deadline=requests.deadline(asked.timeout_s, now),
            await_registration=asked.await_registration,
            arrived=now,
            seq=self._seq,
            early=asked.early,
            spare=asked.spare,
        )

    def ask(self, w: Waiter, missing: list[str]) -> None:
        """Admit `w` or have it wait: parked, if names are `missing`."""
        self.queue.add(w)
        self._ledger.sessions[w.session].waiters.add(w.request)
        if missing and verdict.is_late(self._ledger, w):
            self._refuse_late(w)
        elif missing:
            self.parked.add(w)
            self.tell_waiting(w, explain.parked(missing))
        else:
            self._enter(w)

    def unpark(self, c: Component) -> None:
        """`c` may be acquired from now on."""
        for w in self.parked.awaiting(c.name, c.part_of or c.name):
            w.names = self._ledger.expand(w.asked)
            is_parked = w.key in self.parked.waiters  # or the one before it had it refused
            if is_parked and all(self._ledger.may_be_acquired(n) for n in w.names):
                self.parked.drop(w)
                self._enter(w)

    def _enter(self, w: Waiter) -> None:
        """All names are registered: grant at once, share a load, queue, or refuse for good."""
        ledger = self._ledger
        asked = ledger.named(w.names)
        found = verdict.at_once(ledger, w, asked)
        if self._lets_pins_go(w, found, asked):
            found = verdict.at_once(ledger, w, asked)
        if isinstance(found, Refused):
            return self.refuse_as(w, found)
        for c in asked:
            if c.released_at is not None:
                c.gap_s = ledger.now - c.released_at
                c.released_at = None
                ledger.replan |= self.somebody_waits  # it may lose its protection
        if isinstance(found, Shared):
            ledger.replan |= self.somebody_waits  # a waiter may have counted on one of them
            return self.admit(w)
        if verdict.is_late(ledger, w):
            return self._refuse_late(w)
        self._join_queue(w, asked)
        self._spend(w)
        if w.owner in ledger.holders.by_agent:
            self._hold_on(w)
            self._refuse_deadlocked()
        if w.key in self.entangled.waiters or self.queue.head(ledger.now) is w:
            ledger.replan = True
        elif w.queued:
            self.tell_waiting(w)

    def _lets_pins_go(
        self, w: Waiter, found: verdict.Verdict | None, asked: list[Component]
    ) -> bool:
        """Whether only pins were in its way for good. If so, removes these pins."""
        if not (isinstance(found, Refused) and found.why == "too_large"):
            return False
        going = verdict.to_let_go(self._ledger, asked)
        transfers.unpin_for(self._ledger, w.key, going)
        return bool(going)

    def _spend(self, w: Waiter) -> None:
        """It needs memory: end the leases that it named for this."""
        ended = [leases.release(self._ledger, w.session, spare) for spare in w.spare]
        w.spent = bool(ended)
        self._ledger.replan |= any(ended)

    def _join_queue(self, w: Waiter, asked: list[Component]) -> None:
        self.queue.push(w)
        w.chunks = sum(c.chunks for c in asked)
        w.grouped = any(c.group is not None for c in asked)
        self.largest.put(w.key, (-w.chunks, w.seq))
        for c in asked:
            c.waiting[w.key] = None

    def _hold_on(self, w: Waiter) -> None:
        """Its agent holds a lease, and may be in the way of other waiters."""
        self.entangled.add(w)
        self.untold[w.key] = w

    def share(self, c: Component) -> None:
        """`c` came in, or is no longer wanted: admit waiters for it that need no memory."""
        ledger = self._ledger
        for key in list(c.waiting):
            w = self.queue.get(key)
            if w is not None and verdict.may_share(ledger, w, ledger.named(w.names)):
                self.admit(w)
                ledger.replan = True

    def admit(self, w: Waiter) -> None:
        """Promise `w` all components that it asked for, and start the loads.

        An early acquire does not wait for loads of components that its session owns: its worker
        watches them arrive.
        """
        ledger = self._ledger
        self._leave_queue(w)
        w.admitted = True
        for name in w.names:
            c = ledger.components[name]
            c.promised[w.key] = None
            ledger.idle.drop(c)
            if c.state is State.ABSENT:
                transfers.load(ledger, c)
            if c.state is State.LOADING:
                w.loaded = not c.workspace
                if not (w.early and c.session == w.session):  # it may watch the load
                    w.pending.add(name)
            else:
                c.hits += 1
                c.tally.hits += 1
                ledger.hits += 1
        if not w.pending:
            self._grant(w)

    def let_in(self, c: Component) -> None:
        """`c` came in: grant the waiters that waited only for it."""
        for key in list(c.promised):
            w = self.queue.get(key)
            assert w is not None
            w.pending.discard(c.name)
            if not w.pending:
                self._grant(w)

    def _grant(self, w: Waiter) -> None:
        ledger = self._ledger
        self.queue.forget(w)
        ledger.sessions[w.session].waiters.discard(w.request)
        placements = leases.lend(ledger, w)
        names = () if w.asked == w.names else w.names
        waited_s = ledger.now - w.arrived
        observe(ledger.counts.wait_s, waited_s)
        ledger.out.append(Grant(*w.key, placements, waited_s, w.loaded, names, w.spent))

    def tell_waiting(self, w: Waiter, why: str = "") -> None:
        """Record that `w` waits, once."""
        self.untold.pop(w.key, None)
        if not w.why:
            w.why = why or explain.blocked(self._ledger, w, most=3)
            self._ledger.out.append(Waiting(w.session, w.request, w.asked, w.why))

    # --- out -----------------------------------------------------------------------------

    def refuse(self, key: Key, code: Code, message: str, *, tried: bool = False) -> None:
        """Refuse a waiter, if it (still) waits."""
        if w := self.queue.get(key):
            self.forget(w)
            self._ledger.refuse(key, code, message, tried=tried, names=w.asked)

    def refuse_as(self, w: Waiter, found: Refused) -> None:
        """Refuse a waiter that can never be granted."""
        self.refuse(w.key, *explain.refused(self._ledger, found), tried=_only_tries(w))

    def forget(self, w: Waiter) -> None:
        """Forget a waiter; components promised to it become idle again."""
        ledger = self._ledger
        self._leave_queue(w)
        self.queue.forget(w)
        if session := ledger.sessions.get(w.session):
            session.waiters.discard(w.request)
        for name in w.names:
            c = ledger.components.get(name)
            if c is not None and w.key in c.promised:
                c.promised.pop(w.key, None)
                transfers.settle(ledger, c)
            if c is not None and c.workspace:
                workspaces.close(ledger, c)
        self._drop_done_with(w)
        ledger.replan = True

    def refuse_late(self) -> None:
        """Refuse all whose deadline has passed."""
        for w in self.queue.expired(self._ledger.now):
            self._refuse_late(w)

    def _refuse_late(self, w: Waiter) -> None:
        why = explain.timeout(self._ledger, w, self._ledger.now)
        self.refuse(w.key, "timeout", why, tried=_only_tries(w))

    def turn_away(self, c: Component, why: str, most: int | None = None) -> None:
        """`c` goes away: refuse its waiters, or park those with `await_registration`.

        At most `most` of them, queued ones before admitted ones; handled in order of arrival.
        """
        keys = islice((*c.waiting, *c.promised), most)
        waiters = [self.queue.get(key) for key in keys]
        for w in sorted((w for w in waiters if w is not None), key=_seq):
            if w.await_registration and not w.admitted:
                self._leave_queue(w)
                self._drop_done_with(w)
                self.parked.add(w)
                self._ledger.replan = True
            else:
                self.refuse(w.key, "component_gone", why)

    def _leave_queue(self, w: Waiter) -> None:
        self.queue.unqueue(w)
        self.largest.drop(w.key)
        self.untold.pop(w.key, None)
        self.entangled.drop(w)
        self.parked.drop(w)
        for name in w.names:
            if c := self._ledger.components.get(name):
                c.waiting.pop(w.key, None)

    def _drop_done_with(self, w: Waiter) -> None:
        """`w` left the queue: components that stayed only for it leave."""
        ledger = self._ledger
        for name in w.names:
            c = ledger.components.get(name)
            if c is not None and name in ledger.idle:
                transfers.go(ledger, c)

    # --- who can never be let in ---------------------------------------------------------

    def refuse_what_no_longer_fits(self) -> None:
        room = self._ledger.pool.total - self._ledger.fixed
        large = [key for _, key in takewhile(lambda r: -r[0][0] > room, self.largest.ranked())]
        for w in sorted((w for key in large if (w := self.queue.get(key))), key=_order):
            asked = self._ledger.named(w.names)
            problem = verdict.never_fits(self._ledger, asked)
            if problem and not self._lets_pins_go(w, problem, asked):
                self.refuse_as(w, problem)
        self._refuse_deadlocked()

    def refuse_what_cannot_come_in(self) -> None:
        """The device is down: refuse waiters for components that are not on it."""
        for w in list(self.queue.queued):
            asked = self._ledger.named(w.names)
            if problem := verdict.cannot_come_in(self._ledger, asked, w):
                self.refuse_as(w, problem)

    def _refuse_deadlocked(self) -> None:
        """Refuse, newest first, until all agents that hold and wait can finish.

        A waiter for new bytes whose session holds the old ones gets these instead: without the
        update it would not wait.
        """
        ledger = self._ledger
        while stuck := self.entangled.deadlocked():
            if w := self.entangled.that_could_take_old(stuck):
                w.takes_old = True
                if verdict.may_share(ledger, w, ledger.named(w.names)):
                    self.admit(w)
                ledger.replan = True
                continue
            newest = max(stuck, key=_seq)
            message = explain.deadlock(ledger, newest, stuck)
            self.refuse(newest.key, "deadlock", message)


def _only_tries(w: Waiter) -> bool:
    """Whether the acquire is only a try (`timeout=0`): granted at once, or refused."""
    return w.deadline == w.arrived
