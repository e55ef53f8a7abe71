"""Runs one copy at a time in each direction, off the event loop. Chooses nothing.

Every order comes back as exactly one event, also when the device fails.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from swapd.core.actions import CopyIn, CopyOut
from swapd.core.events import AnyEvent, CopiedIn, CopiedOut, CopyFailed, DeviceDown
from swapd.device import Device, DeviceError, DeviceLost
from swapd.shared.limits import Pool

log = logging.getLogger("swapd.daemon.mover")


class Mover:
    """Copies between host copies and a device: one thread for each direction."""

    def __init__(
        self,
        device: Device,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        post: Callable[[AnyEvent], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._device = device
        self._loop = loop
        self._clock = clock
        self._post = post
        self._crashed = crashed
        self._closed = False
        self._in = Pool(1, "swapd-in")
        self._out = Pool(1, "swapd-out")
        #: Loads that have ended and have not been reported, each with its error.
        self._ended: deque[tuple[CopyIn, BaseException | None]] = deque()

    def copy_in(self, order: CopyIn, source: int, landed: Callable[[int], None]) -> None:
        """Queue a copy from the host copy at `source`, which stays mapped until it ends.

        `landed(n)`: the first n bytes have arrived; called in another thread. The call for all
        bytes comes when the copy has ended: a worker may react to it at once, see `settle`.
        """
        future = self._in.submit(self._load, order, source, landed)
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self.settle))

    def copy_out(self, order: CopyOut, target: int, saved: Callable[[], None]) -> None:
        """Queue a copy to the host copy at `target`, which stays mapped until it ends.

        `saved()`: all of it is in the host copy; called in another thread.
        """
        future = self._out.submit(self._save, order, target, saved)
        future.add_done_callback(lambda f: self._loop.call_soon_threadsafe(self._saved, order, f))

    def settle(self) -> None:
        """Report ended loads, before handling messages of workers that saw their end on the board.

        The copying thread tells workers, and these are at times quicker than this loop.
        """
        while self._ended:
            self._report(*self._ended.popleft())

    def _load(self, order: CopyIn, source: int, landed: Callable[[int], None]) -> None:
        try:
            self._device.copy_in(
                order.runs,
                source,
                order.nbytes,
                only=order.only,
                landed=lambda n: landed(n) if n < order.nbytes else None,
            )
        except BaseException as exc:
            self._ended.append((order, exc))
            raise
        self._ended.append((order, None))
        landed(order.nbytes)

    def _save(self, order: CopyOut, target: int, saved: Callable[[], None]) -> None:
        self._device.copy_out(order.runs, target, order.nbytes, only=order.only)
        saved()

    def _saved(self, order: CopyOut, future: "Future[None]") -> None:
        self._report(order, None if future.cancelled() else future.exception())

    async def finish(self) -> None:
        """Wait for the load in flight, and for all write-backs: only those have their bytes. Loads
        that have not begun are dropped. No more events are posted."""
        self._closed = True
        await asyncio.gather(self._in.finish(), self._out.finish(drop=False))

    def close(self) -> None:
        """Wait for all copies; they end without events. Blocks."""
        self._closed = True
        self._out.shutdown()
        self._in.shutdown()

    def _report(self, order: CopyIn | CopyOut, error: BaseException | None) -> None:
        """Post the event for the end of a copy."""
        if self._closed:
            return
        now = self._clock()
        if isinstance(error, DeviceLost):
            self._post(DeviceDown(now, str(error)))  # first: the core must try no other load
        if isinstance(error, DeviceError | MemoryError):
            log.error("copy of %s failed: %s", order.name, error)
            self._post(CopyFailed(now, order.generation, str(error) or "no memory"))
        elif error is not None:
            self._crashed(error)
        else:
            done = CopiedIn if isinstance(order, CopyIn) else CopiedOut
            self._post(done(now, order.generation))
