"""Carries out the core's orders for host copies, in threads: make, send to be filled, seal, drop.

`masters.py` has the host copies; this module tells the core and the workers, also of failures.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from swapd.core import actions, events
from swapd.core.events import AnyEvent
from swapd.daemon.lifeline import UNREAD_MAX
from swapd.daemon.masters import MasterError, Masters
from swapd.daemon.pinning import Pinning
from swapd.daemon.slices import Slices
from swapd.daemon.worker import Worker
from swapd.shared import fds, protocol
from swapd.shared.board import SLOTS, Progress
from swapd.shared.fds import OwnedFd
from swapd.shared.limits import Pool


class HostCopies:
    """Each order but `drop` comes back as exactly one event."""

    def __init__(
        self,
        masters: Masters,
        workers: Mapping[int, Worker],
        spare: int,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        post: Callable[[AnyEvent], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        """`workers`: by session. `spare`: descriptors that host copies leave to others."""
        self._masters = masters
        self._workers = workers
        self._spare = spare
        self._loop = loop
        self._clock = clock
        self._post = post
        self._crashed = crashed
        #: Progress of the copies of each component, by uid.
        self.progress: dict[int, Progress] = {}
        #: Threads that make and seal in turns; drops have a thread of their own.
        self._turns = Slices(2, "swapd-host")
        self._drops = Pool(1, "swapd-drop")
        self._pinning = Pinning(masters, loop, clock, post)

    def make(self, a: actions.MakeHostCopy) -> None:
        """Make one, or share another's, and send it to the session to be filled."""
        if a.original:
            # also if its session ended meanwhile: others may share this one before that is known
            fd = self._masters.share(a.uid, a.original)
            self._post(self._made(a, fd, filled=True))
        elif a.session not in self._workers:  # it ended meanwhile
            self._post(events.HostCopyMade(self._clock(), a.uid))
        elif a.empty:
            self._post(self._made_empty(a))
        else:
            work = self._masters.making(a.uid, a.nbytes, mutable=a.mutable)
            self._when_done(self._turns.submit(a.session, work), self._made, a)

    def _made_empty(self, a: actions.MakeHostCopy) -> AnyEvent:
        try:
            fd = self._masters.make_empty(a.uid, a.nbytes)
        except MasterError as exc:
            return events.HostCopyFailed(self._clock(), a.uid, exc.code, str(exc))
        return self._made(a, fd)

    def _made(self, a: actions.MakeHostCopy, fd: int, *, filled: bool = False) -> AnyEvent:
        worker = self._workers.get(a.session)
        replaced = self.progress.get(a.replaces)
        if worker is None or (a.replaces and replaced is None):
            return events.HostCopyMade(self._clock(), a.uid)  # no component needs it any more
        if (unread := worker.lifeline.unread) >= UNREAD_MAX:
            why = f"this session does not read: {unread} messages unread on its lifeline"
            return events.HostCopyFailed(self._clock(), a.uid, "bad_request", why)
        try:
            master = fds.keep(OwnedFd(os.dup(fd)), self._spare)
        except OSError as exc:
            return events.HostCopyFailed(self._clock(), a.uid, "limit", fds.why_none(exc))
        try:
            if replaced is not None:
                progress = replaced.share()
            else:
                ends = a.segments or (a.nbytes,)
                progress = Progress(worker.boards, ends, a.nbytes, worker.chunk_bytes)
        except IndexError:
            master.close()
            why = f"this session has {SLOTS} components, and no room for another on its board"
            return events.HostCopyFailed(self._clock(), a.uid, "bad_request", why)
        self.progress[a.uid] = progress
        message = protocol.Master(a.name, a.nbytes, progress.slot, a.request, filled)
        worker.lifeline.send(message, [master])
        return events.HostCopyMade(self._clock(), a.uid)

    def seal(self, a: actions.SealHostCopy, session: int) -> None:
        """The worker has filled one: map it here, read-only if it is clean."""
        future = self._turns.submit(session, self._masters.sealing(a.uid))
        self._when_done(future, self._sealed, a)

    def _sealed(self, a: actions.SealHostCopy, _: None) -> AnyEvent:
        self._pinning.begun()
        return events.HostCopySealed(self._clock(), a.uid)

    def _when_done(
        self, future: "Future[Any]", then: Callable[[Any, Any], AnyEvent], action: Any
    ) -> None:
        """Post the event of `then(action, result)`, or the failure of the host copy."""

        def finish() -> None:
            if future.cancelled():
                return  # the daemon ends
            error = future.exception()
            if isinstance(error, MasterError):
                now = self._clock()
                self._post(events.HostCopyFailed(now, action.uid, error.code, str(error)))
            elif isinstance(error, MemoryError) or fds.is_shortage(error):
                why = f"the daemon could not: {error or 'no memory'}; try again later"
                self._post(events.HostCopyFailed(self._clock(), action.uid, "limit", why))
            elif error is not None:
                self._crashed(error)
            else:
                self._post(then(action, future.result()))

        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(finish))

    def drop(self, uid: int) -> None:
        """Drop a host copy that no component needs."""
        progress = self.progress.pop(uid, None)
        if progress is not None:
            progress.close()
        self._masters.dropping()
        self._drops.submit(self._masters.dropped, uid)  # unmapping gigabytes takes a while

    async def finish(self) -> None:
        """Wait for the current work; no more is begun."""
        self._pinning.close()
        await asyncio.gather(self._turns.finish(), self._drops.finish())

    def shutdown(self) -> None:
        """End the threads. Blocks."""
        self._turns.shutdown()
        self._drops.shutdown()
