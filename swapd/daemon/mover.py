"""Runs one copy at a time in each direction, off the event loop. Chooses nothing.

Every order comes back as exactly one event, also when the device fails.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread

from swapd.core.actions import CopyIn, CopyOut
from swapd.core.events import CopiedIn, CopiedOut, CopyFailed, DeviceDown
from swapd.daemon.inbox import Inbox
from swapd.device import Device, DeviceError, DeviceLost
from swapd.shared.limits import start

log = logging.getLogger("swapd.daemon.mover")


class _Copier(Thread):
    """The copies of one direction, in order.

    A queue and no futures, which would take as long as a small copy.
    """

    def __init__(self, name: str) -> None:
        """Raises: LimitError."""
        super().__init__(name=name, daemon=True)
        self.copies: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        start(self)

    def run(self) -> None:
        while (copy := self.copies.get()) is not None:
            copy()


class Mover:
    """Copies between host copies and a device: one thread for each direction."""

    def __init__(self, device: Device, inbox: Inbox) -> None:
        """Raises: LimitError."""
        self._device = device
        self._inbox = inbox
        self._closed = False
        self._in, self._out = _Copier("swapd-in"), _Copier("swapd-out")
        #: Copies that have ended and have not been reported, each with its error.
        self._ended: deque[tuple[CopyIn | CopyOut, BaseException | None]] = deque()

    def copy_in(self, order: CopyIn, source: int, landed: Callable[[int], None]) -> None:
        """Queue a copy from the host copy at `source`, which stays mapped until it ends.

        `landed(n)`: the first n bytes have arrived; called in another thread. The call for all
        bytes comes when the copy has ended: a worker may react to it at once, see `settle`.
        """
        self._in.copies.put(partial(self._load, order, source, landed))

    def copy_out(self, order: CopyOut, target: int, saved: Callable[[], None]) -> None:
        """Queue a copy to the host copy at `target`, which stays mapped until it ends.

        `saved()`: all of it is in the host copy; called in another thread.
        """
        self._out.copies.put(partial(self._save, order, target, saved))

    def settle(self) -> None:
        """Report ended copies, before handling messages of workers that saw their end on the board.

        The copying thread tells workers, and these are at times quicker than this loop.
        """
        while self._ended:
            self._report(*self._ended.popleft())

    def _load(self, order: CopyIn, source: int, landed: Callable[[int], None]) -> None:
        def on_the_way(nbytes: int) -> None:
            if nbytes < order.nbytes:
                landed(nbytes)

        if self._closed:
            return
        runs, nbytes, only = order.runs, order.nbytes, order.only
        try:
            self._device.copy_in(runs, source, nbytes, only=only, landed=on_the_way)
        except BaseException as exc:  # noqa: BLE001 - reported in the loop
            self._note(order, exc)
        else:
            self._note(order, None, lambda: landed(nbytes))

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
    ) -> None:
        """Note the end of a copy, and only then tell workers of it."""
        self._ended.append((order, error))
        tell()
        self._inbox.loop.call_soon_threadsafe(self.settle)

    async def finish(self) -> None:
        """Wait for the load in flight, and for all write-backs: only those have their bytes. Loads
        that have not begun are dropped. No more events are posted."""
        self._closed = True
        loop = self._inbox.loop
        ended = asyncio.Semaphore(0)
        for copier in (self._in, self._out):
            copier.copies.put(partial(loop.call_soon_threadsafe, ended.release))
        for _ in (self._in, self._out):
            await ended.acquire()

    def close(self) -> None:
        """The same, and end the threads. Blocks."""
        self._closed = True
        for copier in (self._in, self._out):
            copier.copies.put(None)
            copier.join()

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
