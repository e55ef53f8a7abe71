"""Answers to `status`: the core's state, and the device's and the kernel's figures on memory.

Lives here: asking the device in a thread, and building an answer in turns with other work. Changes
nothing.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from swapd import __version__
from swapd.core import Residency, events, explain, status
from swapd.core.events import AnyEvent
from swapd.daemon.masters import NAME, Masters
from swapd.device import Device, DeviceError, DeviceLost, MemoryUse
from swapd.shared import fds, protocol
from swapd.shared.config import Config
from swapd.shared.limits import Pool
from swapd.shared.system import private_bytes

T = TypeVar("T")

#: Components to look at for a status before other work has its turn.
STATUS_STEP = 200


class Statuses:
    """The status answers of one daemon."""

    def __init__(
        self,
        core: Residency,
        device: Device,
        masters: Masters,
        config: Config,
        folder: Path,
        swap_log: Path,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        *,
        pids: Callable[[], Collection[int]],
        notes: Callable[[], tuple[str, ...]],
        records: Callable[[], tuple[int, int]],
        reply: Callable[[int, int, protocol.AnyReply], None],
        post: Callable[[AnyEvent], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        """`pids()`: processes that have a session; `notes()`: further notes.
        `records()`: number of records of the swap log, and of those its file lost. `reply(session,
        request, reply)` sends an answer."""
        self._core = core
        self._device = device
        self._masters = masters
        self._config = config
        self._folder = folder
        self._swap_log = swap_log
        self._loop = loop
        self._clock = clock
        self._pids = pids
        self._notes = notes
        self._records = records
        self._reply = reply
        self._post = post
        self._crashed = crashed
        self._started = clock()
        self._queries = Pool(1, "swapd-query")
        #: Requests, each with the device's memory use and the bytes of private copies.
        self._asked: asyncio.Queue[tuple[int, int, MemoryUse, int]] = asyncio.Queue()

    def ask(self, session: int, request: int) -> None:
        """Answer a status when the device has reported its memory use, which may take a while."""

        def answer(asked: "Future[tuple[MemoryUse, int]]") -> None:
            if not asked.cancelled():
                self._loop.call_soon_threadsafe(self._device_said, session, request, asked)

        self._queries.submit(self._memory_use, self._pids()).add_done_callback(answer)

    def _memory_use(self, pids: Collection[int]) -> tuple[MemoryUse, int]:
        """The device's memory use, and the bytes of host copies that these processes keep
        privately. In a thread."""
        return self._device.use(), _private_copies(pids)

    def _device_said(
        self, session: int, request: int, asked: "Future[tuple[MemoryUse, int]]"
    ) -> None:
        private = 0
        error = asked.exception()
        if isinstance(error, DeviceLost):
            self._post(events.DeviceDown(self._clock(), str(error)))
            use = MemoryUse(0, 0, (), (explain.device_down(str(error)),))
        elif isinstance(error, DeviceError | MemoryError) or fds.is_shortage(error):
            use = MemoryUse(0, 0, (), (str(error) or "no memory",))
        elif error is not None:
            return self._crashed(error)
        else:
            use, private = asked.result()
        self._asked.put_nowait((session, request, use, private))

    async def run(self) -> None:
        """Answer requests one after the other, a few components at a time, with other work in
        between.

        So two components in one answer may be of two moments.
        """
        while True:
            session, request, use, private = await self._asked.get()
            ledger = self._core.ledger
            components: list[protocol.ComponentStatus] = []
            for some in _batched(list(ledger.components.values()), STATUS_STEP):
                if components:
                    await asyncio.sleep(0)
                now, known = self._clock(), filter(ledger.is_current, some)
                components += [status.component_status(ledger, c, now) for c in known]
            self._reply(session, request, self._status(request, use, private, components))

    def _status(
        self,
        request: int,
        use: MemoryUse,
        private: int,
        components: list[protocol.ComponentStatus],
    ) -> protocol.StatusReply:
        ledger, now = self._core.ledger, self._clock()
        records, lost = self._records()
        chunk = self._device.chunk_bytes
        quarantined = sum(
            n for held in ledger.quarantined.values() for runs in held for _, n in runs
        )
        return protocol.StatusReply(
            id=request,
            version=__version__,
            device=self._device.name,
            runtime_dir=str(self._folder),
            swap_log=str(self._swap_log),
            isolation=self._config.isolation,
            uptime_s=now - self._started,
            chunk_bytes=chunk,
            budget_bytes=ledger.pool.total * chunk,
            used_bytes=(ledger.pool.total - ledger.pool.free) * chunk,
            peak_bytes=ledger.peak_chunks * chunk,
            quarantined_bytes=quarantined * chunk,
            host_copy_bytes=self._masters.total_bytes,
            private_bytes=private,
            pinned_bytes=use.pinned,
            unpinned_bytes=use.unpinned,
            device_bytes=use.total,
            device_free_bytes=use.free,
            processes=tuple(protocol.ProcessStatus(*p) for p in use.processes),
            starting=tuple(ledger.sessions[s].label for s, _ in ledger.starts),
            notes=use.notes + self._notes(),
            waiting=len(self._core.admission.queue),
            loads=ledger.loads,
            evictions=ledger.evictions,
            hits=ledger.hits,
            bytes_in=ledger.lane_in.nbytes,
            bytes_out=ledger.lane_out.nbytes,
            components=tuple(components),
            sessions=tuple(status.session_status(ledger, s) for s in ledger.sessions),
            waits=status.waits(self._core, now),
            copies=status.copies(ledger, now),
            counts=ledger.counts,
            records=records,
            records_lost=lost,
        )

    async def finish(self) -> None:
        """Wait for the current question to the device; no more answers are sent."""
        await self._queries.finish()

    def shutdown(self) -> None:
        """End the thread. Blocks."""
        self._queries.shutdown()


def _batched(things: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """`things`, at most so many at a time."""
    return (things[at : at + most] for at in range(0, len(things), most))


def _private_copies(pids: Iterable[int]) -> int:
    """Bytes of host copies that these processes have mapped privately: former registrations whose
    tensors are still there. May block for some milliseconds."""
    return sum(private_bytes(pid, NAME) for pid in pids)
