"""Carries out the core's orders for host copies: make, send to be filled, seal, drop. Slow work
runs in threads."""

import asyncio
import logging
import os
import select
from collections.abc import Callable, Mapping
from weakref import WeakValueDictionary

from swapd.core import actions, events
from swapd.core.events import AnyEvent
from swapd.daemon.dispatch import Inbox
from swapd.daemon.host_copies import HostCopies, HostCopyError, T, Work
from swapd.daemon.lending import SPARE_FOR_PEERS, WorkerConnection
from swapd.daemon.lifeline import UNREAD_MAX
from swapd.device import Device
from swapd.device.base import Pinned
from swapd.shared import fds, protocol
from swapd.shared.board import SLOTS, LoadProgress
from swapd.shared.fds import OwnedFd
from swapd.shared.system import Threads
from swapd.shared.text import counted
from swapd.shared.units import seconds, size

log = logging.getLogger("swapd.daemon.host_copy_orders")

#: How long a drop waits for the keeper or systemd to let go of the memory.
LET_GO_S = 1.0
LOOK_S = 1.0
#: Shortest time between reports of pinning.
PERIOD_S = 10.0


class TimeSlices:
    """Runs long work of several sessions in a few threads, one step of each in turn, so that short
    work of one session waits for one step of another's at most. Work of one session runs in order.
    Used in the loop."""

    def __init__(self, threads: int, name: str) -> None:
        """Raises: LimitError."""
        self.threads = Threads(threads, name)
        self._turns: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    async def do(self, session: int, work: Work[T]) -> T:
        """Return the result of `work`, or raise its error."""
        async with self._turns.setdefault(session, asyncio.Lock()):
            while (done := await self.threads.run(_step, work)) is None:
                pass
            return done[0]


def _step(work: Work[T]) -> tuple[T] | None:
    """Return the result, in a tuple, if this was the last step."""
    try:
        next(work)
    except StopIteration as done:
        return (done.value,)
    return None


class HostCopyOrders:
    """`make` and `seal` each post exactly one event."""

    def __init__(
        self,
        copies: HostCopies,
        device: Device,
        connections: Mapping[int, WorkerConnection],
        inbox: Inbox,
    ) -> None:
        """Raises: LimitError."""
        self._copies = copies
        self._chunk_bytes = device.chunk_bytes
        self._connections = connections
        self._inbox = inbox
        #: Progress of the copies of each component, by uid.
        self.progress: dict[int, LoadProgress] = {}
        #: Threads for `make` and `seal`; drops have their own thread.
        self._slices = TimeSlices(2, "swapd-host")
        self._drops = Threads(1, "swapd-drop")
        self._pins = PinReport(copies, device, inbox)

    def make(self, order: actions.MakeHostCopy) -> None:
        uid, session = order.uid, order.session
        old = self._handed_back(order)
        if order.original:
            # also if its session has ended: others may share it before the core knows
            fd = self._copies.share(uid, order.original)
            self._inbox.post(self._send(order, fd, filled=True))
        elif session not in self._connections:  # it has ended meanwhile
            self._inbox.post(events.HostCopyMade(self._inbox.clock(), uid))
        elif order.empty:
            try:
                made = self._send(order, self._copies.make_empty(uid, order.nbytes))
            except HostCopyError as exc:
                made = self._failed(uid, session, exc)
            self._inbox.post(made)
        elif old is not None:
            work = self._copies.adopt(uid, order.nbytes, old)
            self._start(uid, session, work, lambda fd: self._send(order, fd, filled=True))
        else:
            work = self._copies.make(uid, order.nbytes, mutable=order.mutable)
            self._start(uid, session, work, lambda fd: self._send(order, fd))

    def _handed_back(self, order: actions.MakeHostCopy) -> OwnedFd | None:
        """Return a host copy of an earlier daemon that can be used instead of a new one."""
        if (connection := self._connections.get(order.session)) is None:
            return None
        if (old := connection.lifeline.take_handed_back(order.request)) is None:
            return None
        one_of_its_own = not (order.original or order.mutable or order.replaces)
        if one_of_its_own and self._copies.is_adoptable(old.fileno(), order.nbytes):
            return old
        old.close()
        return None

    def seal(self, order: actions.SealHostCopy, session: int) -> None:
        def sealed(_: None) -> AnyEvent:
            self._pins.begin()
            return events.HostCopySealed(self._inbox.clock(), order.uid)

        self._start(order.uid, session, self._copies.seal(order.uid), sealed)

    def keep(self, uid: int) -> None:
        """No component uses the host copy any more, so its progress is closed."""
        if (progress := self.progress.pop(uid, None)) is not None:
            progress.close()

    def drop(self, uid: int, parked: OwnedFd | None = None) -> None:
        """`parked` hangs up when no other process holds the memory of the host copy."""
        self.keep(uid)
        self._copies.announce_drop()
        self._drops.submit(self._drop, uid, parked)  # unmapping gigabytes takes a while

    def _drop(self, uid: int, parked: OwnedFd | None) -> None:
        if parked is not None:
            with parked:
                hung_up = select.poll()
                hung_up.register(parked.fileno(), 0)
                hung_up.poll(LET_GO_S * 1000)
        self._copies.drop(uid)

    def _start(
        self, uid: int, session: int, work: Work[T], event_of: Callable[[T], AnyEvent]
    ) -> None:
        async def carry_out() -> None:
            try:
                event = event_of(await self._slices.do(session, work))
            except (HostCopyError, MemoryError, OSError) as exc:
                event = self._failed(uid, session, exc)
            self._inbox.post(event)

        self._inbox.start(carry_out())

    def _failed(self, uid: int, session: int, error: Exception) -> AnyEvent:
        now = self._inbox.clock()
        if isinstance(error, HostCopyError):
            short = error.code in ("host_memory", "limit")
            return events.HostCopyFailed(now, uid, error.code, str(error), short)
        why = f"the daemon could not: {error or 'no memory'}"
        if isinstance(error, MemoryError) or fds.is_shortage(error):
            return events.HostCopyFailed(now, uid, "limit", f"{why}; try again later", short=True)
        log.error("no host copy for session %d: %s", session, why)
        return events.HostCopyFailed(now, uid, "internal", why)

    def _send(self, order: actions.MakeHostCopy, fd: int, *, filled: bool = False) -> AnyEvent:
        connection, now = self._connections.get(order.session), self._inbox.clock()
        replaced = self.progress.get(order.replaces)
        if connection is None or (order.replaces and replaced is None):
            return events.HostCopyMade(now, order.uid)  # no component needs it any more
        if (unread := connection.lifeline.unread) >= UNREAD_MAX:
            why = f"this session does not read: {counted(unread, 'message')} unread on its lifeline"
            return events.HostCopyFailed(now, order.uid, "bad_request", why)
        try:
            copy = fds.keep(OwnedFd(os.dup(fd)), SPARE_FOR_PEERS)
        except OSError as exc:
            return events.HostCopyFailed(now, order.uid, "limit", fds.why_none(exc))
        try:
            if replaced is not None:
                progress = replaced.share()
            else:
                ends = order.segments or (order.nbytes,)
                progress = LoadProgress(connection.boards, ends, order.nbytes, self._chunk_bytes)
        except IndexError:
            copy.close()
            why = f"a session has {SLOTS} components at most; connect once more for others"
            return events.HostCopyFailed(now, order.uid, "limit", why)
        self.progress[order.uid] = progress
        message = protocol.Master(
            order.name, order.nbytes, progress.slot, order.request, filled, order.certain
        )
        connection.lifeline.send(message, [copy])
        return events.HostCopyMade(now, order.uid)


class PinReport:
    """Posts `HostCopiesPinned` and logs progress while host copies are pinned: a few lines, however
    many there are."""

    def __init__(self, copies: HostCopies, device: Device, inbox: Inbox) -> None:
        self._copies = copies
        self._device = device
        self._inbox = inbox
        self._timer: asyncio.TimerHandle | None = None
        #: Start of the current pinning, and its duration so far or in total.
        self._begun = 0.0
        self._took_s = 0.0
        self._ended = True
        #: Time and figures of the last report.
        self._reported_at = float("-inf")
        self._reported: tuple[int, int, str] = (0, 0, "")

    def begin(self) -> None:
        if self._timer is None and self._device.pinned() is not None:
            self._begun = self._inbox.clock()
            self._ended = False
            self._look_again()

    def _look_again(self) -> None:
        self._timer = self._inbox.loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        now = self._inbox.clock()
        ends = not self._copies.pinning  # read first: pinning goes on meanwhile
        pinned, of = self._device.pinned(), self._copies.to_pin_bytes
        assert pinned is not None
        if not (ends and self._ended):
            self._took_s = now - self._begun
        self._ended = ends
        figures = pinned.nbytes, of, pinned.refused
        if ends and not of:
            self._reported = figures
        if figures != self._reported and self._is_due(now):
            self._reported, self._reported_at = figures, now
            self._report(pinned, of)
        self._timer = None
        if not ends or figures != self._reported:
            self._look_again()

    def _is_due(self, now: float) -> bool:
        long = self._ended or self._took_s >= PERIOD_S
        return long and now - self._reported_at >= PERIOD_S

    def _report(self, pinned: Pinned, of: int) -> None:
        now, took_s = self._reported_at, self._took_s
        self._inbox.post(events.HostCopiesPinned(now, pinned.nbytes, of, took_s, pinned.refused))
        if took_s >= 2 * LOOK_S:  # shorter pinning goes unnoticed
            so_far = "" if self._ended else " so far"
            of_all = f"{size(pinned.nbytes)} of {size(of)}"
            log.info("%s of host copies are pinned%s, after %s", of_all, so_far, seconds(took_s))
