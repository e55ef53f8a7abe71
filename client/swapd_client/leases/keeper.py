"""The kept leases of one client's loops, and the thread that gives them back.

`keeping.py` has the rules. A kept lease is given back within 2 SWEEP_S. It is given back within
LINGER_S if an acquire waits for memory, or if a component of the lease leaves the device then. It
is given back at once if an acquire waits for one of its components, or if its agent sends any other
request.

A running loop never wakes this thread, because that would take the GIL from the loop: the loop
moves the alarm once in SWEEP_S. Nor does a loop that uses several components in turn wake the
threads that wait for a GPU. It ends by itself the leases that it released before their GPU work was
done. If it stops, a thread waits for that work within 2 BACK_S.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf

import msgspec

from swapd.shared.limits import LimitError, start
from swapd.shared.system import Alarm
from swapd_client.errors import SwapdError
from swapd_client.leases.book import Record
from swapd_client.leases.keeping import End, Key, LoopKeeping, Told, WorkKeeping
from swapd_client.session.processor import Work


class Keeper:
    """Thread-safe. The thread starts with the first kept lease."""

    def __init__(
        self,
        told: Told,
        give_back: Callable[[Record], None],
        after: Callable[[Work, End], None],
    ) -> None:
        """Make the keeper of one client.

        `told` may change at any time; `hurry` is called after that. `give_back(record)` ends a
        lease, from any thread; when it returns, the daemon knows, or will know after the GPU work.
        `after(work, end)` makes a thread wait for work, and call `end()`.
        """
        self._give_back = give_back
        self._after = after
        self._loops = LoopKeeping(told)
        self._work = WorkKeeping(told)
        self._lock = threading.RLock()  # re-entrant: a signal handler may acquire
        self._alarm = Alarm()
        #: Time at which the alarm goes off. Setting it is the loop's highest cost, so it is set
        #: rarely.
        self._goes_off = inf
        #: Whether the alarm was rung; setting it since then must not silence it.
        self._rung = False
        self._thread: threading.Thread | None = None
        self._closed = False

    def __bool__(self) -> bool:
        """Whether any lease is kept."""
        return bool(self._loops)

    def take(self, key: Key) -> Record | None:
        """Hold again the lease that `key` just gave back; None if there is none."""
        with self._lock:
            record = self._loops.take(key, time.monotonic())
        if record is None:
            return None
        granted = record.granted
        if granted.waited_s or granted.loaded:  # these are of the first grant
            record.granted = msgspec.structs.replace(granted, waited_s=0.0, loaded=False)
        return record

    def keep(self, key: Key, record: Record) -> bool:
        """Keep a lease that is given back; False if the daemon must be told now."""
        now = time.monotonic()
        with self._lock:
            if self._closed or not self._loops.keep(key, record, now):
                return False
            self._arm(now)
        return True

    def linger(self, work: Work, end: End) -> None:
        """After this thread gave back a lease before its GPU work was done: `end` it when it is."""
        now = time.monotonic()
        with self._lock:
            if not self._closed and self._work.keep(threading.get_ident(), work, end, now):
                self._arm(now)
                return
        self._after(work, end)

    def returned(self) -> list[End]:
        """Before this thread acquires: the ends of its leases whose GPU work is done."""
        with self._lock:
            return self._work.returned(threading.get_ident(), time.monotonic())

    def hand_over(self) -> None:
        """Before another request of this thread: let a thread wait for this thread's GPU work."""
        if self._work:
            with self._lock:
                self._wait_for(self._work.of(threading.get_ident()))

    def _arm(self, now: float) -> None:
        """Set the alarm for the next wake-up, unless it is set so already. Without a thread that
        could wake up, give everything back.
        """
        wakes = min(self._loops.wakes, self._work.wakes)
        if wakes == self._goes_off:
            return
        if self._thread is None and not self._start():
            self._end(self._loops.all())
            self._wait_for(self._work.all())
            return
        self._goes_off = wakes
        self._alarm.set(self._goes_off - now)
        if self._rung:
            self._alarm.ring()

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="swapd-keeper", daemon=True)
        try:
            start(thread)
        except LimitError:
            return False
        self._thread = thread
        return True

    def pop(self, thread: int) -> list[Record]:
        """The leases that a thread keeps, for it to end before its next request."""
        with self._lock:  # when this returns, another thread's running end is done
            return self._loops.of(thread)

    def flush_all(self) -> None:
        with self._lock:
            self._end(self._loops.all())
            self._wait_for(self._work.all())

    def hurry(self) -> None:
        """An acquire waits for components that may be kept here. Does not block."""
        if self._loops or self._work:
            self._rung = True
            with suppress(ValueError):  # closed meanwhile: all leases were given back
                self._alarm.ring()

    def forget(self, error: SwapdError) -> None:
        """After the session ended, with all leases: end leases without a message."""
        self._give_back = _tell_nobody

    def close(self) -> None:
        """Give everything back, and keep nothing any more. A second call is a no-op."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._end(self._loops.all())
            self._wait_for(self._work.all())
        if self._thread is not None:
            self._alarm.ring()
            self._thread.join()
        self._alarm.close()

    def _run(self) -> None:
        while not self._closed:
            self._alarm.wait()
            with self._lock:
                self._rung, self._goes_off = False, inf
                self._end(self._loops.woken(now := time.monotonic()))
                self._wait_for(self._work.woken(now))
                if self._loops or self._work:
                    self._arm(now)

    def _end(self, leases: Iterable[Record]) -> None:
        # under the lock, so that a later request of another thread comes after it
        for record in leases:
            with suppress(SwapdError):  # the session has ended, and its leases with it
                self._give_back(record)

    def _wait_for(self, late: Iterable[tuple[Work, End]]) -> None:
        for work, end in late:
            self._after(work, end)


def _tell_nobody(record: Record) -> None:
    """No-op: there is no daemon."""
