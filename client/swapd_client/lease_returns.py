"""How leases go back to the daemon: by the thread that ends them, or by the lifeline's thread."""

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from math import inf

import msgspec

from swapd.shared import protocol
from swapd_client.errors import DaemonGone, SessionEnded, SwapdError, Timeout
from swapd_client.leases.cache import UNTOLD_S, Cache, Key
from swapd_client.leases.record import Record
from swapd_client.session.channel import ChannelFactory
from swapd_client.session.session import Session

Offered = Mapping[Key, tuple[Record, protocol.Release]]


class LeaseReturns:
    """The ends of the leases of one client's threads. Raises and is thread-safe as `Leasing`."""

    def __init__(self, session: Session, factory: ChannelFactory, cache: Cache) -> None:
        self.session = session
        self.told = session.told
        self.cache = cache
        self._factory = factory
        #: Releases by the lifeline, by their time: a thread's next request may overtake them.
        self._recent: deque[tuple[float, protocol.Release]] = deque()
        session.lifeline.sweep = self.sweep
        session.life.when_ended(self._daemon_gone)

    def end(self, key: Key, record: Record, ack: bool = False) -> None:
        """Tell the daemon, from any thread, that a lease ends once its GPU work is done.

        May be repeated after an error or an interrupt.
        """
        if record.is_asked:
            self._factory.channel().send(protocol.Cancel(self.session.next_id(), record.id))
        else:
            self.end_now(record, ack)
        self.forget(key, record)

    def forget(self, key: Key, record: Record) -> None:
        if record.since < inf:
            self.cache.left[key] = record.since
        self.cache.records.pop(key, None)
        if self.cache.latest.get(key[0]) is record:
            self.cache.latest.pop(key[0], None)

    def give_back(self, record: Record, ack: bool = True) -> None:
        session = self.session
        if not session.leases.give_back(record):
            return
        release = session.leases.release_of(record)
        # Callers may hold a lock, so a stopped daemon must not block this for ever.
        with suppress(SessionEnded, Timeout):
            if ack:
                asks = msgspec.structs.replace(release, id=session.next_id(), ack=True)
                self._factory.channel().call(asks, 0.0)
            else:
                self._factory.channel().send(release)
        record.told = True

    def end_now(self, record: Record, ack: bool = True) -> None:
        if not self.session.leases.ends_later(record, self.give_back):
            self.give_back(record, ack)

    def sweep(self) -> float:
        """Give back leases that were kept long enough; return the seconds until the next call.

        Runs in the lifeline's thread.
        """
        cache, told = self.cache, self.told
        if not cache.records and not cache.holders:
            cache.left.clear()
            cache.naps_s = inf
            if not cache.records:
                return inf
        self._give_back_due()
        cache.forget_old()
        while True:
            naps_s = cache.naps_s = cache.nap_s(busy=told.hurried or bool(told.wanted))
            # a release meanwhile either sees the new `naps_s`, or is seen here
            if cache.nap_s(busy=told.hurried or bool(told.wanted)) >= naps_s:
                return naps_s

    def _give_back_due(self) -> None:
        leases, told = self.session.leases, self.told
        due = set(self.cache.due(told.wanted.copy(), hurried=told.hurried))

        def give_back(key: Key, record: Record) -> None:
            if record.is_asked:  # given up after repeated interrupts
                self.end(key, record)
            elif leases.marks.is_pending(record) and not record.has_any(told.wanted):
                record.since = time.monotonic()
            elif leases.ends_later(record, self.give_back):
                self.forget(key, record)
            elif leases.give_back(record) and not self._tell_by_lifeline(record):
                return  # the daemon reads nothing now: try at the next sweep
            else:
                self.forget(key, record)

        if due:
            with suppress(SwapdError):  # the session has ended, and its leases with it
                self.cache.each(give_back, lambda key, _: key in due)

    def _tell_by_lifeline(self, record: Record) -> bool:
        now, release = time.monotonic(), self.session.leases.release_of(record)
        self._recent.append((now, release))
        while self._recent and now - self._recent[0][0] > UNTOLD_S:
            self._recent.popleft()
        message = protocol.encode(protocol.ReleaseKept((release,)))
        if len(message) > protocol.LIFELINE_MAX_BYTES:  # it names much scratch
            self._factory.channel().send(release)
        elif not self.session.lifeline.try_send(message):
            return False
        record.told = True
        return True

    def offer(self, thread: int) -> Offered:
        """Offer the thread's kept leases with an acquire: the daemon may end them to make room.

        Returns them with their releases. Nobody uses them until `settle`.
        """
        offered: dict[Key, tuple[Record, protocol.Release]] = {}

        def add(key: Key, record: Record) -> None:
            if record.offered:  # to an acquire that failed: the daemon may have ended it
                return self.end(key, record)
            if len(offered) == protocol.LEASES_MAX:
                return
            record.offered = True  # first: an interrupt may come
            release = self.session.leases.offer_of(record)
            if release is None:
                record.offered = False
            else:
                offered[key] = record, release

        self.cache.each(add, lambda key, record: key[0] == thread and not record.is_asked)
        return offered

    def settle(self, offered: Offered, *, spent: bool) -> None:
        """End the offered leases if the daemon has (`spent`); otherwise hold them again."""

        def settled(key: Key, record: Record) -> None:
            if spent:
                record.told = True
                self.end(key, record)
            else:
                self.session.leases.hold_again(record)
                record.offered = False

        self.cache.each(settled, lambda key, one: key in offered and offered[key][0] is one)

    def flush_kept(self) -> None:
        """End the leases that all threads keep, before this thread's next request.

        The request may overtake releases of other threads, so these are sent again: a second one
        does nothing.
        """
        self.session.check()  # first: after a fork the cache's lock may be held for good
        self.cache.each(self.end)
        channel = self._factory.channel()
        for _, release in self._recent.copy():
            channel.send(release)
        for request in self._factory.unheard(channel):
            if isinstance(request, protocol.Release):
                channel.send(request)

    def keep_no_more(self) -> None:
        """Before closing: end kept leases, and keep no lease from now on."""

        def end(key: Key, record: Record) -> None:
            with suppress(SwapdError):  # the session has ended, and its leases with it
                self.end(key, record)

        self.cache.closed = True
        self.cache.each(end)

    def _daemon_gone(self, error: SwapdError) -> None:
        """End kept leases. The lifeline's thread calls this, and sweeps no more."""
        if isinstance(error, DaemonGone):
            self.keep_no_more()
