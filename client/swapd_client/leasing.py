"""How the threads of a client ask for leases, and take those that they keep.

Each thread sends its requests on a channel of its own, in order. An acquire names the leases in
use, so the daemon does not count kept leases (`leases/cache.py`) as the thread's. `leases/` has the
state of a lease, `lease_returns.py` its end.
"""

import itertools
import threading
import time
import weakref
from collections.abc import Collection
from contextlib import nullcontext, suppress
from math import inf
from typing import Any, Protocol

from swapd.shared import protocol
from swapd_client import cross_deadlock
from swapd_client.agents import this_thread
from swapd_client.cancellation import stop_if_cancelled
from swapd_client.checks import check_names, check_seconds
from swapd_client.errors import SwapdError
from swapd_client.interrupts import covered
from swapd_client.lease import Lease, hold, hold_kept
from swapd_client.lease_request import (
    LeaseRequest,
    agent_ahead,
    few,
    granted,
    of_components,
    prefetch_of,
    record_of,
)
from swapd_client.lease_returns import LeaseReturns
from swapd_client.leases.cache import Cache, Key
from swapd_client.leases.record import Record
from swapd_client.memory import ranges
from swapd_client.session.channel import Channel, ChannelFactory
from swapd_client.session.lifeline import ANSWER_S
from swapd_client.session.session import Session
from swapd_client.signs_of_life import SignsOfLife
from swapd_client.tracing import Trace, Tracing
from swapd_client.wait_forecasts import WaitForecasts


class ReadsAhead(Protocol):
    def drop_ahead(self) -> None:
        """Release what was asked for ahead: the thread waits for what may need its room."""


class Leasing:
    """The requests and leases of one client's threads. Thread-safe; a lease may end in any thread.

    All methods may raise the error that ended the session.
    """

    def __init__(self, session: Session, factory: ChannelFactory, tracing: Tracing) -> None:
        self.session = session
        self.tracing = tracing
        self.cache = Cache(session.lifeline.ring)
        self.giving_back = LeaseReturns(session, factory, self.cache)
        self.factory = factory
        self._numbers = itertools.count()
        self._local = threading.local()

    @property
    def readers(self) -> "weakref.WeakSet[ReadsAhead]":
        """What reads ahead in this thread, and stops it if an acquire of the thread has to wait."""
        own: weakref.WeakSet[ReadsAhead] = vars(self._local).setdefault("own", weakref.WeakSet())
        return own

    # --- requests ------------------------------------------------------------------------

    def call(
        self, request: protocol.AnyRequest, timeout_s: float | None = None
    ) -> protocol.AnyReply:
        """Send a request and wait for its reply.

        Raises the error of a refusal; Timeout if the daemon is silent for `timeout_s`.
        """
        check_seconds(timeout_s)
        channel = self._channel()
        if timeout_s is None:
            return self.session.unwrap(channel.call(request))
        channel.ask(request)
        reply = channel.collect(request.id, timeout_s)
        if reply is None:
            channel.abandon(request.id)
            raise self.session.lifeline.not_answering(timeout_s)
        return self.session.unwrap(reply)

    def call_unless_silent(self, request: protocol.AnyRequest) -> protocol.AnyReply:
        """As `call`, for a request that takes its time.

        Raises Timeout if the daemon answers nothing at all for ANSWER_S.
        """
        channel = self._channel()
        signs = SignsOfLife(self.session, channel, ANSWER_S)
        try:
            return self.session.unwrap(channel.call(request, still_waits=signs.look))
        finally:
            signs.end()

    def _channel(self) -> Channel:
        """Return this thread's channel, for a request before which its kept leases end."""
        stop_if_cancelled()
        self.session.check()
        me = this_thread.number
        self.cache.each(self.giving_back.end, lambda key, _: key[0] == me)
        return self.factory.channel()

    def end_kept(self) -> None:
        """End the leases that all threads keep.

        Blocks until the daemon has heard of it. Raises Timeout after ANSWER_S.
        """
        self.giving_back.flush_kept()
        self.call(self.session.harmless(), ANSWER_S)

    # --- acquires ------------------------------------------------------------------------

    def take(self, names: tuple[str, ...], *how: Any, **named: Any) -> Lease:
        """As `Client.acquire`, at this session's daemon only."""
        session = self.session
        if not session.life.usable:  # first: after a fork the cache's lock may be held for good
            session.check()
        lease = Lease(self.giving_back, (this_thread.number, names))
        try:
            if hold_kept(lease):
                return lease
            return self.acquire(of_components(session, names, *how, **named), lease)
        except BaseException as exc:
            if isinstance(exc, TypeError):
                check_names(names)  # a list is no key: nothing is held
            self.give_up(lease)
            raise

    def acquire(
        self, asked: LeaseRequest, lease: Lease | None = None, *, in_place_of: int | None = None
    ) -> Lease:
        """Wait for the grant, and for the copies unless `asked.early`.

        A `lease` may be kept later, because this thread may soon ask for the same. Blocks and
        raises as `Client.acquire`; then nothing is held.
        """
        again = lease is not None
        lease = lease or Lease(self.giving_back, self._another(asked.names))
        try:
            self._acquire(lease, asked, in_place_of, again=again)
            return lease
        except BaseException:
            self.give_up(lease)
            raise

    def _another(self, names: tuple[str, ...]) -> Key:
        return (this_thread.number, names, next(self._numbers))

    @covered
    def give_up(self, lease: Lease, tries: int = 3) -> None:
        """Make the lease hold nothing, after an error or an interrupt in its acquire."""
        try:
            cache, key = self.cache, lease.key
            if cache.holders.get(key) is not lease.ref:
                return
            record = cache.records.get(key)
            if record is not None and not record.may_be_kept:
                with suppress(SwapdError):
                    self.giving_back.end(key, record)
            lease.held = False
            del cache.holders[key]
        except BaseException:
            if tries:  # one more interrupt
                self.give_up(lease, tries - 1)
            raise

    def ask(self, request: int, *names: str) -> None:
        """Ask for components ahead, without waiting. Collect or abandon the request in this thread.

        `request` is a number from `Session.next_id`; abandon it even after an interrupt in here.
        The request has an agent of its own. As a wait of this thread, which may release other
        leases meanwhile, it could be refused as a deadlock that does not exist.
        """
        acquire = protocol.Acquire(request, names, agent_ahead(request), early=True)
        self.factory.channel().ask(acquire)

    def collect(self, request: int, *names: str, within_s: float) -> Lease | None:
        """Return the early lease that was asked for ahead; None if it is not granted in that time.

        Before the thread blocks for the components, it must end the request, with `abandon` or
        `acquire_in_place_of`. Raises as `acquire`.
        """
        reply = self.factory.channel().collect(request, within_s)
        if reply is None:
            return None
        asked = of_components(self.session, names, early=True)
        lease = Lease(self.giving_back, self._another(names))
        try:
            self.cache.holders[lease.key] = lease.ref
            record = record_of(self.session, request, asked, agent_ahead(request))
            self.cache.records[lease.key] = record
            self._hold(lease, record, reply, asked)
            return lease
        except BaseException:
            self.give_up(lease)
            raise

    def acquire_in_place_of(self, request: int, *names: str) -> Lease:
        """As an early `acquire`, of components that were asked for ahead and not collected.

        The daemon receives this acquire before the end of the request ahead: without a request,
        components that it has loaded would leave.
        """
        asked = of_components(self.session, names, early=True)
        return self.acquire(asked, in_place_of=request)

    def exchange(self, lease: Lease, *names: str) -> Lease:
        """End a lease of any thread, and acquire components early in its room, for that thread.

        Both are one message: nobody else gets the room in between. Blocks until the GPU work under
        `lease` is done. Raises as `acquire`; `lease` is over even then.
        """
        cache, session = self.cache, self.session
        record = cache.records[lease.key]
        asked = of_components(session, names, early=True)
        another = Lease(self.giving_back, (lease.key[0], names, next(self._numbers)))
        release = session.leases.exchanged(record)
        try:
            cache.holders[another.key] = another.ref
            to_hold = record_of(session, session.next_id(), asked, record.agent)
            cache.records[another.key] = to_hold
            reply = self.factory.channel().call(
                asked.request(to_hold.id, agent=record.agent, spare=(release,)), asked.timeout_s
            )
            record.told = isinstance(reply, protocol.Granted) and reply.spent
            self._hold(another, to_hold, reply, asked)
            return another
        except BaseException:
            self.give_up(another)
            raise
        finally:
            if not record.told:  # a second release does nothing
                self.factory.channel().send(release)
            self.giving_back.forget(lease.key, record)
            cache.holders.pop(lease.key, None)
            lease.held = False

    def hint(self, *names: str, over: Collection[str] | None = None) -> None:
        """As `prefetch`, without an answer. Blocks as `Channel.send`."""
        self.factory.channel().send(prefetch_of(self.session.next_id(), names, over))

    def _acquire(
        self, lease: Lease, asked: LeaseRequest, in_place_of: int | None, *, again: bool
    ) -> None:
        self.session.check()
        cache, holds = self.cache, self.cache.used(this_thread.number)
        if hold_kept(lease):
            return
        if cache.holders.get(lease.key) is not lease.ref:
            again = False  # this thread uses such a lease
            lease.key = self._another(asked.names)
            cache.holders[lease.key] = lease.ref
        record = cache.records.get(lease.key)
        if record is not None:
            self.giving_back.end(lease.key, record)
        trace = self.tracing.begin(asked.names)
        with trace or nullcontext():
            self._acquire_now(lease, asked, holds, in_place_of, trace, again=again)

    def _acquire_now(
        self,
        lease: Lease,
        asked: LeaseRequest,
        holds: tuple[int, ...],
        in_place_of: int | None,
        trace: Trace | None,
        *,
        again: bool,
    ) -> None:
        session, cache, me = self.session, self.cache, this_thread.number
        record = record_of(session, session.next_id(), asked, me)
        since = cache.left.pop(lease.key, None)
        if since is not None:
            record.gap_s = time.monotonic() - since
        cache.records[lease.key] = record  # before its request leaves
        if cache.naps_s == inf:
            cache.ring()
        offered = self.giving_back.offer(me)
        spare = tuple(release for _, release in offered.values())
        request = asked.request(record.id, agent=me, holds=few(holds), spare=spare)
        if trace is not None:
            request = trace.marked(request)

        telling = None
        if asked.progress is not None:
            telling = WaitForecasts(
                self.factory.channel(), session.next_id(), record.id, asked.progress
            )

        def look() -> None:
            for one in self.readers:
                one.drop_ahead()
            if not isinstance(request, protocol.AcquireStart):  # no lease is in its way
                cross_deadlock.look(cross_deadlock.Wait(self.factory, cache, request, asked.names))
            if telling is not None:
                telling.look()

        try:
            reply = self.factory.channel().call(
                request, asked.timeout_s, in_place_of=in_place_of, still_waits=look
            )
        finally:
            cross_deadlock.waits.pop(threading.get_ident(), None)
            if telling is not None:
                telling.end()
        if trace is not None:
            trace.answered(reply)
        if offered and isinstance(reply, protocol.Granted):
            self.giving_back.settle(offered, spent=reply.spent)
        self._hold(lease, record, reply, asked)
        record.may_be_kept = again and session.leases.may_be_kept(record)

    def _hold(
        self, lease: Lease, record: Record, reply: protocol.AnyReply, asked: LeaseRequest
    ) -> None:
        if isinstance(reply, protocol.Refused):
            self.cache.records.pop(lease.key, None)
        granted(self.session, record, reply, asked)()
        record.told_at = record.since = time.monotonic()
        hold(lease, record)

    # --- the end -------------------------------------------------------------------------

    def is_interrupted(self) -> bool:
        """Whether the caller is a signal handler that interrupts a call with a lock."""
        places = [part.where for part in list(self.session.components.values())]
        locks = [self.cache.lock, ranges.moving, *self.session.locks, *(at.lock for at in places)]
        return any(lock._is_owned() for lock in locks)

    def in_use(self) -> bool:
        """As `Leases.in_use`, without the leases that the cache keeps."""
        return self.session.leases.in_use(self.cache.kept())

    def close(self) -> None:
        """Close all channels, and end the thread that makes spans. After the session's end."""
        if not self.session.forked and self.session.closed:
            self.factory.close()
            self.tracing.close()
