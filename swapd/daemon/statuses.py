"""Answers to `status`: the core's state, and memory figures of the device and the kernel. Changes
nothing."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from swapd import __version__
from swapd.core import Residency, events, explain, status
from swapd.core.chunks import count
from swapd.daemon.dispatch import Inbox
from swapd.daemon.host_copies import NAME, HostCopies
from swapd.daemon.lending import Lender, WorkerConnection
from swapd.device import Device, DeviceError, DeviceLost, MemoryUse
from swapd.log.swap_log import SwapLog
from swapd.shared import protocol
from swapd.shared.system import Threads, private_bytes

#: Components of a status to handle before other work has its turn.
STATUS_STEP = 200

Reply = Callable[[protocol.AnyReply], None]


class Statuses:
    def __init__(
        self,
        core: Residency,
        device: Device,
        copies: HostCopies,
        folder: Path,
        swap_log: SwapLog,
        connections: Mapping[int, WorkerConnection],
        inbox: Inbox,
        lender: Lender,
    ) -> None:
        """Raises: LimitError."""
        self._core = core
        self._device = device
        self._copies = copies
        self._folder = folder
        self._swap_log = swap_log
        self._connections = connections
        self._inbox = inbox
        self._lender = lender
        self._started = inbox.clock()
        self._queries = Threads(1, "swapd-query")
        self._turn = asyncio.Lock()

    def ask(self, request: int, reply: Reply) -> None:
        self._inbox.start(self._answer(request, reply))

    async def _answer(self, request: int, reply: Reply) -> None:
        """Build one answer at a time, with other work in between: its components may show different
        moments."""
        use, private = await self._memory_use()
        ledger = self._core.ledger
        async with self._turn:
            components: list[protocol.ComponentStatus] = []
            everything = list(ledger.components.values())
            for at in range(0, len(everything), STATUS_STEP):
                if at:
                    await asyncio.sleep(0)
                now = self._inbox.clock()
                known = filter(ledger.is_current, everything[at : at + STATUS_STEP])
                components += [status.component_status(ledger, c, now) for c in known]
            reply(self._status(request, use, private, components))

    async def _memory_use(self) -> tuple[MemoryUse, int]:
        """Return the device's memory use, and the bytes of private host copies."""
        pids = {one.lifeline.pid for one in self._connections.values()}
        try:
            use = await self._queries.run(self._device.use)
            return use, await self._queries.run(_private_copies, pids)
        except DeviceLost as exc:
            self._inbox.post(events.DeviceDown(self._inbox.clock(), str(exc)))
            why = explain.device_down(str(exc))
        except (DeviceError, MemoryError, OSError) as exc:
            why = str(exc) or "no memory"
        return MemoryUse(0, 0, (), (why,)), 0

    def _status(
        self,
        request: int,
        use: MemoryUse,
        private: int,
        components: list[protocol.ComponentStatus],
    ) -> protocol.Status:
        ledger, now = self._core.ledger, self._inbox.clock()
        records, lost = self._swap_log.counted()
        chunk = self._device.chunk_bytes
        quarantined = sum(count(runs) for held in ledger.quarantined.values() for runs in held)
        return protocol.Status(
            id=request,
            version=__version__,
            device=self._device.name,
            runtime_dir=str(self._folder),
            swap_log=str(self._swap_log.path),
            isolation="strict" if self._core.rules.strict else "relaxed",
            uptime_s=now - self._started,
            chunk_bytes=chunk,
            budget_bytes=ledger.pool.total * chunk,
            used_bytes=(ledger.pool.total - ledger.pool.free) * chunk,
            peak_bytes=ledger.peak_chunks * chunk,
            quarantined_bytes=quarantined * chunk,
            host_copy_bytes=self._copies.total_bytes,
            private_bytes=private,
            kept=status.kept(ledger),
            keep_host_bytes=ledger.rules.keep_host,
            pinned_bytes=use.pinned,
            unpinned_bytes=use.unpinned,
            device_bytes=use.total,
            device_free_bytes=use.free,
            processes=tuple(protocol.ProcessStatus(*p) for p in use.processes),
            starting=tuple(ledger.sessions[s].label for s, _ in ledger.starts),
            notes=use.notes + self._lender.notes(),
            waiting=len(ledger.queue),
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
            wasted=status.wasted(ledger, now),
            records=records,
            records_lost=lost,
        )


def _private_copies(pids: Iterable[int]) -> int:
    """Return the bytes of host copies that processes map privately: ended registrations whose
    tensors remain. May block for some milliseconds."""
    return sum(private_bytes(pid, NAME) for pid in pids)
