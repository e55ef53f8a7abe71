"""Runs one copy at a time in each direction, off the event loop. Chooses nothing.

Every order comes back as exactly one event, also when the device fails.

The core may order a load onto chunks that a write-back still saves (`CopyIn.behind`): the load then
follows, chunk by chunk. If the write-back fails, the mover first restores overwritten chunks from
the host copy. Then it reports the load, and after it the write-back.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from swapd.core.actions import CopyIn, CopyOut
from swapd.core.events import AnyEvent, CopiedIn, CopiedOut, CopyFailed, DeviceDown
from swapd.device import Device, DeviceError, DeviceLost
from swapd.device.pieces import numbers
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
        #: Write-backs that have not been reported, by generation.
        self._saves: dict[int, _Save] = {}
        #: Loads that have ended and have not been reported, each with its error.
        self._ended: deque[tuple[_Load, BaseException | None]] = deque()

    def copy_in(self, order: CopyIn, source: int, landed: Callable[[int], None]) -> None:
        """Queue a copy from the host copy at `source`, which stays mapped until it ends.

        `landed(n)`: the first n bytes have arrived; called in another thread. The call for all
        bytes comes when the copy has ended: a worker may react to it at once, see `settle`.
        """
        load = _Load(self._device, order, [self._saves[g] for g in order.behind])
        for save in load.behind:
            save.followers += 1
        future = self._in.submit(self._load, load, source, landed)
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self.settle))

    def copy_out(self, order: CopyOut, target: int, saved: Callable[[int], None]) -> None:
        """Queue a copy to the host copy at `target`, which stays mapped until it ends.

        `saved(n)`: the first n chunks are in the host copy; called in another thread, before any of
        them is overwritten.
        """
        save = _Save(order, target, self._device.chunk_bytes, saved)
        self._saves[order.generation] = save
        future = self._out.submit(save.run, self._device)
        future.add_done_callback(lambda f: self._loop.call_soon_threadsafe(self._saved, save, f))

    def settle(self) -> None:
        """Report ended loads, before handling messages of workers that saw their end on the board.

        The copying thread tells workers, and these are at times quicker than this loop.
        """
        while self._ended:
            self._loaded(*self._ended.popleft())

    def _load(self, load: "_Load", source: int, landed: Callable[[int], None]) -> None:
        try:
            load.run(source, lambda n: landed(n) if n < load.order.nbytes else None)
        except BaseException as exc:
            self._ended.append((load, exc))
            raise
        self._ended.append((load, None))
        landed(load.order.nbytes)

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

    # --- on the loop: the order in which the core hears ----------------------------------

    def _saved(self, save: "_Save", future: "Future[None]") -> None:
        save.outcome = event = self._outcome(save.order, _error_of(future))
        if isinstance(event, CopyFailed) and save.followers:
            return  # the followers come first
        self._report_save(save)

    def _loaded(self, load: "_Load", error: BaseException | None) -> None:
        event = self._outcome(load.order, error)
        late = [s for s in load.behind if s.outcome is None]
        if isinstance(event, CopiedIn) and late:
            late[0].held.append(lambda: self._loaded(load, error))  # the write-backs come first
            return
        if event is not None:
            self._post(event)
        for save in load.behind:
            save.followers -= 1
            if not save.followers and isinstance(save.outcome, CopyFailed):
                self._report_save(save)

    def _report_save(self, save: "_Save") -> None:
        self._saves.pop(save.order.generation, None)
        if isinstance(save.outcome, CopyFailed) and save.damaged:
            why = f"{save.outcome.why}; and overwritten bytes could not be restored"
            save.outcome = CopyFailed(self._clock(), save.order.generation, why, damaged=True)
        if save.outcome is not None:
            self._post(save.outcome)
        for follower in save.held:
            follower()

    def _outcome(self, order: CopyIn | CopyOut, error: BaseException | None) -> AnyEvent | None:
        """The event for the end of a copy; None if it needs none."""
        if self._closed:
            return None
        now = self._clock()
        if isinstance(error, DeviceLost):
            self._post(DeviceDown(now, str(error)))  # first: the core must try no other load
        if isinstance(error, DeviceError | MemoryError):
            log.error("copy of %s failed: %s", order.name, error)
            return CopyFailed(now, order.generation, str(error) or "no memory")
        if error is not None:
            self._crashed(error)
            return None
        done = CopiedIn if isinstance(order, CopyIn) else CopiedOut
        return done(now, order.generation)


def _error_of(future: "Future[None]") -> BaseException | None:
    """The error of a copy, if it began."""
    return None if future.cancelled() else future.exception()


@dataclass(eq=False)
class _Save:
    """A write-back, and its progress for loads that follow it onto its chunks."""

    order: CopyOut
    target: int
    chunk_bytes: int
    saved: Callable[[int], None]
    #: On the loop: number of unreported loads that follow, the event of this one's end, and reports
    #: that wait for it.
    followers: int = 0
    outcome: AnyEvent | None = None
    held: list[Callable[[], None]] = field(default_factory=list)
    damaged: bool = False
    #: Any thread, under `_change`.
    _change: threading.Condition = field(default_factory=threading.Condition)
    _bytes: int = 0
    _ended: bool = False
    _failed: bool = False

    def __post_init__(self) -> None:
        self._place = {chunk: i for i, chunk in enumerate(numbers(self.order.runs))}

    def run(self, device: Device) -> None:
        try:
            order = self.order
            device.copy_out(
                order.runs, self.target, order.nbytes, only=order.only, landed=self._landed
            )
        except BaseException:
            self._end(failed=True)
            raise
        self._end(failed=False)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._place

    def wait_for(self, chunk: int) -> None:
        """Block until `chunk` is saved. Raises: DeviceError if it will never be."""
        end = min((self._place[chunk] + 1) * self.chunk_bytes, self.order.nbytes)
        with self._change:
            self._change.wait_for(lambda: self._bytes >= end or self._ended)
            if self._failed:
                raise DeviceError(f"the memory for it still holds {self.order.name}, unsaved")

    def wait_for_end(self) -> bool:
        """Block until the whole copy has ended; return whether it succeeded."""
        with self._change:
            self._change.wait_for(lambda: self._ended)
            return not self._failed

    def restore(self, device: Device, chunk: int) -> None:
        """Copy one saved chunk back. Raises: DeviceError."""
        at = self._place[chunk] * self.chunk_bytes
        nbytes = min(self.chunk_bytes, self.order.nbytes - at)
        device.copy_in(((chunk, 1),), self.target + at, nbytes)

    def _landed(self, nbytes: int) -> None:
        whole = nbytes if nbytes < self.order.nbytes else nbytes + self.chunk_bytes - 1
        self.saved(whole // self.chunk_bytes)  # first: a follower may overwrite them
        with self._change:
            self._bytes = nbytes
            self._change.notify_all()

    def _end(self, *, failed: bool) -> None:
        with self._change:
            self._ended, self._failed = True, failed
            self._change.notify_all()


class _Load:
    """A load, and the write-backs that it follows."""

    def __init__(self, device: Device, order: CopyIn, behind: Sequence[_Save]) -> None:
        self.order = order
        self.behind = behind
        self._device = device
        self._overwritten: list[tuple[_Save, int]] = []

    def run(self, source: int, landed: Callable[[int], None]) -> None:
        """Copy, and end only when the write-backs it follows have ended; undo if one of them
        failed."""
        runs, nbytes = self.order.runs, self.order.nbytes
        try:
            may_write = self._may_write if self.behind else None
            self._device.copy_in(
                runs, source, nbytes, only=self.order.only, may_write=may_write, landed=landed
            )
        finally:
            failed = [s for s in self.behind if not s.wait_for_end()]
            self._restore(failed)
        if failed:
            names = ", ".join(s.order.name for s in failed)
            raise DeviceError(f"the memory for it still holds {names}, which could not be saved")

    def _may_write(self, chunk: int) -> None:
        for save in self.behind:
            if chunk in save:
                save.wait_for(chunk)
                self._overwritten.append((save, chunk))

    def _restore(self, failed: Sequence[_Save]) -> None:
        for save, chunk in self._overwritten:
            if save in failed:
                try:
                    save.restore(self._device, chunk)
                except DeviceError as exc:
                    log.error("cannot restore %s: %s", save.order.name, exc)
                    save.damaged = True
