"""The leases of one session.

Maps and unmaps chunks as leases come and go, waits for arrivals, and ends leases after GPU work, in
threads. Messages to the daemon are each client's own.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec

from swapd.shared.protocol import PAST_MAX_S, Placement, Release, UsedRanges
from swapd_client.errors import DaemonGone, SessionEnded, SessionFenced, SwapdError
from swapd_client.leases.arrivals import Arrival, Arrivals
from swapd_client.leases.marks import Marks
from swapd_client.leases.record import Record
from swapd_client.log import log
from swapd_client.memory.part import Part
from swapd_client.session.life import Life
from swapd_client.session.processor import Processor, Work

DRAIN_S = 60.0


class Leases:
    """The leases of one session. Thread-safe."""

    def __init__(
        self,
        life: Life,
        processor: Processor,
        parts: Mapping[str, Part],
        arrivals: Arrivals,
        *,
        strict: bool,
    ) -> None:
        """`strict`: unmap components without a lease."""
        self._life = life
        self._lock = life.lock
        self._processor = processor
        self._parts = parts
        self._arrivals = arrivals
        self._strict = strict
        self._records: dict[int, Record] = {}
        #: Released leases that wait for GPU work, or that the daemon still counts as held.
        self._ending: set[int] = set()
        self.marks = Marks(processor, life)
        #: Whether nothing of the daemon is mapped any more, so that ends of leases change nothing.
        self.closed = False
        self._ended = threading.Condition(self._lock)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        """Iterate over the leases that the daemon counts as held."""
        with self._lock:
            return iter(list(self._records.values()))

    # --- from the grant on ---------------------------------------------------------------

    def held_by(self, agent: int) -> tuple[int, ...]:
        with self._lock:
            return tuple(r.id for r in self if r.agent == agent and r.state == "held")

    def in_use(self, kept: Collection[int] = ()) -> bool:
        """Whether a lease is held, beside those `kept` for later."""
        with self._lock:
            return any(r.state == "held" and r.id not in kept for r in self)

    def must_show(self, record: Record) -> bool:
        """Whether `show` would call a GPU's driver, or `bring_in` would block."""
        return self._processor.works_late and not all(
            self._parts[place.name].where.is_shown(place.generation)
            and self._arrivals.is_complete(place)
            for place in record.granted.placements
        )

    def add(self, record: Record) -> None:
        """Record a held lease. Raises the error that ended the session."""
        with self._lock:
            if self._life.error is not None:
                raise self._life.error.with_traceback(None)
            parts = [self._parts[place.name] for place in record.granted.placements]
            self._records[record.id] = record
            record.state = "held"
            record.outdated = any(record.id <= part.renewed for part in parts)
            for part, place in zip(parts, record.granted.placements, strict=True):
                part.placed = place
                part.holders.add(record.id)

    def show(self, record: Record) -> None:
        """Map the chunks of a granted lease. Bytes still loading need `Arrivals.wait` first.

        Raises: SessionEnded, DeviceFailed; the caller must still give the lease back.
        """
        try:
            for place in record.granted.placements:
                where = self._parts[place.name].where
                comes = record.granted.loaded and not self._arrivals.is_complete(place)
                (where.lend if comes else where.show)(place.generation, place.runs)
        except (SessionEnded, KeyError):
            self._life.check()  # raise the reason for the session's end instead
            raise

    def bring_in(self, record: Record, timeout_s: float | None = None) -> None:
        """As `show`, but block until all bytes are there. `timeout_s` is that of the whole acquire.

        Raises also: Timeout, or if `Arrivals.give_up` was called.
        """
        granted = record.granted
        arrival = Arrival(self._arrivals, record, timeout_s)
        try:
            placed = [(self._parts[place.name], place) for place in granted.placements]
            self._processor.bring_in(placed, arrival)
        except (SessionEnded, KeyError):
            self._life.check()
            raise
        if arrival.waited_s:
            waited_s = granted.waited_s + arrival.waited_s
            record.granted = msgspec.structs.replace(granted, waited_s=waited_s)

    def may_be_kept(self, record: Record) -> bool:
        """Whether a lease may stay held for a moment after its release, unknown to the daemon.

        Not under strict isolation, which unmaps components at the release; not if a component
        leaves the device then, or is still loading; and not for components of other sessions, which
        may be gone or replaced by the next acquire.
        """
        places = record.granted.placements
        if len(places) != len(set(record.granted.names or record.names)):
            return False
        if any(place.transient for place in places) or self._life.error is not None or self._strict:
            return False
        self._life.check()
        # what has come since the grant may not all be accessible
        return all(map(self._arrivals.is_complete, places)) and not self.must_show(record)

    def is_fresh(self, record: Record, name: str) -> bool:
        """Whether this scratch has lost its contents since the last call."""
        with self._lock:
            parts = [(self._parts.get(place.name), place) for place in record.granted.placements]
            of_it = [(part, place) for part, place in parts if part and part.is_of(name)]
            fresh = any(part.contents != place.contents for part, place in of_it)
            for part, place in of_it:
                part.contents = place.contents
        return fresh

    # --- to the end ----------------------------------------------------------------------

    def ends_later(self, record: Record, give_back: Callable[[Record], None]) -> bool:
        """Release the lease once the GPU work under it has finished.

        Returns False if the caller should release it now, or if the lease is over. Does not block.
        `give_back(record)` is called in a thread; after it returns, the daemon must handle the
        release before any later request of this process.
        """
        if self._life.left_to_parent:
            return False
        with self._lock:
            if record.state != "held":
                return record.state == "ending"
            work = self._work_under(record)
            if work is None:
                record.state = "released"
                return False
            record.state = "ending"
            self._ending.add(record.id)

        def end() -> None:
            try:
                if problem := self._arrivals.problem_with(record):
                    log.warning(
                        "a lease of %s ended, but its results are invalid, discard them: %s",
                        _listed(record.names),
                        problem,
                    )
                give_back(record)
            except Exception as exc:  # the thread must live on: other leases end there too
                trace = not isinstance(exc, SwapdError)
                names = _listed(record.names)
                log.warning("cannot end a lease of %s: %s", names, exc, exc_info=trace)
            finally:
                with self._lock:
                    self._ending.discard(record.id)
                    self._over(record)
                    self._ended.notify_all()

        self._processor.after(work, end)
        return True

    def _work_under(self, record: Record) -> Work | None:
        """Return GPU work that must end before the lease. Call it under the lock."""
        gone = self._life.error
        if gone is not None and (self.closed or not isinstance(gone, DaemonGone)):
            return None
        return self.marks.under(record)

    def give_back(self, record: Record) -> bool:
        """End a lease; return whether there is a daemon to tell.

        Raises: ClientClosed; SessionFenced if the daemon has ended the session: other processes may
        have used the memory for a moment.
        """
        if isinstance(self._life.error, SessionFenced):
            raise self._life.error.with_traceback(None)
        if self._life.error is not None:
            self.free_unused(record)
            return False
        self._life.check()
        with self._lock:  # an interrupt may end this anywhere: all of it may run again
            record.is_unmapped = self._strict
            for place in record.granted.placements:
                if (part := self._parts.get(place.name)) is not None:
                    part.holders.discard(record.id)
                    hides = self._strict and not part.holders and self._life.error is None
                    hidden = hides and _hide(self._processor, part, place)
                    record.is_unmapped &= hidden and place.transient
            self._over(record)
        return not record.told

    def _over(self, record: Record) -> None:
        record.state = "over"
        self._records.pop(record.id, None)

    def free_unused(self, ended: Record | None = None) -> None:
        """After the daemon's death: free its memory that no lease uses, where memory is scarce."""
        with self._lock:
            if self.closed or not isinstance(self._life.error, DaemonGone):
                return
            if ended is not None:
                for part in self._parts.values():
                    part.holders.discard(ended.id)
            self._processor.free_unused(self._parts.values())

    def release_of(self, record: Record) -> Release:
        """Return the message that ends a lease, with the part of its scratch to save."""
        if record.release is None:
            parts = [self._parts.get(place.name) for place in record.granted.placements]
            to_tell = [part for part in parts if part is not None and part.used is not None]
            record.release = _release(record, tuple(p.used_in(len(parts)) for p in to_tell))
            for part in to_tell:
                part.used = None
        return record.release

    def offer_of(self, record: Record) -> Release | None:
        """Return the message that ends a kept lease if another request needs a load.

        None if its GPU work is not done, or the daemon must know which scratch to save. Otherwise
        the lease no longer holds its components here: the daemon may revoke them before its reply
        comes.
        """
        with self._lock:
            parts = [self._parts.get(place.name) for place in record.granted.placements]
            if any(part is None or part.used is not None for part in parts):
                return None
            if self._work_under(record) is not None:
                return None
            for part in filter(None, parts):
                part.holders.discard(record.id)
        return _release(record)

    def exchanged(self, record: Record) -> Release:
        """End a lease for another one that takes its room; return the message that ends it.

        Blocks until the GPU work under it is done. Raises as `give_back`.
        """
        with self._lock:
            work = self._work_under(record)
        if work is not None:
            done = threading.Event()
            self._processor.after(work, done.set)
            done.wait()
        with self._lock:
            record.state = "released"  # even without a daemon to tell
        self.give_back(record)
        return self.release_of(record)

    def hold_again(self, record: Record) -> None:
        with self._lock:
            for place in record.granted.placements:
                if (part := self._parts.get(place.name)) is not None:
                    part.holders.add(record.id)

    def is_ending(self, lease: int) -> bool:
        with self._lock:
            return lease in self._ending

    def await_end(self, lease: int) -> None:
        with self._lock:
            self._ended.wait_for(lambda: lease not in self._ending)

    def drain(self) -> None:
        if not self._processor.drain(DRAIN_S):
            log.warning(
                "GPU work under released leases (of %s) did not end within %g s: the "
                "client closes all the same, and the work's results are invalid",
                _listed({name for record in self for name in record.names}),
                DRAIN_S,
            )

    # --- what happens to all of them -----------------------------------------------------

    def renewed(self, name: str) -> None:
        """Mark the component's leases: they hold the old bytes. Under the lock."""
        for record in self:
            record.outdated |= record.holds(name)

    def cut(self) -> None:
        """Note which leases' streams go on without their words: the session ends."""
        for record in self:
            record.cut |= not all(map(self._arrivals.is_there, record.awaited))


def _hide(processor: Processor, part: Part, place: Placement) -> bool:
    """Unmap or hide a component; False on failure, or if a signal handler has acquired it."""
    hide = part.where.revoke if place.transient else part.where.hide
    hidden = processor.attempt(hide, place.generation)
    if part.holders:
        part.where.show(place.generation, place.runs)
    return hidden and not part.holders


def _release(record: Record, used: tuple[UsedRanges, ...] = ()) -> Release:
    idle_s = min(max(time.monotonic() - record.since, 0.0), PAST_MAX_S)
    gap_s = max(record.gap_s, 0.0) if record.again and record.gap_s < PAST_MAX_S else None
    return Release(
        record.id,
        record.id,
        again=record.again,
        used=used,
        idle_s=idle_s,
        gap_s=gap_s,
        unmapped=record.is_unmapped,
    )


def _listed(names: Iterable[str]) -> str:
    said = [repr(name) for name in sorted(names)]
    return ", ".join(said[:3] + [f"{len(said) - 3} more"] * (len(said) > 3)) or "nothing"
