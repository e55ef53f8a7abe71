"""The leases of one client that its loops keep, and the thread that gives them back in the end.

See `keeping.py` for which they are, and why. A lease that is kept is given back within 2 SWEEP_S;
within LINGER_S if somebody waits for memory, or if what it holds then leaves; at once if somebody
waits for just that, or if its agent asks the daemon for anything else.

A loop that goes on never wakes this thread, which would take the GIL from it: it sets the alarm
later once in SWEEP_S. Nor does one that uses several components in turn wake the threads that wait
for a GPU: what it gave back before the work was done it looks after itself, and if it stops a
thread waits for that within 2 BACK_S.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf

import msgspec

from swapd.shared.system import Alarm
from swapd_client.errors import SwapdError
from swapd_client.leases.book import Record
from swapd_client.leases.keeping import End, Key, LoopKeeping, Told, WorkKeeping
from swapd_client.session.processor import Work


class Keeper:
    """Thread-safe. The thread starts with the first lease that is kept."""

    def __init__(
        self,
        told: Told,
        give_back: Callable[[Record], None],
        after: Callable[[Work, End], None],
    ) -> None:
        """`told` may change at any time; `hurry` is called after that. `give_back(record)` ends a
        lease, from any thread; when it returns the daemon knows, or will be told when the GPU's
        work is done. `after(work, end)` has a thread wait for work, and call `end()`.
        """
        self._give_back = give_back
        self._after = after
        self._loops = LoopKeeping(told)
        self._work = WorkKeeping(told)
        self._lock = threading.RLock()  # for signal handlers that ask in the middle of it
        self._alarm = Alarm()
        #: When the alarm goes off: whoever sets it does so rarely, for it costs a loop most.
        self._goes_off = inf
        #: It was rung; setting it since then must not silence it.
        self._rung = False
        self._thread: threading.Thread | None = None
        self._closed = False

    def __bool__(self) -> bool:
        """Whether anything is kept."""
        return bool(self._loops)

    def take(self, key: Key) -> Record | None:
        """The lease that `key` gave back a moment ago, held again; None if there is none."""
        with self._lock:
            record = self._loops.take(key, time.monotonic())
        if record is None:
            return None
        granted = record.granted
        if granted.waited_s or granted.loaded:  # so it was the first time
            record.granted = msgspec.structs.replace(granted, waited_s=0.0, loaded=False)
        return record

    def keep(self, key: Key, record: Record) -> bool:
        """Keep a lease that is given back; False if the daemon is to be told now."""
        now = time.monotonic()
        with self._lock:
            if self._closed or not self._loops.keep(key, record, now):
                return False
            self._arm(now)
        return True

    def linger(self, work: Work, end: End) -> None:
        """This thread gave back a lease before its work was done: `end` it then."""
        now = time.monotonic()
        with self._lock:
            if not self._closed and self._work.keep(threading.get_ident(), work, end, now):
                self._arm(now)
                return
        self._after(work, end)

    def returned(self) -> list[End]:
        """This thread acquires: what it is to end first, for the work is done."""
        with self._lock:
            return self._work.returned(threading.get_ident(), time.monotonic())

    def hand_over(self) -> None:
        """This thread asks for something else: what it looks after a thread waits for."""
        if self._work:
            with self._lock:
                self._wait_for(self._work.of(threading.get_ident()))

    def _arm(self, now: float) -> None:
        """Have the alarm go off when it must, if it does not; without a thread nothing is kept."""
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
            thread.start()
        except (RuntimeError, MemoryError):  # this process may have no more
            return False
        self._thread = thread
        return True

    def pop(self, thread: int) -> list[Record]:
        """What a thread kept, for itself to end: it is about to ask for something else."""
        with self._lock:  # what another thread just ends has ended when this returns
            return self._loops.of(thread)

    def flush_all(self) -> None:
        with self._lock:
            self._end(self._loops.all())
            self._wait_for(self._work.all())

    def hurry(self) -> None:
        """Somebody waits for what may be kept here. Does not block."""
        if self._loops or self._work:
            self._rung = True
            with suppress(ValueError):  # closed this moment: all is given back
                self._alarm.ring()

    def forget(self, error: SwapdError) -> None:
        """The session has ended, and all leases with it: nobody is told of any."""
        self._give_back = _tell_nobody

    def close(self) -> None:
        """Give everything back, and keep nothing any more. More than once is once."""
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
        # under the lock, so that whoever asks next asks after it
        for record in leases:
            with suppress(SwapdError):  # the session has ended, and it with that: not released late
                self._give_back(record)

    def _wait_for(self, late: Iterable[tuple[Work, End]]) -> None:
        for work, end in late:
            self._after(work, end)


def _tell_nobody(record: Record) -> None:
    """There is nobody any more."""
