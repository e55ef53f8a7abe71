"""Tracks the calls that use a stage's weights, and can keep further calls out.

Calls enter and leave in the thread that steps the engine. While none runs, the stage's own thread
may work under the lock.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ASIDE_S = 0.02


class CallGate:
    """The methods from `await_open` on require `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: Number of running calls that use weights, nested ones included.
        self.depth = 0
        #: Whether one of them is a step.
        self.steps = False
        #: Number of running changes of the weights, which may contain calls.
        self.changes = 0
        #: Whether no call may begin until `open`.
        self.shut = False
        self._rested = time.monotonic()
        #: Notified at the end of a call or a change, and by `open` and `tell`.
        self._free = threading.Condition(self.lock)

    @property
    def busy(self) -> bool:
        return self.depth > 0 or self.changes > 0

    def enter(self, *, step: bool = False) -> None:
        """Begin a call. Blocks while the gate is shut, unless another call is running."""
        with self.lock:  # a thread that ends the lease holds the lock
            self.await_open()
            self.depth += 1
            self.steps |= step

    def leave(self, *, step: bool = False) -> None:
        with self.lock:
            self.depth -= 1
            self.steps &= not step
            self._rested = time.monotonic()
            self.tell()

    @contextmanager
    def changing(self, first: Callable[[], None]) -> Iterator[None]:
        """In the block the stage is busy, even without a call. `first()` runs under the lock."""
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
        while self.shut and not self.depth:
            self._free.wait()

    def step_aside(self) -> None:
        """In the only call, which has not computed yet: let the stage's own thread work. Blocks for
        ASIDE_S at most."""
        with self.lock:
            self.depth -= 1
            try:
                self.tell()
                self._free.wait(ASIDE_S)
            finally:
                self.depth += 1

    def open(self) -> None:
        self.shut = False
        self.tell()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of a call or a change, or `tell`."""
        self._free.wait(timeout_s)

    def tell(self) -> None:
        self._free.notify_all()

    def idle_s(self) -> float:
        """Return the seconds since the last call ended; 0 during a call."""
        return 0.0 if self.depth else time.monotonic() - self._rested
