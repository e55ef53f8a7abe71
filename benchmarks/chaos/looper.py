"""A worker with an event loop: as `worker.py`, with tasks that are cancelled at any moment.

One client in two stays through all daemons, as in `stayer.py`.
"""

import asyncio
import random

from benchmarks.chaos import worker
from benchmarks.chaos.book import Book
from benchmarks.chaos.worker import LOOK_S, PATIENCE_S
from benchmarks.processes import MIB
from swapd_client import (
    AsyncClient,
    DaemonGone,
    NotRunning,
    SessionEnded,
    SwapdError,
    Timeout,
    connect_async,
)

TASKS = 8


class Looper(worker.Worker):
    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        while not self.enough.is_set():
            self.reconnect_s = self.random.choice((0.0, PATIENCE_S))
            try:
                client = await connect_async(
                    self.endpoint, label=self.name, reconnect=self.reconnect_s
                )
            except (NotRunning, SessionEnded, Timeout):
                await asyncio.sleep(LOOK_S)
                continue
            self.counts.add("sessions")
            self.book = Book(self.name)
            try:
                await self._serve(client)
            except* SwapdError as failed:
                self.judge(client.session.error, _first(failed))
            await client.close()
            self.check_private()

    async def _serve(self, client: AsyncClient) -> None:
        for part in self.book.singles:
            made = await client.register(part.name, part.buffers(0), mutable=part.mutable)
            part.views = {str(i): made.view(str(i)) for i in range(len(part.segments))}
        async with asyncio.TaskGroup() as group:
            for _ in range(TASKS):
                group.create_task(self._work_on(client, random.Random(self.random.random())))

    async def _work_on(self, client: AsyncClient, rng: random.Random) -> None:
        while not self.enough.is_set():
            try:
                await self._once_or_cancelled(client, rng)
            except* DaemonGone:
                if not self.reconnect_s:
                    raise
                self.counts.add("daemons lost")

    async def _once_or_cancelled(self, client: AsyncClient, rng: random.Random) -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._once(client, rng))
            if rng.random() < 0.3:
                await asyncio.wait([task], timeout=rng.choice((0, 0.0005, 0.005)))
                task.cancel()
                self.counts.add("cancelled")

    async def _once(self, client: AsyncClient, rng: random.Random) -> None:
        if rng.random() < 0.05:
            async with client.acquire_workspace(MIB, timeout=PATIENCE_S):
                self.counts.add("workspaces")
            return
        part = rng.choice(self.book.singles)
        since = part.version
        async with client.acquire(part.name, timeout=PATIENCE_S):
            self.counts.add("acquires")
            if rng.random() < 0.2:
                await asyncio.sleep(0)
            # no other task runs until it is written
            self.check(part, part.version if part.mutable else since)
            if part.mutable and rng.random() < 0.5:
                part.write()
                self.counts.add("writes")


def _first(failed: BaseExceptionGroup[SwapdError]) -> SwapdError:
    first = failed.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


if __name__ == "__main__":
    worker.main(Looper)
