"""Whether granted bytes have arrived, and the waits for them, on the daemon's board."""

import time
from collections.abc import Mapping
from math import inf

from swapd.shared.board import ARRIVED, LANDED, ArrivalFailed, Board, word
from swapd.shared.protocol import Broken, Placement
from swapd.shared.text import counted
from swapd.shared.units import size
from swapd_client.errors import (
    DaemonGone,
    DeviceFailed,
    InvalidArgument,
    SessionFenced,
    SwapdError,
    Timeout,
)
from swapd_client.leases.record import Record, Word
from swapd_client.memory.part import Part
from swapd_client.session.life import Life
from swapd_client.session.processor import Processor


class Arrivals:
    def __init__(
        self, life: Life, processor: Processor, board: Board, parts: Mapping[str, Part]
    ) -> None:
        self._life = life
        self._lock = life.lock
        self._processor = processor
        self.board = board
        self._parts = parts
        #: Why a residency that was granted early will never be complete.
        self._broken: dict[tuple[str, int], str] = {}

    def give_up(self, record: Record) -> None:
        """End the waits of another thread's `Arrival`."""
        record.given_up = True
        for place in record.granted.placements:
            self.board.wake(self._parts[place.name].slot)

    def wait(
        self, record: Record, name: str, segment: int | None, stream: int | None = None
    ) -> None:
        """Block until a segment of a granted component, or all of it, is on the device.

        With `stream`, that stream waits instead, if the GPU can. Raises: DeviceFailed if the bytes
        never come, or cannot be made accessible; InvalidArgument if there is no such segment; the
        error that ended the session.
        """
        for place in record.granted.placements:
            part = self._parts.get(place.name)
            if part is None:
                self._life.check()
                continue  # unregistered: private memory now
            if not part.is_of(name):
                continue
            arrived = _awaited(part, segment)
            ends = part.layout.segments[:arrived]
            part.where.reach(place.generation, ends[-1] if ends else 0)
            awaited = part.slot, word(place.generation, arrived)
            try:
                if stream is None or not self._wait_on(stream, record, awaited):
                    self.board.wait(*awaited)
            except ArrivalFailed:
                if not self._had_all(part, place):
                    raise self.not_arrived(part.name, place.generation) from None
        # components of other sessions were complete at the grant

    def _had_all(self, part: Part, place: Placement) -> bool:
        """Whether all of it had arrived when the daemon died: its holders compute on."""
        gone = isinstance(self._life.error, DaemonGone)
        return gone and part.placed == place and not part.incomplete

    def _wait_on(self, stream: int, record: Record, awaited: Word) -> bool:
        """Make the stream wait, or return False if it cannot."""
        if not self._processor.works_late:
            return False
        with self._lock:  # before the word is read, so that the end of the session sees it
            record.awaited.append(awaited)
        return self.board.has(*awaited) or self._processor.wait_on(stream, *awaited)

    def is_complete(self, place: Placement) -> bool:
        """Whether all of it has arrived; False if it is private memory again."""
        part = self._parts.get(place.name)
        if part is None:
            return False
        return self.is_there((part.slot, word(place.generation, part.segments)))

    def is_there(self, awaited: Word) -> bool:
        try:
            return self.board.has(*awaited)
        except ArrivalFailed:
            return False

    def broken(self, message: Broken) -> None:
        """Note that a component will never arrive, and end the waits for it."""
        self._broken[message.name, message.generation] = message.why  # first: waits raise it
        if part := self._parts.get(message.name):
            self.board.fail(part.slot, message.generation)

    def not_arrived(self, name: str, generation: int) -> SwapdError:
        if self._life.error is not None:
            return self._life.error
        why = self._broken.get((name, generation), "this lease is over")
        return DeviceFailed(
            f"{name!r} was not loaded: {why}. Release the lease, then acquire it again"
        )

    def problem_with(self, record: Record) -> SwapdError | None:
        """Return why results computed under a lease are invalid, if a reason is known."""
        for place in record.granted.placements:
            if (place.name, place.generation) in self._broken:
                return self.not_arrived(place.name, place.generation)
        error = self._life.error
        return error if record.cut or isinstance(error, SessionFenced) else None


def _awaited(part: Part, segment: int | None) -> int:
    """Return how many segments have arrived once this one has; all: None."""
    if segment is None:
        return part.segments
    if not (isinstance(segment, int) and 0 <= segment < part.segments):
        raise InvalidArgument(
            f"segment={segment!r}: {part.name!r} arrives in {counted(part.segments, 'segment')}; "
            "give a number from 0 on, or None for all"
        )
    return segment + 1


class Arrival:
    def __init__(self, arrivals: Arrivals, record: Record, timeout_s: float | None) -> None:
        self._arrivals = arrivals
        self._record = record
        self.has_come = arrivals.is_complete
        self._began = time.monotonic()
        left = inf if timeout_s is None else timeout_s - record.granted.waited_s
        self._until = self._began + left
        #: Since the grant.
        self.waited_s = 0.0

    def wait(self, part: Part, place: Placement, chunks: int | None) -> None:
        which = ARRIVED if chunks is None else LANDED
        target = word(place.generation, part.segments if chunks is None else chunks, which)
        try:
            came = self._arrivals.board.wait(
                part.slot, target, which, until=self._until, unless=lambda: self._record.given_up
            )
        except ArrivalFailed:
            raise self._arrivals.not_arrived(part.name, place.generation) from None
        self.waited_s = time.monotonic() - self._began
        if not came:
            raise Timeout(
                f"{part.name!r} ({size(part.nbytes)}) is loading, and was not complete "
                "at the end of the timeout: give a longer one, or acquire(early=True)"
            )
