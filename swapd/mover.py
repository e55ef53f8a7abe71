"""Runs one copy at a time in each direction, off the event loop. Chooses nothing.

Every order comes back as exactly one event, also when the device fails.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from swapd.core.actions import CopyIn, CopyOut
from swapd.core.events import AnyEvent, CopiedIn, CopiedOut, CopyFailed
from swapd.device import Device, DeviceError


class Mover:
    """Copies between masters and a device: one thread for each direction."""

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
        self._in = ThreadPoolExecutor(1, "swapd-in")
        self._out = ThreadPoolExecutor(1, "swapd-out")

    def start(self, order: CopyIn | CopyOut, address: int) -> None:
        """Queue a copy from or to the master at `address`, which stays mapped until it ends."""
        if isinstance(order, CopyIn):
            future = self._in.submit(self._device.copy_in, order.runs, address, order.nbytes)
        else:
            future = self._out.submit(self._device.copy_out, order.runs, address, order.nbytes)
        future.add_done_callback(lambda f: self._loop.call_soon_threadsafe(self._finish, order, f))

    def close(self) -> None:
        """Wait for copies in flight; they end, but nobody is told any more."""
        self._closed = True
        self._in.shutdown()
        self._out.shutdown()

    def _finish(self, order: CopyIn | CopyOut, future: "Future[None]") -> None:
        if self._closed:
            return
        now = self._clock()
        error = future.exception()
        if isinstance(error, DeviceError):
            self._post(CopyFailed(now, order.generation, str(error)))
        elif error is not None:
            self._crashed(error)
        elif isinstance(order, CopyIn):
            self._post(CopiedIn(now, order.generation))
        else:
            self._post(CopiedOut(now, order.generation))
