"""Runs one copy at a time in each direction, off the event loop.

Loads run in the order of their urgency. A running load pauses for a more urgent one, and resumes
where it stopped. Every order ends with exactly one event, also when the device fails.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread

from swapd.core.actions import CopyIn, CopyOut, Urgency
from swapd.core.events import CopiedIn, CopiedOut, CopyFailed, CopyStopped, DeviceDown
from swapd.daemon.dispatch import Inbox
from swapd.device import Device, DeviceError, DeviceLost
from swapd.shared.system import start

log = logging.getLogger("swapd.daemon.mover")

#: More urgent than any load of the core.
_AT_ONCE: Urgency = (-1, 0, 0)


class _Copier(Thread):
    """Runs the steps of one direction in order. Futures would take as long as a small copy."""

    def __init__(self, name: str) -> None:
        """Raises: LimitError."""
        super().__init__(name=name, daemon=True)
        self.steps: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        start(self)

    def run(self) -> None:
        while (step := self.steps.get()) is not None:
            step()


class _Load:
    """`done`: bytes that have arrived; `took_s`: running time before the last pause."""

    __slots__ = ("done", "landed", "order", "source", "stopped", "took_s", "urgency")

    def __init__(self, order: CopyIn, source: int, landed: Callable[[int], None]) -> None:
        self.order, self.source, self.landed = order, source, landed
        self.urgency = order.urgency
        self.done = 0
        self.took_s = 0.0
        self.stopped = False


class _Paused(Exception): ...


class _Stopped(Exception): ...


class Mover:
    def __init__(self, device: Device, inbox: Inbox) -> None:
        """Raises: LimitError."""
        self._device = device
        self._inbox = inbox
        self._closed = False
        self._in, self._out = _Copier("swapd-in"), _Copier("swapd-out")
        #: Waiting (new or paused) loads, and all loads, by generation. The loop and the load thread
        #: share both without a lock: each step is atomic.
        self._waiting: dict[int, _Load] = {}
        self._loads: dict[int, _Load] = {}
        #: Ended copies to report, each with its error and its `took_s`.
        self._ended: deque[tuple[CopyIn | CopyOut, BaseException | None, float]] = deque()

    def copy_in(self, order: CopyIn, source: int, landed: Callable[[int], None]) -> None:
        """Queue a copy from the host copy at `source`, which stays mapped until the copy ends.

        `landed(n)`: the first n bytes have arrived; called in another thread. The last call comes
        when the end has been noted: a worker may react at once, see `settle`.
        """
        if order.joins:  # all its bytes are on its chunks already
            return self._note(order, None, partial(landed, order.nbytes))
        load = _Load(order, source, landed)
        self._loads[order.generation] = self._waiting[order.generation] = load
        self._in.steps.put(self._load_most_urgent)

    def hasten(self, generation: int, urgency: Urgency) -> None:
        """No-op after the end of the load."""
        if load := self._loads.get(generation):
            load.urgency = urgency

    def stop(self, generation: int) -> None:
        """Stop a load, after its current pieces if it runs. CopyStopped follows, or the event of
        its end if that came first."""
        if load := self._waiting.pop(generation, None):
            del self._loads[generation]
            self._note(load.order, _Stopped())
        elif load := self._loads.get(generation):
            load.stopped, load.urgency = True, _AT_ONCE

    def copy_out(self, order: CopyOut, target: int, saved: Callable[[], None]) -> None:
        """Queue a copy to the host copy at `target`, which stays mapped until the copy ends.
        `saved()`: all bytes are in the host copy; called in another thread."""
        self._out.steps.put(partial(self._save, order, target, saved))

    def settle(self) -> None:
        """Report ended copies. Call it before handling messages of workers, who may learn of the
        end from the board first."""
        while self._ended:
            self._report(*self._ended.popleft())

    def _load_most_urgent(self) -> None:
        """Run the most urgent load until it ends or pauses. Queued once for each load that waits or
        was stopped while waiting."""
        load = self._most_urgent()
        if load is None or self._closed:
            return
        order, began = load.order, time.monotonic()
        error: BaseException | None = None
        try:
            self._copy_in(load)
        except _Paused:
            load.took_s += time.monotonic() - began
            self._waiting[order.generation] = load
            self._in.steps.put(self._load_most_urgent)
            return
        except BaseException as exc:  # noqa: BLE001 - reported in the loop
            error = exc
        del self._loads[order.generation]
        took_s = load.took_s + time.monotonic() - began if load.took_s else 0.0
        tell = (lambda: load.landed(order.nbytes)) if error is None else (lambda: None)
        self._note(order, error, tell, took_s)

    def _most_urgent(self) -> _Load | None:
        """Take the most urgent load, unless the loop stops it meanwhile."""
        while waiting := list(self._waiting.values()):
            first = min(waiting, key=lambda load: load.urgency)
            if self._waiting.pop(first.order.generation, None):
                return first
        return None

    def _copy_in(self, load: _Load) -> None:
        order = load.order

        def on_the_way(nbytes: int) -> None:
            load.done = nbytes
            if nbytes == order.nbytes:
                return
            load.landed(nbytes)
            if load.stopped:
                raise _Stopped
            if any(other.urgency < load.urgency for other in list(self._waiting.values())):
                raise _Paused

        if load.stopped:
            raise _Stopped
        self._device.copy_in(
            order.runs,
            load.source,
            order.nbytes,
            only=order.only,
            start=load.done,
            landed=on_the_way,
        )

    def _save(self, order: CopyOut, target: int, saved: Callable[[], None]) -> None:
        try:
            self._device.copy_out(order.runs, target, order.nbytes, only=order.only)
            saved()
        except BaseException as exc:  # noqa: BLE001 - reported in the loop
            self._note(order, exc)
        else:
            self._note(order, None)

    def _note(
        self,
        order: CopyIn | CopyOut,
        error: BaseException | None,
        tell: Callable[[], None] = lambda: None,
        took_s: float = 0.0,
    ) -> None:
        """Note the end of a copy, and only then tell workers."""
        self._ended.append((order, error, took_s))
        tell()
        self._in_loop(self.settle)

    def _in_loop(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed after a second request to stop
            self._inbox.loop.call_soon_threadsafe(call)

    async def finish(self) -> None:
        """Wait for the load in flight and for all write-backs, whose bytes are nowhere else. Other
        loads are dropped, no more events are posted, and the threads end."""
        self._closed = True
        ended = asyncio.Semaphore(0)
        for copier in (self._in, self._out):
            copier.steps.put(partial(self._in_loop, ended.release))
            copier.steps.put(None)
        for _ in (self._in, self._out):
            await ended.acquire()

    def _report(self, order: CopyIn | CopyOut, error: BaseException | None, took_s: float) -> None:
        if self._closed:
            return
        now, post = self._inbox.clock(), self._inbox.post
        if isinstance(error, _Stopped):
            post(CopyStopped(now, order.generation))
            return
        if isinstance(error, DeviceLost):
            post(DeviceDown(now, str(error)))  # first, so that the core tries no other load
        if isinstance(error, DeviceError | MemoryError):
            log.error("copy of %s failed: %s", order.name, error)
            post(CopyFailed(now, order.generation, str(error) or "no memory"))
        elif error is not None:
            self._inbox.crashed(error)
        elif isinstance(order, CopyIn):
            post(CopiedIn(now, order.generation, took_s))
        else:
            post(CopiedOut(now, order.generation))
