"""The leases of one session: what `book.py` says of them, done.

Lives here: chunks that come behind ranges and leave them as leases come and go, waits for arrival,
ends that wait for a GPU, in threads. May not live here: messages to the daemon, which each client
sends in its own way.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from math import inf

import msgspec

from swapd.shared.board import ARRIVED, LANDED, ArrivalFailed, Board, word
from swapd.shared.protocol import Granted, Placement, Release
from swapd.shared.units import size
from swapd_client.errors import (
    AcquireTimeout,
    DeviceFailed,
    SessionEnded,
    SessionFenced,
    SwapdError,
)
from swapd_client.leases.agents import Agent
from swapd_client.leases.book import Book, Record, Word
from swapd_client.leases.keeping import End
from swapd_client.memory.part import Part
from swapd_client.session.life import Life
from swapd_client.session.processor import Processor, Work

log = logging.getLogger("swapd_client")

#: How long a client that closes waits for GPU work under leases that were released.
DRAIN_S = 60.0


class Leases:
    """Thread-safe."""

    def __init__(
        self,
        life: Life,
        processor: Processor,
        board: Board,
        parts: Mapping[str, Part],
        *,
        strict: bool,
    ) -> None:
        """`parts`: what the process has registered, by name. `strict`: what nobody holds may not
        be touched."""
        self._life = life
        self._lock = life.lock
        self._processor = processor
        self._board = board
        self._parts = parts
        self._strict = strict
        self._book = Book()
        #: Told when a lease ends that waited for the GPU.
        self._ended = threading.Condition(self._lock)
        #: Why a residency that was granted early will never be complete.
        self._broken: dict[tuple[str, int], str] = {}

    def __len__(self) -> int:
        return len(self._book)

    def __iter__(self) -> Iterator[Record]:
        """What the daemon granted, and was not told the end of."""
        with self._lock:
            return iter(self._book)

    # --- from the grant on ---------------------------------------------------------------

    def enter(self, who: int, timeout_s: float | None = None) -> Agent:
        """Who the thread or task `who` is in its next acquire.

        Who holds a lease stays who it was; and as it then would seem to hold what it has
        released as well, this blocks until that has ended. Raises: AcquireTimeout.
        """
        with self._ended:
            agent = self._book.agents.of(who)
            if agent.ending and not self._ended.wait_for(lambda: not agent.ending, timeout_s):
                late = [r for r in self._book if r.agent is agent and r.state == "ending"]
                ending = {name for record in late for name in record.names}
                raise AcquireTimeout(
                    f"GPU work under a lease that was released (of {_listed(ending)}) does not end "
                    f"within {timeout_s:g} s; until it has, who holds another lease cannot acquire "
                    "more. Give timeout= longer, or see what that work waits for"
                )
            return agent

    def must_wait(self, who: int) -> bool:
        """Whether `enter` would block."""
        with self._lock:
            return self._book.agents.of(who).ending > 0

    def must_show(self, record: Record) -> bool:
        """Whether `show` would make calls of a GPU's driver, or `bring_in` would block."""
        return self._processor.works_late and not all(
            self._parts[place.name].where.is_shown(place.generation) and self.is_complete(place)
            for place in record.granted.placements
        )

    def record(
        self, granted: Granted, names: tuple[str, ...], agent: Agent, *, is_workspace: bool = False
    ) -> Record:
        """What there is to know of a lease that was granted; `names`: what was asked for."""
        at_once = not (is_workspace or self._processor.works_late)
        return Record(granted, names, agent, is_workspace=is_workspace, ends_at_once=at_once)

    def add(self, record: Record) -> None:
        """It is held. Raises what ended the session."""
        with self._lock:
            if self._life.error is not None:
                # whether all of it had come in by then was not looked at
                raise self._life.error.with_traceback(None)
            places = record.granted.placements
            self._book.granted(record, [self._parts[place.name].renewed for place in places])
            for place in places:
                part = self._parts[place.name]
                part.placed = place
                part.holders += 1

    def show(self, record: Record) -> None:
        """Put the chunks of what was granted behind its ranges.

        Raises: SessionEnded, DeviceFailed; then the lease is still to be given back.
        """
        try:
            for place in record.granted.placements:
                self._parts[place.name].where.show(place.generation, place.runs)
        except SessionEnded:
            self._life.check()  # why the session ended, rather than what did not come by it
            raise

    def bring_in(self, record: Record, timeout_s: float | None = None) -> None:
        """As `show`, of what was granted while it is copied: blocks until all bytes are there, and
        nothing of it can be touched before.

        `timeout_s`: of the whole acquire. Raises also: AcquireTimeout, or if `give_up` was called.
        """
        granted = record.granted
        placed = [(self._parts[place.name], place) for place in granted.placements]
        arrival = _Arrival(self, self._board, record, timeout_s)
        try:
            self._processor.bring_in(placed, arrival)
        except SessionEnded:
            self._life.check()
            raise
        if arrival.waited_s:
            waited_s = granted.waited_s + arrival.waited_s
            record.granted = msgspec.structs.replace(granted, waited_s=waited_s)

    def give_up(self, record: Record) -> None:
        """Have `bring_in` end, in another thread."""
        record.given_up = True
        for place in record.granted.placements:
            self._board.wake(self._parts[place.name].slot)

    def may_be_kept(self, record: Record) -> bool:
        """Whether a lease may stay held for a moment after its release, unseen by the daemon.

        Asked when it is granted. Not under strict isolation, where nothing may be touched from
        its release on; not if something it was granted early still comes in; and not of what
        other sessions own, which may be gone or another when it is taken again.
        """
        places = record.granted.placements
        if len(places) != len(set(record.granted.names or record.names)):
            return False
        if self._life.error is not None or self._strict:
            return False
        self._life.check()
        return all(self.is_complete(place) for place in places)

    def is_fresh(self, record: Record, name: str) -> bool:
        """Whether the contents of scratch in it began anew since this was asked last."""
        with self._lock:
            parts = [(self._parts.get(place.name), place) for place in record.granted.placements]
            of_it = [(part, place) for part, place in parts if part and part.is_of(name)]
            fresh = any(part.contents != place.contents for part, place in of_it)
            for part, place in of_it:
                part.contents = place.contents
        return fresh

    # --- waits ---------------------------------------------------------------------------

    def wait(
        self, record: Record, name: str, segment: int | None, stream: int | None = None
    ) -> None:
        """Block until a segment of a granted component, or all of it, is on the device.

        With `stream` it is the stream that waits, if the GPU can. Raises: DeviceFailed if it
        never will be; what ended the session.
        """
        for place in record.granted.placements:
            part = self._parts.get(place.name)
            if part is None:
                self._life.check()
                continue  # it is private memory again
            if not part.is_of(name):
                continue
            arrived = part.segments if segment is None else segment + 1
            awaited = part.slot, word(place.generation, arrived)
            try:
                if stream is None or not self._wait_on(stream, record, awaited):
                    self._board.wait(*awaited)
            except ArrivalFailed:
                raise self.not_arrived(part.name, place.generation) from None
        # whatever is not this session's was complete when it was granted

    def _wait_on(self, stream: int, record: Record, awaited: Word) -> bool:
        """Have the stream wait, unless there is nothing to wait for; False if it cannot."""
        if not self._processor.works_late:
            return False
        with self._lock:  # before the word is looked at: who ends the session sees it
            record.awaited.append(awaited)
        return self._board.has(*awaited) or self._processor.wait_on(stream, *awaited)

    def is_complete(self, place: Placement) -> bool:
        """Whether all of it has come in there."""
        part = self._parts[place.name]
        return self._is_there((part.slot, word(place.generation, part.segments)))

    def _is_there(self, awaited: Word) -> bool:
        with suppress(ArrivalFailed):
            return self._board.has(*awaited)
        return False

    def broken(self, name: str, generation: int, why: str) -> None:
        """It will never come in. Said before the word on the board ends the waits."""
        self._broken[name, generation] = why

    def not_arrived(self, name: str, generation: int) -> SwapdError:
        """Why it did not."""
        if self._life.error is not None:
            return self._life.error
        why = self._broken.get((name, generation), "this lease is over")
        return DeviceFailed(
            f"{name!r} did not come in: {why}. Release the lease, then acquire it anew"
        )

    def problem_with(self, record: Record) -> SwapdError | None:
        """Why what was computed under a lease is not to be used; None if nothing is known."""
        for place in record.granted.placements:
            if (place.name, place.generation) in self._broken:
                return self.not_arrived(place.name, place.generation)
        error = self._life.error
        return error if record.cut or isinstance(error, SessionFenced) else None

    # --- to the end ----------------------------------------------------------------------

    def current_streams(self) -> tuple[int, ...]:
        """The stream of a GPU on which this thread works; none on the host."""
        return self._processor.current_streams()

    def mark(self, record: Record) -> None:
        """Note what the GPU was asked to do under a lease by now, on the current stream and on
        those that it names. Does not block.

        From now on no stream is asked, for it may be destroyed: events tell. So none is named any
        more, and a lease that is kept and taken again waits for the work of all its steps.
        """
        streams = dict.fromkeys((*record.streams, *self.current_streams()))
        record.streams.clear()
        record.work = (
            None if self._life.left_to_parent else self._processor.mark(streams, record.work)
        )

    def ends_later(
        self,
        record: Record,
        give_back: Callable[[Record], None],
        linger: Callable[[Work, End], None] | None = None,
    ) -> bool:
        """Have a lease given back once the work under it is done; False if that is now, or is over.

        `give_back(record)` is called in a thread of the session's, and returns when the daemon
        knows it before anything this process asks later. `linger(work, end)` sees to it in another
        way that `end` is called then, if the lease lingers and whoever had it holds nothing else:
        or it would wait for that before it asks for more. Does not block.
        """
        if self._life.left_to_parent:
            return False
        with self._lock:
            if record.state != "held":
                return record.state == "ending"
            work = record.work if self._life.error is None else None
            self._book.released(record, late=work is not None)
            lingers = record.lingers and not record.agent.held
        if work is None:
            return False

        def end(here: Callable[[Record], None] | None = None) -> None:
            try:
                if problem := self.problem_with(record):
                    log.warning(
                        "a lease of %s ended, and what was computed under it is void, discard it: "
                        "%s",
                        _listed(record.names),
                        problem,
                    )
                (here or give_back)(record)
            except SwapdError as exc:
                log.warning("the end of a lease of %s: %s", _listed(record.names), exc)
            except Exception:  # its thread must live: others' leases end there too
                log.exception(
                    "a lease of %s could not be given back, and nobody else gets that memory until "
                    "this client is closed",
                    _listed(record.names),
                )
            finally:
                with self._ended:
                    self._book.ended(record)
                    self._ended.notify_all()

        if linger is not None and lingers:
            linger(work, end)
        else:
            self._processor.after(work, end)
        return True

    def give_back(self, record: Record) -> bool:
        """A lease ends here; whether there is a daemon to be told.

        Raises: SessionFenced if it ended before, because the daemon had ended the session:
        for a moment others may have had the memory. ForkedClient.
        """
        if isinstance(self._life.error, SessionFenced):
            raise self._life.error.with_traceback(None)
        if self._life.error is not None:
            return False
        self._life.check()
        with self._lock:
            if record.state == "over":
                return False
            places = record.granted.placements if self._book.over(record) else ()
            for place in places:
                if (part := self._parts.get(place.name)) is not None:
                    part.holders -= 1
                    if self._strict and not part.holders and self._life.error is None:
                        self._processor.attempt(part.where.hide, place.generation)
        return True

    def release_of(self, record: Record, number: int, *, ack: bool = False) -> Release:
        """What tells the daemon that a lease ends, and what of its scratch is worth saving."""
        used = []
        for place in record.granted.placements:
            part = self._parts.get(place.name)
            if part is not None and part.used is not None:
                used.append(part.used_in(len(record.granted.placements)))
                part.used = None
        return Release(number, record.id, ack, record.again, tuple(used))

    def is_ending(self, lease: int) -> bool:
        """Whether a lease that was released waits for its GPU work."""
        with self._lock:
            return self._book.is_ending(lease)

    def await_end(self, lease: int) -> None:
        """Block until the GPU work of a lease that was released is done."""
        with self._ended:
            self._ended.wait_for(lambda: not self._book.is_ending(lease))

    def drain(self) -> None:
        """Wait until the GPU work of released leases is done, but not for ever."""
        if not self._processor.drain(DRAIN_S):
            log.warning(
                "GPU work under leases that were released (of %s) does not end within %g s: the "
                "client closes all the same, and what it computes is void. %s",
                _listed({name for record in self for name in record.names}),
                DRAIN_S,
                self._processor,
            )

    # --- what happens to all of them -----------------------------------------------------

    def renewed(self, name: str) -> None:
        """An update took place: leases are on the old bytes. Under the lock."""
        self._book.renewed(name)

    def cut(self) -> None:
        """The session ends. Under the lock."""
        self._book.cut(self._is_there)


def _listed(names: Iterable[str]) -> str:
    """A few of them, for people."""
    said = [repr(name) for name in sorted(names)]
    return ", ".join(said[:3] + [f"{len(said) - 3} more"] * (len(said) > 3)) or "nothing"


class _Arrival:
    """What the board says of one lease, to one thread. See `processor.Arrival`."""

    def __init__(
        self, leases: Leases, board: Board, record: Record, timeout_s: float | None
    ) -> None:
        self._leases = leases
        self._board = board
        self._record = record
        self._began = time.monotonic()
        left = inf if timeout_s is None else timeout_s - record.granted.waited_s
        self._until = self._began + left
        #: Since the grant.
        self.waited_s = 0.0

    def has_come(self, part: Part, place: Placement) -> bool:
        return self._leases.is_complete(place)

    def wait(self, part: Part, place: Placement, chunks: int | None) -> None:
        which = ARRIVED if chunks is None else LANDED
        target = word(place.generation, part.segments if chunks is None else chunks, which)
        try:
            came = self._board.wait(
                part.slot, target, which, until=self._until, unless=self._is_given_up
            )
        except ArrivalFailed:
            raise self._leases.not_arrived(part.name, place.generation) from None
        self.waited_s = time.monotonic() - self._began
        if not came:
            raise AcquireTimeout(
                f"{part.name!r} ({size(part.nbytes)}) is being copied in, and not all of it has "
                "come by the end of the timeout: give it longer, or acquire(early=True)"
            )

    def _is_given_up(self) -> bool:
        return self._record.given_up
