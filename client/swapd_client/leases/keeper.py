"""The leases of one client that its loops keep, and the thread that gives them back in the end.

See `keeping.py` for which they are, and why. A lease that is kept is given back within 2 SWEEP_S;
within LINGER_S if somebody waits for memory, or if what it holds then leaves; at once if somebody
waits for just that, or if its agent asks the daemon for anything else.

A loop that goes on never wakes this thread, which would take the GIL from it: it sets the alarm
later once in SWEEP_S.
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
from swapd_client.leases.keeping import Key, LoopKeeping, Told


class Keeper:
    """Thread-safe. The thread starts with the first lease that is kept."""

    def __init__(self, told: Told, give_back: Callable[[Record], None]) -> None:
        """`told` may change at any time; `hurry` is called after that. `give_back(record)` ends a
        lease, from any thread; when it returns the daemon knows, or will be told when the GPU's
        work is done.
        """
        self._give_back = give_back
        self._loops = LoopKeeping(told)
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
            if self._loops.wakes != self._goes_off:
                self._arm(now)
        return True

    def _arm(self, now: float) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="swapd-keeper", daemon=True)
            self._thread.start()
        self._goes_off = self._loops.wakes
        self._alarm.set(self._goes_off - now)
        if self._rung:
            self._alarm.ring()

    def pop(self, thread: int) -> list[Record]:
        """What a thread kept, for itself to end: it is about to ask for something else."""
        with self._lock:  # what another thread just ends has ended when this returns
            return self._loops.of(thread)

    def flush_all(self) -> None:
        with self._lock:
            self._end(self._loops.all())

    def hurry(self) -> None:
        """Somebody waits for what may be kept here. Does not block."""
        if self._loops:
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
                if self._loops:
                    self._arm(now)

    def _end(self, leases: Iterable[Record]) -> None:
        # under the lock, so that whoever asks next asks after it
        for record in leases:
            with suppress(SwapdError):  # the session has ended, and it with that: not released late
                self._give_back(record)


def _tell_nobody(record: Record) -> None:
    """There is nobody any more."""
