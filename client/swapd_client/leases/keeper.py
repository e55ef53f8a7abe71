"""The leases of one client that linger, and the thread that gives them back in the end.

See `linger.py` for which do, and why. A lease that lingers is given back within 2 SWEEP_S; within
LINGER_S if somebody waits for memory, or if what it holds then leaves; at once if somebody waits
for just that, or if its agent asks the daemon for anything else.

A loop that goes on never wakes this thread, which would take the GIL from it: it sets the alarm
later once in SWEEP_S.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from typing import Protocol

import msgspec

from swapd.shared.protocol import Granted
from swapd.shared.system import Alarm
from swapd_client.errors import SwapdError
from swapd_client.leases.linger import LINGER_S, SWEEP_S, Held, Key, Linger


class Told(Protocol):
    """What the daemon has told this process."""

    #: Names that others wait for, and are to have now.
    wanted: set[str]
    #: Whether anybody waits for what leases may hold.
    hurried: bool


class Keeper:
    """Thread-safe. The thread starts with the first lease that lingers."""

    def __init__(self, told: Told, give_back: Callable[[Held], None]) -> None:
        """`told` may change at any time; `hurry` is called after that. `give_back(held)` ends a
        lease, from any thread; when it returns the daemon knows, or will be told when the GPU's
        work is done.
        """
        self._told = told
        self._give_back = give_back
        self._linger = Linger()
        self._lock = threading.RLock()  # ending a lease asks for `again`
        self._alarm = Alarm()
        #: When the alarm goes off: whoever sets it does so rarely, for it costs a loop most.
        self._goes_off = inf
        #: Whether it is to go off just then, and is not set later.
        self._exact = False
        #: It was rung; setting it since then must not silence it.
        self._rung = False
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(self, key: Key) -> Held | None:
        """The lease that `key` gave back a moment ago, held again; None if there is none."""
        with self._lock:
            held = self._linger.take(key, time.monotonic())
        if held is None:
            return None
        if held.granted.waited_s or held.granted.loaded:  # so it was the first time
            granted = msgspec.structs.replace(held.granted, waited_s=0.0, loaded=False)
            return held._replace(granted=granted)
        return held

    def keep(self, key: Key, held: Held) -> bool:
        """Keep a lease that is given back; False if the daemon is to be told now."""
        told, now = self._told, time.monotonic()
        with self._lock:
            wanted = told.wanted
            if self._closed or (wanted and not wanted.isdisjoint(held.granted.names or key[1])):
                return False
            if not self._linger.keep(key, held, now):
                return False
            # now that it is kept, `hurry` sees it: what is told from here on rings the alarm
            if held.passes or told.hurried or told.wanted:
                if now + LINGER_S < self._goes_off:
                    self._arm(now + LINGER_S, now, exact=True)
            elif self._goes_off is inf:
                self._arm(now + 2 * SWEEP_S, now)
            elif self._goes_off < now + SWEEP_S and not self._exact:
                at = self._linger.oldest + 2 * SWEEP_S
                if at > self._goes_off:  # it is this loop's own, not what another has left
                    self._arm(at, now)
        return True

    def _arm(self, at: float, now: float, *, exact: bool = False) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="swapd-keeper", daemon=True)
            self._thread.start()
        self._goes_off, self._exact = at, exact
        self._alarm.set(at - now)
        if self._rung:
            self._alarm.ring()

    def again(self, granted: Granted) -> int:
        """How often a lease that ends now was handed out without a message."""
        with self._lock:
            return self._linger.again(granted)

    def pop(self, thread: int) -> list[Held]:
        """What a thread kept, for itself to end: it is about to ask for something else."""
        with self._lock:  # what another thread just ends has ended when this returns
            return self._linger.of(thread)

    def flush_all(self) -> None:
        with self._lock:
            self._end(self._linger.all())

    def hurry(self) -> None:
        """Somebody waits for what may be kept here. Does not block."""
        if self._linger:
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
            self._end(self._linger.all())
        if self._thread is not None:
            self._alarm.ring()
            self._thread.join()
        self._alarm.close()

    def _run(self) -> None:
        while not self._closed:
            self._alarm.wait()
            with self._lock:
                self._rung, self._goes_off = False, inf
                self._end(self._linger.with_names(self._told.wanted))
                self._end(self._linger.due(now := time.monotonic()))
                if self._linger:
                    self._arm(self._linger.oldest + LINGER_S, now, exact=True)

    def _end(self, leases: Iterable[Held]) -> None:
        # under the lock, so that whoever asks next asks after it
        for held in leases:
            with suppress(SwapdError):  # the session has ended, and it with that: not released late
                self._give_back(held)


def _tell_nobody(held: Held) -> None:
    """There is nobody any more."""
