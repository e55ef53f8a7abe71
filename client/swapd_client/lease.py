"""Leases, as their holders use them."""

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from time import monotonic
from typing import Any
from weakref import ref

from msgspec.structs import replace

from swapd.shared.protocol import Granted, Placement
from swapd_client.agents import this_thread
from swapd_client.checks import Uncopied, check_name
from swapd_client.errors import (
    ClientClosed,
    DeviceFailed,
    InvalidArgument,
    SessionEnded,
    SwapdError,
    UnknownComponent,
)
from swapd_client.interrupts import covered
from swapd_client.lease_returns import LeaseReturns
from swapd_client.leases.cache import KEEP_S, LINGER_S, UNTOLD_S, Key
from swapd_client.leases.record import Record
from swapd_client.session.gpu.streams import empty_cache, handle_of
from swapd_client.session.session import Session

#: Errors of a release that a block does not raise in place of its own error.
OF_A_RELEASE = SessionEnded, ClientClosed, DeviceFailed


class BaseLease(Uncopied):
    """The right to use components, until it is released.

    On a GPU the release takes effect after the work already queued on the current stream, on the
    streams given to `uses`, and on the streams that waited. The caller does not wait for that.
    """

    #: Whether a stream was told to wait, so that no host thread has checked the outcome.
    _streams_wait = False
    #: Whether a block has used the lease, which ends with the block.
    _entered = False
    _fresh: Mapping[str, bool] = {}

    # each kind of lease sets these
    names: tuple[str, ...]
    _session: Session
    _record: Record
    #: The grant to this holder. A kept lease is reused, and `_record.granted` may be another's.
    _granted: Granted
    held: bool

    def __repr__(self) -> str:
        state = "held" if self.held else "released"
        return f"<{type(self).__name__} {' + '.join(self.names)} {state}>"

    @property
    def waited_s(self) -> float:
        """Seconds from the request's arrival at the daemon to the grant."""
        return self._granted.waited_s

    @property
    def loaded(self) -> bool:
        """Whether the acquire had to make a copy, or wait for one."""
        return self._granted.loaded

    @property
    def number(self) -> int:
        """The daemon's id of the lease, unique in this client."""
        return self._granted.id

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Addresses of the components that this process registered."""
        return self._granted.placements

    @property
    def wanted(self) -> bool:
        """Whether another session waits for this memory and its minimum residency is over.

        Costs no message. A busy holder keeps its lease over many steps and reads this at the end of
        each.
        """
        wanted = self._session.told.wanted
        return bool(wanted) and not wanted.isdisjoint(self._granted.names or self.names)

    def fresh(self, name: str) -> bool:
        """Whether the contents of scratch are new: zeros, without anything written before.

        True for the first lease that asks after the contents were dropped, each time that this
        lease asks. Ask before you use old contents. `name` may be a family; contents of components
        that are not scratch are never new. Costs no message. Raises: UnknownComponent if the
        component is not in this lease, or belongs to another process.
        """
        check_name(name)
        if name not in self._fresh:
            if not self._has_own(name):
                raise UnknownComponent(
                    f"{name!r} is not in this lease (of {', '.join(self.names)}), or belongs to "
                    "another process: only its own process can ask whether it is new"
                )
            self._fresh = {**self._fresh, name: self._session.leases.is_fresh(self._record, name)}
        return self._fresh[name]

    def uses(self, stream: Any) -> None:
        """Make the release also wait for the work on `stream`, besides the current stream.

        `stream` is a `torch.cuda.Stream`, any object that has `cuda_stream`, or the driver's
        handle. It must not be destroyed before the release, or `rests`. No-op on the host device.
        """
        self._record.streams[handle_of(stream)] = None

    def rests(self) -> None:
        """Mark the end of a step: the release waits for work queued until now, not for later work.

        This covers the current stream and the streams given to `uses`, which may then be destroyed.
        Costs no message.
        """
        if self._session.processor.works_late:
            self._session.leases.marks.set(self._record)

    def check(self) -> None:
        """Raise if results computed under this lease are known to be invalid. Costs no message.

        DeviceFailed: a component was never loaded, so streams that waited for it went on without
        it. SessionEnded: the session ended before it was loaded. SessionFenced: other processes may
        have used the memory for a moment. To check work that still runs, wait for the GPU first.
        """
        if problem := self._session.arrivals.problem_with(self._record):
            raise problem

    def _has_own(self, name: str) -> bool:
        """Whether a component of this process, or a part of such a family, is in the lease."""
        self._session.life.check_process()
        known = self._session.registry.family(name) or [name]
        return any(self._record.holds(part) for part in known)

    def _wait(self, segment: int | None, name: str | None, stream: Any) -> None:
        self._session.life.check_process()
        name = name or self.names[0]
        if name not in self.names and name not in self._granted.names and not self._has_own(name):
            check_name(name)
            raise UnknownComponent(f"{name!r} is not in this lease (of {', '.join(self.names)})")
        if stream is None:
            return self._session.arrivals.wait(self._record, name, segment)
        self.check()
        handle = handle_of(stream)
        self._session.arrivals.wait(self._record, name, segment, handle)
        self._record.streams[handle] = None
        self._streams_wait = True

    def answered_for(self) -> None:
        """Give no warning if the lease is collected: another object releases it."""
        self._record.is_answered_for = True

    def _rest(self, *, later: bool = False) -> SwapdError | None:
        """Mark the work under it as queued; return the error to raise once the daemon knows.

        `later`: as of `Marks.set`.
        """
        record, leases = self._record, self._session.leases
        if record.is_workspace and not self._session.is_disabled:
            empty_cache()
        if not self._session.processor.works_late:
            return None
        problem = self._session.arrivals.problem_with(record) if self._streams_wait else None
        leases.marks.set(record, later=later)
        return problem


class Lease(BaseLease):
    """The right to use components; while it is held their bytes neither move nor change.

    Ends with `release` or with the `with` block, also after an exception. A second release is a
    no-op. A lease belongs to the thread that took it: while that thread waits for another acquire,
    deadlock detection assumes that it releases nothing.

    A lease whose object is collected ends then, with a ResourceWarning. A signal handler may raise
    anywhere, also in here: then the lease ends.
    """

    # A decode loop makes a lease at every step, so this sets all attributes itself.
    def __init__(self, giving_back: LeaseReturns, key: Key) -> None:
        self._giving_back = giving_back
        self._session = giving_back.session
        self.key = key
        self.names = key[1]
        self.held = False
        #: Itself, in `Cache.holders`.
        self.ref = ref(self)

    @covered
    def __enter__(self) -> "Lease":
        try:
            if self.held and not self._entered:
                self._entered = True
                return self
        except BaseException:
            self._leave()
            raise
        raise not_to_enter(self)

    @covered
    def __exit__(self, kind: object, exc: BaseException | None, where: object) -> None:
        try:
            with suppress(*OF_A_RELEASE) if exc is not None else nullcontext():
                self.release()
        except BaseException:
            self._leave()
            raise

    @covered
    def _leave(self) -> None:
        """Stop using the lease, after an error or an interrupt in its release."""
        try:
            if self.held:
                record, holders = self._record, self._giving_back.cache.holders
                record.unmarked = not record.ends_at_once  # perhaps not all its work is marked
                if self.key in holders and holders[self.key] is self.ref:
                    del holders[self.key]
                self.held = False
                self._giving_back.cache.ring()
        except BaseException:  # one more interrupt
            self._leave()
            raise

    def wait(
        self, segment: int | None = None, *, name: str | None = None, stream: Any = None
    ) -> None:
        """Wait until a segment, and those before it, are on the device; None: all of them.

        Returns at once unless the lease was acquired `early`; then a GPU's memory is accessible by
        this call only. `name` selects the component, if the lease has several. Raises: DeviceFailed
        if the segment will never come (release the lease, then acquire again), or the GPU refuses
        the access; SessionEnded if the session ended meanwhile; InvalidArgument, UnknownComponent
        if there is no such segment, or component in the lease.

        With `stream` (as for `uses`), that stream waits and this returns at once: work queued on it
        later starts when the segment is there. If the segment never comes, or the daemon dies, the
        stream goes on all the same; then the next `wait`, `check` or the `release` raises, and the
        results are invalid. On the host device, and on GPUs whose streams cannot wait for flags,
        the caller waits instead.
        """
        self._wait(segment, name, stream)

    @covered
    def release(self) -> None:
        """Give the components back.

        Does not block in the thread that acquired, except once in some hundred messages: then it
        waits until the daemon has received them, for some seconds if the daemon is stopped.

        On a GPU it takes effect after the work already queued on the current stream, and on the
        streams given to `uses` and `wait`; a thread of the client waits for that. In a loop that
        takes the lease again and again, later work on the current stream counts too, until the
        lease ends or another is acquired.

        No-op if the daemon is gone. Raises: ClientClosed; SessionFenced if the daemon ended the
        session while this was held (see its log): then discard the results computed since, because
        other processes may have used the memory for a moment. If streams were told to wait, also
        raises as `check`.
        """
        try:
            if not self.held:
                return
            if self.ref() is None:  # garbage, in a finalizer: the cache ends the lease, if not yet
                self.held = False
                return
            record, giving_back = self._record, self._giving_back
            told, cache, key = giving_back.told, giving_back.cache, self.key
            record.since = monotonic()
            problem, is_kept = None, record.may_be_kept and self._comes_back(record)
            if not record.ends_at_once:
                problem = self._rest(later=is_kept and cache.latest.get(key[0]) is record)
            if is_kept:
                cache.latest[key[0]] = record
                del cache.holders[key]  # from here on the lease is kept
                self.held = False
                # others may wait since `_comes_back`
                if (told.hurried or told.wanted) and cache.naps_s > LINGER_S:
                    cache.ring()
            else:
                giving_back.end(key, record, ack=key[0] != this_thread.number)
                del cache.holders[key]
                self.held = False
        except BaseException:
            self._leave()
            raise
        if problem is not None:
            raise problem

    def _comes_back(self, record: Record) -> bool:
        told = self._giving_back.told
        return (
            record.gap_s < (LINGER_S if told.hurried else KEEP_S)
            and record.since - record.told_at < UNTOLD_S
            and not (told.wanted and record.has_any(told.wanted))
            and not record.outdated
            and self._session.life.usable
            and not self._giving_back.cache.closed
        )


def not_to_enter(lease: BaseLease) -> InvalidArgument:
    why = "another block uses it, and ends it" if lease.held else "it is over"
    return InvalidArgument(f"{lease!r} cannot be held by this block: {why}. Acquire for each block")


def wait_here(lease: Lease) -> None:
    """Make this thread's current streams wait, or this thread if there are no streams."""
    if not lease.loaded:
        return
    streams = lease._session.processor.current_streams()
    for stream in streams:
        lease.wait(stream=stream)
    if not streams:
        lease.wait()


def hold(lease: Lease, record: Record) -> None:
    lease._record, lease._granted, lease.held = record, record.granted, True


def hold_kept(lease: Lease) -> bool:
    """Take the lease that its thread keeps under its key, if that is usable and not in use."""
    cache, key = lease._giving_back.cache, lease.key
    if cache.holders.setdefault(key, lease.ref) is not lease.ref:
        return False
    record = cache.records.get(key)
    if record is None or not record.is_usable:
        return False
    latest = cache.latest.get(key[0])
    if latest is not record and latest is not None and latest.queued:
        # else it would wait for the work under this lease, too
        mark = lease._session.leases.marks.set_queued
        cache.each(lambda _, kept: mark(kept), lambda _, kept: kept is latest)
    record.again += 1
    record.gap_s = monotonic() - record.since
    granted = record.granted
    if granted.waited_s or granted.loaded:  # these are of the first grant
        granted = record.granted = replace(granted, waited_s=0.0, loaded=False)
    lease._record, lease._granted, lease.held = record, granted, True
    return True
