"""What a simulated process does with its session, from its start to its end."""

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from swapd.shared import protocol, runtime_dir
from swapd.shared.fds import OwnedFd, send_packet
from tests.simulation.client import Client, Lease, Part, Refusal, SessionOver
from tests.simulation.machine import Machine, SimulatedDevice

#: How late an acquire with a timeout may be answered, and how late the daemon may read a release.
TIMELY_S, LATE_S = 3.0, 30.0
POLICIES = ("lru", "lru", "lru", "permanent", "sequential", "alternating")


class Worker(Client):
    def __init__(
        self, machine: Machine, device: SimulatedDevice, pid: int, shared: list[str]
    ) -> None:
        """`shared`: the names of all workers."""
        super().__init__(machine, device, pid)
        self._shared = shared
        #: Acquires that wait, and leases that have ended.
        self._waiting: dict[int, Lease] = {}
        self._ended: list[Lease] = []
        self._agents: list[asyncio.Task[None]] = []
        self._dead = False

    # --- components ----------------------------------------------------------------------

    async def register(self) -> None:
        rng, name = self.rng, f"{'abcd'[self.last % 4]}{self.pid}.{self.last}"
        nbytes, mutable = rng.choice((1, 9, 16, 20, 33, 48, 70)), rng.random() < 0.4
        scratch = rng.choice(("", "", "dropped", "saved")) if mutable else ""
        content = "" if mutable else rng.choice(("", "", "X", "Y"))
        policy = rng.choice(POLICIES if nbytes < 40 else ("lru",))
        group = "g" if policy == "alternating" else None
        same = f"{content}{nbytes}".encode() * 99 if content else rng.randbytes(nbytes)
        if not mutable and rng.random() < 0.2:
            self._hand_back(same[:nbytes])
        request = self.send(
            *(protocol.Register, name, nbytes), policy=policy, group=group, mutable=mutable,
            content=content, scratch=scratch,
        )  # fmt: skip
        part = Part(request, same[:nbytes])
        await self.answer(request)
        await self._fill(part, request.id)
        self.parts[name] = part
        try:
            await self.ask(protocol.Commit, name)
        except Refusal:
            del self.parts[name]
            part.master.close()  # type: ignore[union-attr]
            raise
        if scratch:
            part.versions = [bytes(nbytes)]
        self._shared.append(name)

    def _hand_back(self, content: bytes) -> None:
        """Give the daemon a host copy of an earlier one, for the next request."""
        with OwnedFd(os.memfd_create("old", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)) as fd:
            os.write(fd.fileno(), content)
            if self.rng.random() < 0.9:
                fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            self.tell(protocol.HandBack(self.last + 1), (fd.fileno(),))

    async def _fill(self, part: Part, request: int) -> None:
        """Fill the new host copy with the last version."""
        await self.until(lambda: request in self.masters)
        message, fd = self.masters.pop(request)
        if part.master is not None:
            part.master.close()
        part.master, part.slot = fd, message.slot
        content = part.versions[-1]
        if message.filled and part.on_host() != content:
            self.machine.fail(f"{self} shares other bytes as {part.name}")
        elif not message.filled and part.scratch != "dropped":
            os.pwrite(fd.fileno(), content[: part.nbytes // 2], 0)
            await self.nap(0.002)
            os.pwrite(fd.fileno(), content, 0)

    async def update(self) -> None:
        clean = [p for p in self.parts.values() if not p.mutable and not p.changing]
        if not clean:
            return
        part = self.rng.choice(clean)
        part.changing = True
        try:
            began = self.send(protocol.Update, part.name)
            await self.answer(began)
            await self.until(lambda: began.id in self.masters)
            if self.rng.random() < 0.2:
                self.masters.pop(began.id)[1].close()
                await self.ask(protocol.GiveUp, part.name, began.id)
                return
            part.versions.append(self.rng.randbytes(part.nbytes))
            await self._fill(part, began.id)
            await self.ask(protocol.Commit, part.name)
            part.committed = len(part.versions) - 1
        finally:
            part.changing = False

    async def unregister(self) -> None:
        held = {name for lease in self.leases.values() for name in lease.names}
        idle = [p for p in self.parts.values() if not p.changing and p.name not in held]
        if not idle:
            return
        part = self.rng.choice(idle)
        part.changing = True
        try:
            await self.ask(protocol.Unregister, part.name)
        finally:
            part.changing = False
        del self.parts[part.name]
        if part.mapped is not None and (part.mutable or self.device.strict):
            self.machine.fail(f"{self}: {part.name} is unregistered and mapped")
        self.unmap(part)
        part.master.close()  # type: ignore[union-attr]

    # --- leases --------------------------------------------------------------------------

    async def use(self, agent: int, depth: int = 0) -> None:
        """Acquire, look at the bytes, write some, release."""
        rng = self.rng
        own = [p.name for p in self.parts.values() if not p.changing]
        names = rng.sample(own, min(len(own), rng.choice((1, 1, 2))))
        if self._shared and (rng.random() < 0.25 or not names):
            names = list(dict.fromkeys([*names[:1], rng.choice(self._shared)]))
        mutable = any(self.parts[n].mutable for n in names if n in self.parts)
        timeout_s = rng.choice((None, 5.0) if depth else (None, None, None, 0.0, 0.3, 20.0))
        request = self.send(
            *(protocol.Acquire, tuple(names), agent, timeout_s, rng.choice((0, 0, 0, 1))),
            early=not mutable and rng.random() < 0.3, traced=rng.random() < 0.2,
        )  # fmt: skip
        since = {n: self.parts[n].committed for n in names if n in self.parts}
        lease = self._waiting[request.id] = Lease(request.names, since)
        # what its session holds, or the daemon may think that it holds, it may see again
        asked_at = self.loop.time()
        self._ended = [one for one in self._ended if one.ended_at > asked_at - LATE_S]
        for other in (*self._ended, *self.leases.values()):
            lease.may_see(other)
        if rng.random() < 0.1:
            self.loop.call_later(rng.choice((0, 0.001, 0.1)), self._cancel, request.id)
        try:
            granted = await self.answer(request)
        finally:
            del self._waiting[request.id]
            if timeout_s is not None and self.loop.time() > asked_at + timeout_s + TIMELY_S:
                self.blame(f"hears late of {request}")
        if granted is not None:
            for other in self._waiting.values():
                other.may_see(lease)
            await self._hold(lease, granted, agent, depth)

    def _cancel(self, request: int) -> None:
        if request in self.pending and not self.over:
            self.cancelled.add(request)
            self.pending.pop(request).set_result(None)
            self.send(protocol.Cancel, request)

    async def _hold(self, lease: Lease, granted: protocol.Granted, agent: int, depth: int) -> None:
        self.leases[granted.id] = lease
        lease.granted = {place.name: place.generation for place in granted.placements}
        try:
            for place in granted.placements:
                await self.map(place, lease)
            for _ in range(self.rng.choice((0, 1, 2))):
                self.check(lease)
                for part in lease.parts:
                    if part.mutable and part.mapped in lease.mapped and not self.over:
                        self.write(part)
                await self.nap(self.rng.choice((0.001, 0.02, 0.3)))
            if depth < 2 and not self.machine.calm and self.rng.random() < 0.25:
                with suppress(Refusal):
                    await self.use(agent, depth + 1)
            self.check(lease)
        finally:
            del self.leases[granted.id]
            for mapped in lease.mapped:
                mapped.held -= 1
            lease.ended_at = self.loop.time()
            self._ended.append(lease)
            self._release(granted.id)

    def _release(self, lease: int) -> None:
        release = protocol.Release(0, lease)
        self.machine.note(self, release)
        if self.rng.random() < 0.3:
            self.tell(protocol.ReleaseKept((release,)))
        elif not self.over:
            self.channels[0].send(protocol.encode(release))

    async def workspace(self, agent: int) -> None:
        nbytes, timeout_s = self.rng.choice((1, 20, 50)), self.rng.choice((None, 5.0))
        granted = await self.ask(protocol.AcquireWorkspace, nbytes, agent, timeout_s)
        await self.nap(self.rng.choice((0.01, 0.3)))
        self._release(granted.id)

    async def start(self) -> None:
        granted = await self.ask(protocol.AcquireStart, self.rng.choice((None, 1.0)))
        await self.nap(0.1)
        self._release(granted.id)

    async def small(self) -> None:
        """A request that is answered at once."""
        rng, names = self.rng, self._shared[-8:] or ["?"]
        name, other = rng.choice(names), rng.choice(names)
        some: list[tuple[Any, ...]] = [
            (protocol.Prefetch, (name, other)),
            (protocol.Prefetch, (name,), (other,), 1.0),
            (protocol.ForecastRequest, (name,)),
            (protocol.StatusRequest,),
            (protocol.Pin, name, rng.random() < 0.7),
            (protocol.EvictNow, name),
            (protocol.Follows, (name,), other),
        ]
        await self.ask(*rng.choice(some))

    async def misbehave(self) -> None:
        """It asks without reading, or sends what is no message."""
        self.guilty, what = True, self.rng.random()
        if what < 0.5:
            self.deaf(self.rng.choice((5.0, 200.0)))
            asked = [self.send(protocol.StatusRequest).id for _ in range(80)]
            await asyncio.gather(*[self.pending[number] for number in asked])
        elif what < 0.8:
            self.channels[0].send(self.rng.randbytes(9))
        elif self.line is not None:
            with suppress(OSError):
                send_packet(self.line, self.rng.randbytes(9))

    # --- life ----------------------------------------------------------------------------

    async def live(self, steps: int) -> None:
        """All of it but its end."""
        with suppress(SessionOver, asyncio.CancelledError):
            await self.join()
            for _ in range(self.rng.choice((1, 2, 3))):
                with suppress(Refusal):
                    await self.register()
            count = self.rng.choice((1, 1, 2))
            agents = [self._agent(agent, steps // count) for agent in range(count)]
            self._agents = [self.loop.create_task(agent) for agent in agents]
            await asyncio.gather(*self._agents)

    async def _agent(self, agent: int, steps: int) -> None:
        with suppress(SessionOver):
            for _ in range(steps):
                if self.machine.calm:
                    return
                with suppress(Refusal):
                    await self._step(agent)
                await self.nap(self.rng.choice((0, 0.001, 0.05, 1.5)))

    def _step(self, agent: int) -> Coroutine[Any, Any, None]:
        chance = self.rng.random()
        if 0.6 < chance < 0.63:
            self.deaf(self.rng.choice((0.1, 1.0, 90.0)))
        steps: tuple[tuple[float, Callable[[], Coroutine[Any, Any, None]]], ...] = (
            (0.5, lambda: self.use(agent)),
            (0.56, lambda: self.workspace(agent)),
            (0.63, self.update),
            (0.70, self.unregister),
            (0.78, self.register),
            (0.81, self.small if self.leases else self.start),
            (0.82, self.misbehave),
            (1.0, self.small),
        )
        return next(step for bound, step in steps if chance < bound)()

    def check_saved(self) -> None:
        """The daemon has stopped: what was written is in the host copy, or in memory that stays."""
        if self.over or self.board is None or self.machine.failed & {"copy_out", "lost"}:
            return
        held = {name for lease in self.leases.values() for name in lease.granted}
        for part in self.parts.values():
            if not part.mutable or part.scratch or part.changing or part.name in held:
                continue
            at = part.place
            saved = at is None or self.board.is_saved(part.slot, at.generation)
            if (found := part.on_host() if saved else self.read(part)) != part.versions[-1]:
                self.machine.fail(f"{self}: the daemon stopped, and {part.name} has {found!r}")

    async def leave(self) -> None:
        """It ends its session, if it has one, and lets go of all memory; or it is killed."""
        if not self.guilty and len(self.channels) == 1:
            with suppress(SessionOver, Refusal):
                await self.ask(protocol.StatusRequest)
                if left := self.machine.unanswered(self.pid) - self.pending.keys():
                    self.machine.fail(f"{self} has its answers, and the daemon keeps {left}")
        if self._dead or self.rng.random() < 0.3:
            return self.die()
        self.machine.note(self, "is leaving")
        self._close()
        await self.nap(0.1)
        for part in self.parts.values():
            self.unmap(part)
        with suppress(SessionOver, OSError):
            self.letting_go = self.connect(socket.SOCK_SEQPACKET, runtime_dir.LIFELINE)
            send_packet(self.letting_go, protocol.encode(protocol.SessionUnmapped(self.token)))
        self._dead = True
        self.loop.call_later(self.rng.choice((2, 30)), self._exit)

    def die(self) -> None:
        """It is killed: its connections end in some order, and then the process."""
        if self._dead:
            return
        self.machine.note(self, "is killed")
        self._dead = True
        if self.channels and self.rng.random() < 0.2:
            self.channels[0].send(bytes(40)[: self.rng.randrange(40)])
        self._close()
        if self.rng.random() < 0.7:
            self.machine.ending.add(self.pid)
        self.loop.call_later(self.rng.choice((0, 0.01, 0.5, 5)), self._exit)

    def _close(self) -> None:
        self.leaving = True
        for task in self._agents:
            task.cancel()
        self.close_files()
        self.end()

    def close_files(self) -> None:
        socks = [self.line, self.letting_go, *(c.sock for c in self.channels)]
        self.rng.shuffle(socks)
        for sock in socks:
            if sock is not None and sock.fileno() >= 0:
                self.loop.remove_reader(sock.fileno())
                sock.close()
        for fd in [fd for _, fd in self.masters.values()] + [p.master for p in self.parts.values()]:
            if fd is not None:
                fd.close()
        self.masters.clear()

    def _exit(self) -> None:
        """The process ends: it writes to all that it can, and nothing of it is mapped any more."""
        mapped = [p.mapped for p in self.parts.values() if p.mapped and p.mapped.writable]
        written = {c for one in mapped for c in one.chunks}
        self.device.spoil(written)
        if self.device.outlasts:
            self.device.haunt(written)
        for part in self.parts.values():
            self.unmap(part)
        self.machine.ending.add(self.pid)
        self.machine.ended.add(self.pid)
        os.eventfd_write(self.machine.ends[self.pid], 1)
