"""The asyncio client: the same names, awaited."""

import asyncio
import os
import warnings
from collections.abc import Callable, Generator
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any

from swapd import protocol
from swapd.units import parse_size
from swapd_client.channel import AsyncChannel, ChannelFactory
from swapd_client.client import Source
from swapd_client.errors import ComponentInUse, DaemonGone, SessionFenced
from swapd_client.layout import Segments
from swapd_client.session import Component, Session, default_label, resolve


async def connect_async(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    label: str | None = None,
) -> "AsyncClient":
    """As `swapd_client.connect`, for the running event loop."""
    folder = resolve(endpoint, device)
    session = await asyncio.to_thread(Session, folder, label or default_label())
    return AsyncClient(session)


class AsyncLease:
    """As `swapd_client.Lease`; belongs to the task that took it. `release` never blocks."""

    def __init__(
        self, client: "AsyncClient", granted: protocol.Granted, names: tuple[str, ...]
    ) -> None:
        self.names = names
        self.waited_s = granted.waited_s
        self.loaded = granted.loaded
        self._client = client
        self._granted = granted
        self._held = True

    def __repr__(self) -> str:
        return f"<AsyncLease {' + '.join(self.names)} {'held' if self._held else 'released'}>"

    def __del__(self) -> None:
        if self._held and self._client.session.error is None:
            warnings.warn(f"{self!r} was never released", ResourceWarning, stacklevel=2)

    @property
    def wanted(self) -> bool:
        """Somebody waits for this memory, and its quantum is over: give way soon."""
        wanted = self._client.session.wanted
        return bool(wanted) and not wanted.isdisjoint(self.names)

    async def wait(self, segment: int | None = None, *, name: str | None = None) -> None:
        """As `Lease.wait`; in a thread if it must wait."""
        session = self._client.session
        await asyncio.to_thread(session.wait, self._granted, name or self.names[0], segment)

    def release(self) -> None:
        """Give the components back. Raises: ForkedClient, SessionFenced, as `Lease.release`."""
        if self._held:
            self._held = False
            self._client._release(self._granted)


class Acquiring:
    """An acquire that was not awaited yet: `await` it, or use it in `async with`."""

    def __init__(
        self,
        client: "AsyncClient",
        ask: Callable[[int, int], protocol.Acquire | protocol.AcquireWorkspace],
        names: tuple[str, ...],
    ) -> None:
        """`ask(id, agent)` makes the request, for the task that awaits it."""
        self._client = client
        self._ask = ask
        self._names = names
        self._lease: AsyncLease | None = None

    def __await__(self) -> Generator[Any, None, AsyncLease]:
        agent = id(asyncio.current_task())
        request = self._ask(self._client.session.next_id(), agent)
        return self._client._acquire(request, self._names).__await__()

    async def __aenter__(self) -> AsyncLease:
        self._lease = await self
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._lease is not None
        with suppress(SessionFenced) if exc is not None else nullcontext():
            self._lease.release()


class AsyncClient:
    """A session with one daemon, used from one event loop. Made by `connect_async`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._factory = ChannelFactory(session)
        self._channel = AsyncChannel(self._factory)

    def __repr__(self) -> str:
        return f"<AsyncClient session={self.session.welcome.session} at {self.session.endpoint}>"

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def register(
        self,
        name: str,
        source: Source,
        *,
        policy: protocol.Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        segments: Segments = (),
    ) -> Component:
        """As `Client.register`; the copy runs in a thread."""
        session = self.session
        part = session.prepare(name, source, mutable=mutable, segments=segments)
        registered = False
        try:
            await self._call(session.register_request(part, policy, group))
            registered = True
            await self._fill(part)
            await self._call(protocol.Commit(session.next_id(), name))
        except BaseException:
            if registered and session.error is None:
                self._channel.send(protocol.Unregister(session.next_id(), name))
            session.discard(part)
            raise
        session.bind(part)
        return part

    async def _fill(self, part: Component) -> None:
        """Fill in a thread; it has ended when this does, also when this is cancelled."""
        filling = asyncio.get_running_loop().run_in_executor(None, self.session.fill, part)
        try:
            await asyncio.shield(filling)
        except asyncio.CancelledError:
            await asyncio.gather(filling, return_exceptions=True)
            raise

    def acquire(
        self,
        *names: str,
        timeout: float | None = None,
        priority: int = 0,
        wait: bool = False,
        early: bool = False,
    ) -> Acquiring:
        """As `Client.acquire`: `await client.acquire("a")`, or `async with` it."""

        def ask(request: int, agent: int) -> protocol.Acquire:
            return protocol.Acquire(request, names, agent, timeout, priority, wait, early)

        return Acquiring(self, ask, names)

    def acquire_workspace(
        self, size: int | str, *, timeout: float | None = None, priority: int = 0
    ) -> Acquiring:
        """As `Client.acquire_workspace`: await it, or `async with` it."""
        nbytes = parse_size(size) if isinstance(size, str) else size

        def ask(request: int, agent: int) -> protocol.AcquireWorkspace:
            return protocol.AcquireWorkspace(request, nbytes, agent, timeout, priority)

        return Acquiring(self, ask, (f"workspace of {size}",))

    async def prefetch(self, *names: str) -> None:
        """As `Client.prefetch`."""
        await self._call(protocol.Prefetch(self.session.next_id(), names))

    async def unregister(self, name: str) -> None:
        """As `Client.unregister`."""
        part = self.session.own(name)
        await self._call(protocol.Unregister(self.session.next_id(), name))
        self.session.unbind(part)

    async def status(self) -> protocol.StatusReply:
        """As `Client.status`."""
        reply = await self._call(protocol.Status(self.session.next_id()))
        assert isinstance(reply, protocol.StatusReply)
        return reply

    async def close(self) -> None:
        """As `Client.close`."""
        session = self.session
        with suppress(DaemonGone):  # then their last bytes are where they were
            await self._take_back_mutable()
        await self._channel.close()
        await asyncio.to_thread(session.close)
        self._factory.close()

    async def _take_back_mutable(self) -> None:
        session = self.session
        mutable = [p for p in session.components.values() if p.mutable]
        if session.error is not None or not mutable:
            return
        for granted in list(session.leases.values()):
            self._release(granted)
        for part in mutable:
            with suppress(ComponentInUse):  # by another session: then copied from the device
                await self.unregister(part.name)

    async def _acquire(
        self, request: protocol.Acquire | protocol.AcquireWorkspace, names: tuple[str, ...]
    ) -> AsyncLease:
        granted = await self._call(request, request.timeout_s)
        assert isinstance(granted, protocol.Granted)
        self.session.granted(granted)
        return AsyncLease(self, granted, names)

    def _release(self, granted: protocol.Granted) -> None:
        if self.session.give_back(granted):
            self._channel.send(protocol.Release(self.session.next_id(), granted.id))

    async def _call(
        self, request: protocol.AnyRequest, timeout_s: float | None = None
    ) -> protocol.AnyReply:
        return self.session.unwrap(await self._channel.call(request, timeout_s))
