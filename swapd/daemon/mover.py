"""Runs one copy at a time in each direction, off the event loop. Chooses nothing.

Every order comes back as exactly one event, also when the device fails.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from swapd.core.actions import CopyIn, CopyOut
from swapd.core.events import CopiedIn, CopiedOut, CopyFailed, DeviceDown
from swapd.daemon.inbox import Inbox
from swapd.device import Device, DeviceError, DeviceLost
from swapd.shared.limits import start

log = logging.getLogger("swapd.daemon.mover")


class _Copies:
    """The copies of one direction, in a thread of their own, in order.

    A queue and a call into the loop, and no futures: they would take as long as a small copy.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        """Raises: LimitError."""
        self._loop = loop
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended = asyncio.Event()
        self.thread = Thread(target=self._run, name=name, daemon=True)
        #: Whether copies that have not begun are left out.
        self.drop = False
        start(self.thread)

    def submit(self, copy: Callable[[], None]) -> None:
        self._queue.put(copy)

    def _run(self) -> None:
        while (copy := self._queue.get()) is not None:
            if not self.drop:
                copy()
        self._loop.call_soon_threadsafe(self._ended.set)

    def end(self) -> None:
        """Copy no more after what is queued."""
        self._queue.put(None)

    async def finish(self) -> None:
        self.end()
        await self._ended.wait()


class Mover:
    """Copies between host copies and a device: one thread for each direction."""

    def __init__(self, device: Device, inbox: Inbox) -> None:
        """Raises: LimitError."""
        self._device = device
        self._inbox = inbox
        self._closed = False
        self._in = _Copies("swapd-in", inbox.loop)
        self._out = _Copies("swapd-out", inbox.loop)
        #: Copies that have ended and have not been reported, each with its error.
        self._ended: deque[tuple[CopyIn | CopyOut, BaseException | None]] = deque()

    def copy_in(self, order: CopyIn, source: int, landed: Callable[[int], None]) -> None:
        """Queue a copy from the host copy at `source`, which stays mapped until it ends.

        `landed(n)`: the first n bytes have arrived; called in another thread. The call for all
        bytes comes when the copy has ended: a worker may react to it at once, see `settle`.
        """

        def on_the_way(nbytes: int) -> None:
            if nbytes < order.nbytes:
                landed(nbytes)

        def copy() -> None:
            self._device.copy_in(
                order.runs, source, order.nbytes, only=order.only, landed=on_the_way
            )

        self._in.submit(lambda: self._do(order, copy, lambda: landed(order.nbytes)))

    def copy_out(self, order: CopyOut, target: int, saved: Callable[[], None]) -> None:
        """Queue a copy to the host copy at `target`, which stays mapped until it ends.

        `saved()`: all of it is in the host copy; called in another thread.
        """

        def copy() -> None:
            self._device.copy_out(order.runs, target, order.nbytes, only=order.only)
            saved()

        self._out.submit(lambda: self._do(order, copy, lambda: None))

    def settle(self) -> None:
        """Report ended copies, before handling messages of workers that saw their end on the board.

        The copying thread tells workers, and these are at times quicker than this loop.
        """
        while self._ended:
            self._report(*self._ended.popleft())

    def _do(
        self, order: CopyIn | CopyOut, copy: Callable[[], None], tell: Callable[[], None]
    ) -> None:
        """Copy, note the end, and only then tell workers of it. In a thread."""
        error = None
        try:
            copy()
        except BaseException as exc:  # noqa: BLE001 - reported in the loop
            error = exc
        self._ended.append((order, error))
        if error is None:
            tell()
        self._inbox.loop.call_soon_threadsafe(self.settle)

    async def finish(self) -> None:
        """Wait for the load in flight, and for all write-backs: only those have their bytes. Loads
        that have not begun are dropped. No more events are posted."""
        self._closed = self._in.drop = True
        await asyncio.gather(self._in.finish(), self._out.finish())

    def close(self) -> None:
        """Wait for all copies; they end without events. Blocks."""
        self._closed = True
        for copies in (self._out, self._in):
            copies.end()
            copies.thread.join()

    def _report(self, order: CopyIn | CopyOut, error: BaseException | None) -> None:
        """Post the event for the end of a copy."""
        if self._closed:
            return
        now, post = self._inbox.clock(), self._inbox.post
        if isinstance(error, DeviceLost):
            post(DeviceDown(now, str(error)))  # first: the core must try no other load
        if isinstance(error, DeviceError | MemoryError):
            log.error("copy of %s failed: %s", order.name, error)
            post(CopyFailed(now, order.generation, str(error) or "no memory"))
        elif error is not None:
            self._inbox.crashed(error)
        else:
            done = CopiedIn if isinstance(order, CopyIn) else CopiedOut
            post(done(now, order.generation))
