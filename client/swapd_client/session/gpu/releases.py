"""A lease ends when the GPU has done what it was asked to under it, and nobody waits for that.

What goes into a graph that is being captured is not done now, and is not waited for.

Lives here: events, and the threads that block on them. May not live here: what a lease is.

Work on one stream ends in the order in which it was asked for, so one thread for each stream
that is used is enough, and none holds up another. They start with the first release that has
to wait, and end when they have had nothing to do for a while. Where the system grants no more
threads, another stream's thread waits for the work, too, or the caller if there is none.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from swapd.device.driver import CudaError, Driver
from swapd_client.errors import DeviceFailed
from swapd_client.session.gpu.card import Card
from swapd_client.session.gpu.streams import LEGACY_DEFAULT

#: How long a thread stays that has nothing to wait for.
IDLE_S = 5.0
#: Events that are kept for the next release.
POOL = 64


#: Instead of a stream's number, without an event: all there is on the GPU, for what was named is no
#: stream; and what is on the default stream, of which nobody can tell while a capture is under way.
ALL, DEFAULT_LATER = -1, -2


class _Mark:
    """A place in a stream, which is named by its number and never asked again."""

    def __init__(self, stream: int, event: Any | None = None) -> None:
        self.stream = stream
        self.event = event


class GpuWork:
    """What the GPU was asked to do under a lease, up to its release; not all of it was done."""

    def __init__(self, releases: "Releases", marks: list[_Mark]) -> None:
        self.marks = marks
        self._releases = releases

    def is_pending(self) -> bool:
        """Whether the GPU is still at it, as far as can be told without waiting."""
        return self._releases.is_pending(self.marks)

    def is_over(self) -> bool:
        """Whether all of it is known to be done. Then nothing more may be asked of this."""
        return self._releases.is_over(self.marks)


class _Ending:
    """A lease that ends when all its marks were passed."""

    def __init__(self, marks: int, then: Callable[[], None]) -> None:
        self.left = marks
        self.then = then


class _Lane:
    """What the thread of a stream is to wait for, in this order."""

    def __init__(self, lock: threading.Lock) -> None:
        self.waiting: deque[tuple[_Mark, _Ending]] = deque()
        self.changed = threading.Condition(lock)


class Releases:
    """Calls what ends a lease when its work is done, in a thread. Thread-safe."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._lock = threading.Lock()
        self._lanes: dict[int, _Lane] = {}
        self._pending = 0
        self._none_pending = threading.Condition(self._lock)
        self._events: list[Any] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"<Releases {self._pending} pending on {len(self._lanes)} streams>"

    def mark(self, streams: Iterable[int], before: GpuWork | None = None) -> GpuWork | None:
        """What is on `streams` now, and what is left of `before`, which is over; None if all that
        is done. Streams may be destroyed afterwards: what is on them is told by events.

        Does not block, and raises nothing: if the GPU is lost for this process, its work is over.
        """
        try:
            with self._card.using() as driver:
                marks = self._marks(driver, streams, before.marks if before else ())
        except DeviceFailed as exc:
            self._card.complain(exc)
            return None
        return GpuWork(self, marks) if marks else None

    def after(self, work: GpuWork, then: Callable[[], None]) -> None:
        """Call `then` in a thread when `work` is done. Blocks until then if there is no thread."""
        ending = _Ending(len(work.marks), then)
        with self._lock:
            self._pending += 1
        for mark in work.marks:
            if not self._hand_over(mark, ending):
                self._see_over(mark, ending)

    def is_pending(self, marks: Iterable[_Mark]) -> bool:
        """Whether one of the marks was not passed; of one without an event nobody can tell."""
        try:
            with self._card.using() as driver:
                return any(m.event is not None and not driver.query(m.event) for m in marks)
        except DeviceFailed:
            return False

    def is_over(self, marks: Iterable[_Mark]) -> bool:
        """Whether all marks are known to be passed; then their events are others'."""
        try:
            with self._card.using() as driver:
                if not all(m.event is not None and driver.query(m.event) for m in marks):
                    return False
                for mark in marks:
                    self._give(driver, mark.event)
        except DeviceFailed:
            return False  # a thread that waits for it hears so, too, and says it
        return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is pending; whether that came about."""
        with self._lock:
            return self._none_pending.wait_for(lambda: not self._pending, timeout_s)

    def close(self) -> bool:
        """End the threads as soon as they have nothing to wait for; whether that is now."""
        with self._lock:
            self._closed = True
            for lane in self._lanes.values():
                lane.changed.notify()
            events, self._events = self._events, []
            done = not self._pending
        if events:
            with suppress(DeviceFailed), self._card.using() as driver:
                for event in events:
                    driver.destroy_event(event)
        return done

    # --- marks ---------------------------------------------------------------------------

    def _marks(
        self, driver: Driver, streams: Iterable[int], before: Iterable[_Mark]
    ) -> list[_Mark]:
        """One for each stream that is not idle: the latest, for its work ends in order."""
        marks: dict[int, _Mark] = {}
        for mark in before:
            if mark.event is None or not driver.query(mark.event):
                marks[mark.stream] = mark
            else:
                self._give(driver, mark.event)
        for stream in streams:
            latest = self._mark(driver, stream)
            if latest is not None:
                former = marks.get(latest.stream)
                if former is not None and former.event is not None:
                    self._give(driver, former.event)
                marks[latest.stream] = latest
        return list(marks.values())

    def _mark(self, driver: Driver, stream: int) -> _Mark | None:
        """Where the stream is now; None if it is idle. What captures is not asked, and what it is
        given is not done now."""
        try:
            if driver.is_capturing(stream) or driver.is_idle(stream):
                return None
            number = driver.stream_id(stream)
            event = self._take(driver)
            driver.record(event, stream)
            return _Mark(number, event)
        except CudaError as exc:
            if not exc.of_a_capture:
                return _Mark(ALL)
            return _Mark(DEFAULT_LATER) if stream == LEGACY_DEFAULT else None

    def _take(self, driver: Driver) -> Any:
        with self._lock:
            if self._events:
                return self._events.pop()
        return driver.event()

    def _give(self, driver: Driver, event: Any) -> None:
        with self._lock:
            if not self._closed and len(self._events) < POOL:
                self._events.append(event)
                return
        driver.destroy_event(event)

    # --- threads -------------------------------------------------------------------------

    def _hand_over(self, mark: _Mark, ending: _Ending) -> bool:
        """Have a thread wait for it; False if there is none."""
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
            thread.start()
        except (RuntimeError, MemoryError):  # this process may have no more
            return next(iter(self._lanes.values()), None)
        self._lanes[stream] = lane
        return lane

    def _run(self, stream: int, lane: _Lane) -> None:
        while (item := self._next(stream, lane)) is not None:
            self._see_over(*item)

    def _next(self, stream: int, lane: _Lane) -> tuple[_Mark, _Ending] | None:
        """The work to wait for; None if the thread is to end."""
        with self._lock:
            lane.changed.wait_for(lambda: lane.waiting or self._closed, IDLE_S)
            if lane.waiting:
                return lane.waiting.popleft()
            del self._lanes[stream]
            return None

    def _see_over(self, mark: _Mark, ending: _Ending) -> None:
        """Wait for the mark, and end the lease if it was the last."""
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
            with self._card.using() as driver:
                if mark.stream == ALL:
                    driver.settle()
                    return
                event = mark.event or self._recorded_late(driver)
                driver.synchronize(event)
                self._give(driver, event)
        except DeviceFailed as exc:
            self._card.complain(exc)  # then no work of this process is left

    def _recorded_late(self, driver: Driver) -> Any:
        """An event on the default stream, once no stream captures that it would wait for."""
        driver.after_captures(lambda: driver.is_capturing(LEGACY_DEFAULT))
        event = self._take(driver)
        driver.record(event, LEGACY_DEFAULT)
        return event
