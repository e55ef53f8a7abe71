"""Ends leases after the GPU work queued under them, without blocking their holders.

Work captured into a graph does not run now, so nothing waits for it. Work on one stream ends in
order, so one thread for each used stream is enough; it ends when it has been idle for a while. If
the system grants no thread, another stream's thread waits for the work, or the caller.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from swapd.device.context import CudaError
from swapd.device.driver import Driver
from swapd.shared.system import LimitError, start
from swapd_client.errors import DeviceFailed
from swapd_client.session.gpu.card import Card
from swapd_client.session.gpu.streams import LEGACY_DEFAULT

IDLE_S = 5.0

#: Stream numbers of marks without an event. ALL: everything, because the handle is no stream. LATER
#: - handle: a stream that could not be queried during a capture.
ALL, LATER = -1, -2


class _Mark(NamedTuple):
    """A point in a stream's work. With an event, the stream itself is not used again."""

    stream: int
    event: Any | None = None


class GpuWork:
    def __init__(self, releases: "Releases", marks: list[_Mark]) -> None:
        self.marks = marks
        self._releases = releases

    def is_pending(self) -> bool:
        """Marks without an event do not count."""
        try:
            with self._releases.card.using() as driver:
                return any(m.event is not None and not driver.query(m.event) for m in self.marks)
        except DeviceFailed:
            return False

    def is_over(self) -> bool:
        """If so, the events are used again."""
        try:
            with self._releases.card.using() as driver:
                if not all(m.event is not None and driver.query(m.event) for m in self.marks):
                    return False
                for mark in self.marks:
                    self._releases.give(mark.event)
        except DeviceFailed:
            return False  # the waiting thread gets and reports the same error
        return True


@dataclass(slots=True)
class _LeaseEnd:
    """A lease that ends when all its marks have passed."""

    left: int
    then: Callable[[], None]


class _Lane:
    """The marks that the thread of a stream waits for, in order."""

    def __init__(self, lock: threading.Lock) -> None:
        self.waiting: deque[tuple[_Mark, _LeaseEnd]] = deque()
        self.changed = threading.Condition(lock)


class Releases:
    """Ends leases when their work is done, in threads. Thread-safe."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self._lock = threading.Lock()
        self._lanes: dict[int, _Lane] = {}
        self._pending = 0
        self._none_pending = threading.Condition(self._lock)
        #: For later marks: as many as were in use at once.
        self._events: list[Any] = []
        self._closed = False

    def mark(
        self, streams: Iterable[int], before: GpuWork | None, queued: Collection[int]
    ) -> GpuWork | None:
        """As `Processor.mark`. Raises nothing: if the GPU is lost, its work is over.

        Streams may be destroyed afterwards, because events are used. Those of `queued` may not:
        they may be capturing by now.
        """
        try:
            with self.card.using() as driver:
                marks = self._marks(driver, streams, before.marks if before else (), queued)
        except DeviceFailed as exc:
            self.card.complain(exc)
            return None
        return GpuWork(self, marks) if marks else None

    def everything(self) -> GpuWork:
        return GpuWork(self, [_Mark(ALL)])

    def after(self, work: GpuWork, then: Callable[[], None]) -> None:
        """Call `then` in a thread when `work` is done; block until then if there is no thread."""
        ending = _LeaseEnd(len(work.marks), then)
        with self._lock:
            self._pending += 1
        for mark in work.marks:
            if not self._hand_over(mark, ending):
                self._see_over(mark, ending)

    def drain(self, timeout_s: float) -> bool:
        with self._lock:
            return self._none_pending.wait_for(lambda: not self._pending, timeout_s)

    def close(self) -> bool:
        """End the threads once they are idle; return whether they are now."""
        with self._lock:
            self._closed = True
            for lane in self._lanes.values():
                lane.changed.notify()
            events, self._events = self._events, []
            done = not self._pending
        if events:
            with suppress(DeviceFailed), self.card.using() as driver:
                for event in events:
                    driver.destroy_event(event)
        return done

    # --- marks ---------------------------------------------------------------------------

    def _marks(
        self,
        driver: Driver,
        streams: Iterable[int],
        before: Iterable[_Mark],
        queued: Collection[int],
    ) -> list[_Mark]:
        """Return the latest mark of each busy stream, whose work ends in order."""
        marks: dict[int, _Mark] = {}
        for mark in before:
            if mark.event is None or not driver.query(mark.event):
                marks[mark.stream] = mark
            else:
                self.give(mark.event)
        for stream in dict.fromkeys((*queued, *streams)):
            latest = self._mark(driver, stream, was_queued=stream in queued)
            if latest is not None:
                former = marks.get(latest.stream)
                if former is not None and former.event is not None:
                    self.give(former.event)
                marks[latest.stream] = latest
        return list(marks.values())

    def _mark(self, driver: Driver, stream: int, *, was_queued: bool) -> _Mark | None:
        """Return the stream's point; None if it is idle.

        A capturing stream is not queried: only work from before the capture runs.
        """
        has_work = was_queued or stream == LEGACY_DEFAULT
        later = _Mark(LATER - stream) if has_work else None  # if a capture is in the way
        try:
            if driver.is_capturing(stream):
                return later
            if driver.is_idle(stream):
                return None
            number = driver.stream_id(stream)
            event = self._take(driver)
            driver.record(event, stream)
            return _Mark(number, event)
        except CudaError as exc:
            return later if exc.of_a_capture else _Mark(ALL)

    def _take(self, driver: Driver) -> Any:
        with self._lock:
            if self._events:
                return self._events.pop()
        return driver.event()

    def give(self, event: Any) -> None:
        self._events.append(event)

    # --- threads -------------------------------------------------------------------------

    def _hand_over(self, mark: _Mark, ending: _LeaseEnd) -> bool:
        with self._lock:
            lane = self._lanes.get(mark.stream) or self._open(mark.stream)
            if lane is None:
                return False
            lane.waiting.append((mark, ending))
            lane.changed.notify()
            return True

    def _open(self, stream: int) -> _Lane | None:
        lane = _Lane(self._lock)
        name = f"swapd-release-{stream:#x}"
        thread = threading.Thread(target=self._run, args=(stream, lane), name=name, daemon=True)
        try:
            start(thread)
        except LimitError:
            return next(iter(self._lanes.values()), None)
        self._lanes[stream] = lane
        return lane

    def _run(self, stream: int, lane: _Lane) -> None:
        while (item := self._next(stream, lane)) is not None:
            self._see_over(*item)

    def _next(self, stream: int, lane: _Lane) -> tuple[_Mark, _LeaseEnd] | None:
        with self._lock:
            lane.changed.wait_for(lambda: lane.waiting or self._closed, IDLE_S)
            if lane.waiting:
                return lane.waiting.popleft()
            del self._lanes[stream]
            return None

    def _see_over(self, mark: _Mark, ending: _LeaseEnd) -> None:
        self._await(mark)
        with self._lock:
            ending.left -= 1
            last = not ending.left
        if last:
            try:
                ending.then()
            finally:
                with self._lock:
                    self._pending -= 1
                    self._none_pending.notify_all()

    def _await(self, mark: _Mark) -> None:
        try:
            with self.card.using() as driver:
                if mark.stream == ALL:
                    driver.settle()
                    return
                event = mark.event or self._recorded_late(driver, LATER - mark.stream)
                driver.synchronize(event)
                self.give(event)
        except DeviceFailed as exc:
            self.card.complain(exc)  # then no work of this process is left

    def _recorded_late(self, driver: Driver, stream: int) -> Any:
        """Record an event once that disturbs no capture."""
        driver.after_captures(lambda: driver.is_capturing(stream))
        event = self._take(driver)
        driver.record(event, stream)
        return event
