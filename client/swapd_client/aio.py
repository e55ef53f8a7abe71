"""The asyncio client: the same names, awaited."""

import asyncio
import os
import weakref
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from swapd.shared import protocol
from swapd.shared.extras import needed
from swapd.shared.units import parse_size
from swapd_client.client import Source
from swapd_client.errors import (
    ComponentInUse,
    DaemonGone,
    DeviceFailed,
    DeviceMemoryExhausted,
    SwapdError,
)
from swapd_client.faults import explain_if
from swapd_client.lease import HeldLease
from swapd_client.leases.linger import Held, Work
from swapd_client.memory.component import Component
from swapd_client.memory.layout import OtherBytes, Segments
from swapd_client.session.channel import AsyncChannel, ChannelFactory
from swapd_client.session.endpoint import default_label, resolve
from swapd_client.session.lifeline import ANSWER_S
from swapd_client.session.session import Session

if TYPE_CHECKING:
    import torch

    from swapd_client.weights.safetensors import Files

T = TypeVar("T")


async def connect_async(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    label: str | None = None,
    timeout: float = ANSWER_S,
    faults: Literal["explain"] | None = None,
) -> "AsyncClient":
    """As `swapd_client.connect`, for the running event loop."""
    explain_if(faults)
    folder = resolve(endpoint, device)
    session = await asyncio.to_thread(Session, folder, label or default_label(), timeout)
    return AsyncClient(session)


class AsyncLease(HeldLease):
    """As `swapd_client.Lease`; belongs to the task that took it. `release` never blocks."""

    def __init__(
        self,
        client: "AsyncClient",
        granted: protocol.Granted,
        names: tuple[str, ...],
        *,
        workspace: bool = False,
    ) -> None:
        self._client = client
        self._session = client.session
        self._granted = granted
        self._taken = Held(granted)
        self.names = names
        self.is_workspace = workspace
        self._held = True

    async def wait(
        self, segment: int | None = None, *, name: str | None = None, stream: Any = None
    ) -> None:
        """As `Lease.wait`; in a thread if it must wait."""
        if stream is None:
            name = name or self.names[0]
            await asyncio.to_thread(self._session.wait, self._granted, name, segment)
        else:
            # in a thread too: where a stream cannot wait, whoever calls does
            name = name or self.names[0]
            await asyncio.to_thread(self._wait_on_stream, stream, name, segment)

    def release(self) -> None:
        """Give the components back. Raises what `Lease.release` raises."""
        if self._held:
            held, problem = self._end()
            self._client._release(held.granted, held.work)
            if problem is not None:
                raise problem


class Acquiring:
    """An acquire that was not awaited yet: `await` it, or use it in `async with`."""

    def __init__(
        self,
        client: "AsyncClient",
        ask: Callable[[int, int], protocol.Acquire | protocol.AcquireWorkspace],
        names: tuple[str, ...],
        timeout: float | None,
        *,
        workspace: bool = False,
    ) -> None:
        """`ask(id, agent)` makes the request, for the task that awaits it."""
        self._client = client
        self._ask = ask
        self._names = names
        self._timeout = timeout
        self._workspace = workspace
        self._lease: AsyncLease | None = None

    def __await__(self) -> Generator[Any, None, AsyncLease]:
        return self._acquire().__await__()

    async def _acquire(self) -> AsyncLease:
        granted = await self._client._acquire(self._ask, self._timeout)
        return AsyncLease(self._client, granted, self._names, workspace=self._workspace)

    async def __aenter__(self) -> AsyncLease:
        self._lease = await self
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._lease is not None
        with suppress(DaemonGone, DeviceFailed) if exc is not None else nullcontext():
            self._lease.release()


class AsyncClient:
    """A session with one daemon, used from one event loop. Made by `connect_async`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._factory = ChannelFactory(session)
        self._channel = AsyncChannel(self._factory)
        self._loop = asyncio.get_running_loop()
        self._dropped = weakref.finalize(self, session.leave_behind, session.close)
        self._dropped.atexit = False

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
        part_of: str = "",
    ) -> Component:
        """As `Client.register`; the copy runs in a thread."""
        prepare = partial(
            self.session.prepare, name, source, mutable=mutable, segments=segments, part_of=part_of
        )
        part = prepare() if self.session.gpu is None else await _in_thread(prepare)
        await self._move_in([part], policy, group)
        return part

    async def register_family(
        self,
        name: str,
        parts: Mapping[str, Source],
        *,
        policy: protocol.Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        resident: int | str | None = None,
    ) -> list[Component]:
        """As `Client.register_family`; the copies run in a thread."""
        prepare = partial(self.session.prepare_family, name, parts, mutable=mutable)
        prepared = prepare() if self.session.gpu is None else await _in_thread(prepare)
        await self._move_in(prepared, policy, group, lambda: self.set_resident(name, resident))
        return prepared

    async def load(
        self,
        name: str,
        files: "Files",
        module: "torch.nn.Module | None" = None,
        *,
        policy: protocol.Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        segments: Segments = (),
        prefix: str = "",
        rename: Callable[[str], str | None] | None = None,
        dtype: "torch.dtype | None" = None,
        progress: bool | Callable[[int, int], None] | None = None,
    ) -> Component:
        """As `Client.load`; all that reads runs in a thread."""
        with needed("load"):
            from swapd_client.weights import load

        planned = load.planned(
            files,
            module,
            None,
            prefix=prefix,
            rename=rename,
            dtype=dtype,
            segments=segments,
            gpu=self.session.gpu_index,
            progress=progress,
            share=not mutable,
        )
        with ExitStack() as opened:
            layouts = await _in_thread(opened.enter_context, planned)
            return await self.register(
                name, layouts[""], policy=policy, group=group, mutable=mutable
            )

    async def _move_in(
        self,
        parts: list[Component],
        policy: protocol.Policy,
        group: str | None,
        resize: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """As `Client._move_in`."""
        session = self.session
        passing = resize is not None  # until then
        registered: list[Component] = []
        try:
            for part in parts:
                await self._call(session.register_request(part, policy, group, passing=passing))
                registered.append(part)
            for part in parts:
                await _in_thread(session.fill, part)
            for part in parts:
                await self._call(protocol.Commit(session.next_id(), part.name))
            if resize is not None:
                await resize()
        except OtherBytes as lie:
            self._take_out(registered)
            session.start_over(parts, lie)
            return await self._move_in(parts, policy, group, resize)
        except BaseException:
            self._take_out(registered)
            for part in parts:
                session.discard(part)
            raise
        for part in parts:
            session.bind(part)

    def _take_out(self, registered: list[Component]) -> None:
        for part in registered if self.session.error is None else ():
            self._channel.send(protocol.Unregister(self.session.next_id(), part.name))

    async def set_resident(self, name: str, size: int | str | None) -> None:
        """As `Client.set_resident`."""
        nbytes = parse_size(size) if isinstance(size, str) else size
        await self._call(protocol.Resize(self.session.next_id(), name, nbytes))

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

        return Acquiring(self, ask, names, timeout)

    def acquire_workspace(
        self, size: int | str, *, timeout: float | None = None, priority: int = 0
    ) -> Acquiring:
        """As `Client.acquire_workspace`: await it, or `async with` it."""
        nbytes = parse_size(size) if isinstance(size, str) else size

        def ask(request: int, agent: int) -> protocol.AcquireWorkspace:
            return protocol.AcquireWorkspace(request, nbytes, agent, timeout, priority)

        return Acquiring(self, ask, (f"workspace of {size}",), timeout, workspace=True)

    async def prefetch(self, *names: str) -> None:
        """As `Client.prefetch`."""
        await self._call(protocol.Prefetch(self.session.next_id(), names))

    async def unregister(self, name: str) -> None:
        """As `Client.unregister`."""
        for part in self.session.family(name) or [name]:
            await self._unregister(part)

    async def _unregister(self, name: str) -> None:
        session = self.session
        part = session.own(name)
        session.check()
        await asyncio.to_thread(session.drain)
        session.before_unbind(part)
        try:
            await self._call(protocol.Unregister(session.next_id(), name))
        except BaseException:
            part._range.give_memory_back()
            raise
        await _in_thread(session.unbind, part)

    async def forecast(self, *names: str) -> protocol.ForecastReply:
        """As `Client.forecast`."""
        reply = await self._call(protocol.Forecast(self.session.next_id(), names))
        assert isinstance(reply, protocol.ForecastReply)
        return reply

    async def update(self, name: str, values: Mapping[str, Any]) -> None:
        """As `Client.update`; the copies run in a thread."""
        from swapd_client.weights import update

        loop = asyncio.get_running_loop()

        def call(request: protocol.AnyRequest) -> protocol.AnyReply:
            return asyncio.run_coroutine_threadsafe(self._call(request), loop).result()

        asked = update.changes(self.session, name, values)
        await _in_thread(update.apply, self.session, call, asked)

    async def status(self) -> protocol.StatusReply:
        """As `Client.status`."""
        reply = await self._call(protocol.Status(self.session.next_id()))
        assert isinstance(reply, protocol.StatusReply)
        return reply

    async def close(self, *, keep: bool = True) -> None:
        """As `Client.close`."""
        session = self.session
        self._dropped.detach()
        await asyncio.to_thread(session.drain)
        if keep:
            with suppress(DaemonGone):  # then their last bytes are where they were
                await self._take_back_mutable()
        await self._channel.close()
        await asyncio.to_thread(session.close, keep=keep)
        if not session.forked:
            self._factory.close()

    async def _take_back_mutable(self) -> None:
        session = self.session
        mutable = [p for p in session.components.values() if p.mutable]
        if session.error is not None or not mutable:
            return
        for granted in list(session.leases.values()):
            self._release(granted, session.mark(session.current_streams()))
        await asyncio.to_thread(session.drain)
        for part in mutable:
            # in use by another session, no room, or not to be saved: its bytes stay where they are
            with suppress(ComponentInUse, DeviceMemoryExhausted, DeviceFailed):
                await self.unregister(part.name)

    async def _acquire(
        self,
        ask: Callable[[int, int], protocol.Acquire | protocol.AcquireWorkspace],
        timeout: float | None,
    ) -> protocol.Granted:
        """As `Client._acquire`; what blocks is done in a thread."""
        session, task = self.session, id(asyncio.current_task())
        if session.must_wait(task):
            agent = await _in_thread(session.enter, task, timeout)
        else:
            agent = session.enter(task)
        granted = await self._call(ask(session.next_id(), agent.number), timeout)
        assert isinstance(granted, protocol.Granted)
        try:
            if session.must_map(granted):
                await _in_thread(session.granted, granted, agent)
            else:
                session.granted(granted, agent)
        except BaseException:
            with suppress(SwapdError):
                self._release(granted, session.mark(session.current_streams()))
            raise
        return granted

    def _release(self, granted: protocol.Granted, work: Work | None) -> None:
        session = self.session
        if session.ends_later(granted, work, self._give_back_later):
            return
        if session.give_back(granted):
            self._channel.send(protocol.Release(session.next_id(), granted.id))

    def _give_back_later(self, granted: protocol.Granted) -> None:
        """In a thread of the session's; what the loop sends comes in order."""
        if self.session.give_back(granted):
            release = protocol.Release(self.session.next_id(), granted.id)
            with suppress(RuntimeError):  # the loop is closed, and the session will be
                self._loop.call_soon_threadsafe(self._channel.send, release)

    async def _call(
        self, request: protocol.AnyRequest, timeout_s: float | None = None
    ) -> protocol.AnyReply:
        return self.session.unwrap(await self._channel.call(request, timeout_s))


async def _in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Call in a thread; it has ended when this does, also when this is cancelled."""
    calling = asyncio.get_running_loop().run_in_executor(None, call, *arguments)
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        await asyncio.gather(calling, return_exceptions=True)
        raise
