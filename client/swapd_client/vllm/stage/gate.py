"""Who uses the weights of a stage just now, and how nobody does for a while.

A call goes in and out, in the thread that steps the engine; while none is in, the stage's own
thread may do something under the lock, or shut the gate until it has. Lives here: the lock, counts
and waits. May not live here: leases, daemons.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Gate:
    """Of one stage. What begins with "under the lock" is for who holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: How many calls that use weights are under way, one in the other.
        self.depth = 0
        #: How many changes of the weights are under way; they are no calls, and may have some.
        self.changes = 0
        #: No call begins until `open`: whoever shut it is about to do what none may be in.
        self.shut = False
        #: When the last call ended; seconds.
        self._rested = time.monotonic()
        #: Told when a call or a change has ended if somebody waits for that, and by `open`.
        self._free = threading.Condition(self.lock)
        self._awaited = False

    def __repr__(self) -> str:
        return (
            f"<Gate {'shut' if self.shut else 'open'}, {self.depth} calls, {self.changes} changes>"
        )

    @property
    def busy(self) -> bool:
        return self.depth > 0 or self.changes > 0

    def enter(self) -> None:
        """A call begins. Blocks while the gate is shut, unless it is in another call."""
        with self.lock:  # whoever is just giving the lease back has done so then
            self.await_open()
            self.depth += 1

    def leave(self) -> None:
        """A call ends."""
        with self.lock:
            self.depth -= 1
            self._rested = time.monotonic()
            if self._awaited:
                self._free.notify_all()

    @contextmanager
    def changing(self, first: Callable[[], None]) -> Iterator[None]:
        """While in it the stage is busy, though no call need be in. `first()`: under the lock."""
        with self.lock:
            self.await_open()
            first()
            self.changes += 1
        try:
            yield
        finally:
            with self.lock:
                self.changes -= 1
                self.tell()

    def await_open(self) -> None:
        """Before a call. Under the lock."""
        while self.shut and not self.depth:
            self._free.wait()

    def open(self) -> None:
        """Let calls begin. Under the lock."""
        self.shut = False
        self._free.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Until a call or a change has ended, or `tell`. Under the lock, which others have then."""
        self._awaited = True
        self._free.wait(timeout_s)
        self._awaited = False

    def tell(self) -> None:
        """Have who waits look again. Under the lock."""
        if self._awaited:
            self._free.notify_all()

    def idle_s(self) -> float:
        """For how long nobody has been in a call; 0 if somebody is. Under the lock."""
        return 0.0 if self.depth else time.monotonic() - self._rested
