"""The asyncio client: the same names, awaited."""

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from swapd.shared import protocol
from swapd.shared.extras import needed
from swapd_client import moving
from swapd_client.aio_leasing import AsyncLeasing
from swapd_client.client import NOTHING, Client, nbytes_of, restore_models
from swapd_client.dropped import close_when_collected
from swapd_client.errors import SessionEnded
from swapd_client.faults import explain_if
from swapd_client.lease import AsyncLease
from swapd_client.leasing import of_components, of_start, of_workspace, prefetch_of
from swapd_client.memory.component import Component
from swapd_client.memory.layout import Segments
from swapd_client.memory.sources import Source
from swapd_client.moving import in_thread
from swapd_client.session.channel import ChannelFactory
from swapd_client.session.lifeline import ANSWER_S
from swapd_client.session.opening import open_session
from swapd_client.session.session import Session
from swapd_client.tracing import check_installed, tracing_of

if TYPE_CHECKING:
    import torch

    from swapd_client.offload.attachment import Attachment
    from swapd_client.offload.settings import OffloadSettings
    from swapd_client.offload.strategy import Kind
    from swapd_client.weights.safetensors import Files

T = TypeVar("T")


async def connect_async(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    label: str | None = None,
    timeout: float = ANSWER_S,
    faults: Literal["explain"] | None = None,
    start: bool = False,
    budget: int | str | None = None,
    tracing: bool | None = None,
) -> "AsyncClient":
    """As `swapd_client.connect`, for the running event loop."""
    explain_if(faults)
    check_installed(tracing)
    session = await asyncio.to_thread(
        open_session, endpoint, device, label, timeout, start=start, budget=budget
    )
    return AsyncClient(session, tracing=tracing)


class Acquiring:
    """An acquire that was not awaited yet: `await` it, or use it in `async with`."""

    def __init__(self, acquire: Callable[[], Coroutine[Any, Any, AsyncLease]]) -> None:
        """`acquire()` asks, for the task that awaits it."""
        self._acquire = acquire
        self._lease: AsyncLease | None = None

    def __await__(self) -> Generator[Any, None, AsyncLease]:
        return self._acquire().__await__()

    async def __aenter__(self) -> AsyncLease:
        self._lease = await self
        return await self._lease.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._lease is not None
        await self._lease.__aexit__(kind, exc, tb)


class AsyncClient:
    """A session with one daemon, used from one event loop. Made by `connect_async`."""

    def __init__(self, session: Session, *, tracing: bool | None = None) -> None:
        self.session = session
        self.leasing = AsyncLeasing(session, ChannelFactory(session), tracing_of(session, tracing))
        self._dropped = close_when_collected(
            self, session, session.leases.in_use, self.leasing.close_dropped
        )
        #: Client of the same session, for calls that run in threads. None before the first.
        self._inner: Client | None = None

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
        steps = moving.register(
            self.session,
            self.leasing.channel.send,
            name,
            source,
            policy,
            group,
            mutable=mutable,
            segments=segments,
            part_of=part_of,
        )
        return Component(await self._take(steps))

    async def register_scratch(
        self,
        name: str,
        size: "int | str | torch.Tensor",
        *,
        policy: protocol.Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        part_of: str = "",
    ) -> Component:
        """As `Client.register_scratch`."""
        what = nbytes_of(size)
        steps = moving.register_scratch(
            self.session,
            self.leasing.channel.send,
            name,
            what,
            policy,
            group,
            mutable=mutable,
            part_of=part_of,
        )
        return Component(await self._take(steps))

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
        steps = moving.register_family(
            self.session,
            self.leasing.channel.send,
            name,
            parts,
            policy,
            group,
            mutable=mutable,
            resident_bytes=nbytes_of(resident),
        )
        return [Component(part) for part in await self._take(steps)]

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
        """As `Client.load`; the reading runs in a thread."""
        steps = moving.load(
            self.session,
            self.leasing.channel.send,
            name,
            moving.Reading(files, module, prefix, rename, dtype, progress),
            policy,
            group,
            mutable=mutable,
            segments=segments,
        )
        return Component(await self._take(steps))

    async def load_family(
        self,
        name: str,
        files: "Files",
        parts: Mapping[str, Iterable[str]],
        module: "torch.nn.Module | None" = None,
        *,
        policy: protocol.Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        resident: int | str | None = None,
        prefix: str = "",
        rename: Callable[[str], str | None] | None = None,
        dtype: "torch.dtype | None" = None,
        progress: bool | Callable[[int, int], None] | None = None,
    ) -> list[Component]:
        """As `Client.load_family`; the reading runs in a thread."""
        steps = moving.load_family(
            self.session,
            self.leasing.channel.send,
            name,
            moving.Reading(files, module, prefix, rename, dtype, progress),
            parts,
            policy,
            group,
            mutable=mutable,
            resident_bytes=nbytes_of(resident),
        )
        return [Component(part) for part in await self._take(steps)]

    async def resize(
        self, name: str, size: int | str | None, *, timeout: float | None = None
    ) -> None:
        """As `Client.resize`."""
        request = protocol.Resize(self.session.next_id(), name, nbytes_of(size))
        await self.leasing.question(request, timeout)

    async def pin(self, name: str, *, timeout: float | None = None) -> None:
        """As `Client.pin`."""
        await self.leasing.question(protocol.Pin(self.session.next_id(), name), timeout)

    async def unpin(self, name: str, *, timeout: float | None = None) -> None:
        """As `Client.unpin`."""
        await self.leasing.question(protocol.Pin(self.session.next_id(), name, unpin=True), timeout)

    async def evict(self, name: str, *, timeout: float | None = None) -> None:
        """As `Client.evict`."""
        await self.leasing.question(protocol.EvictNow(self.session.next_id(), name), timeout)

    def acquire(
        self,
        *names: str,
        timeout: float | None = None,
        priority: int = 0,
        await_registration: bool = False,
        early: bool = False,
    ) -> Acquiring:
        """As `Client.acquire`: `await client.acquire("a")`, or `async with` it."""
        session = self.session
        asked = of_components(session, names, timeout, priority, await_registration, early)
        return Acquiring(partial(self.leasing.acquire, asked))

    def acquire_workspace(
        self, size: int | str, *, timeout: float | None = None, priority: int = 0
    ) -> Acquiring:
        """As `Client.acquire_workspace`: await it, or `async with` it."""
        asked = of_workspace(nbytes_of(size), size, timeout, priority)
        return Acquiring(partial(self.leasing.acquire, asked))

    def acquire_start(self, *, timeout: float | None = None) -> Acquiring:
        """As `Client.acquire_start`: await it, or `async with` it."""
        return Acquiring(partial(self.leasing.acquire, of_start(timeout)))

    async def prefetch(self, *names: str, over: Collection[str] | None = None) -> None:
        """As `Client.prefetch`."""
        await self.leasing.call(prefetch_of(self.session.next_id(), names, over))

    async def unregister(self, name: str) -> None:
        """As `Client.unregister`."""
        for part in self.session.registry.family(name) or [name]:
            if self._inner is not None:
                await in_thread(self._inner.leasing.flush_kept)
            await self._take(moving.unregister(self.session, part))

    async def forecast(self, *names: str, timeout: float | None = None) -> protocol.ForecastReply:
        """As `Client.forecast`."""
        reply = await self.leasing.question(
            protocol.Forecast(self.session.next_id(), names), timeout
        )
        assert isinstance(reply, protocol.ForecastReply)
        return reply

    async def update(self, name: str, values: Mapping[str, Any]) -> None:
        """As `Client.update`; it runs in a thread."""
        await in_thread(self._have_inner().update, name, values)

    async def attach(
        self,
        model: object,
        components: str | Sequence[str] | None = None,
        *,
        settings: "OffloadSettings | None" = None,
        prefix: str = "",
        policy: protocol.Policy = "lru",
        resident: int | str | Mapping[str, int | str] | None = None,
        blocks: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        wrap_methods: Mapping[str, Sequence[str]] | Sequence[str] = (),
        extra_tensors: Sequence[str] = (),
        kinds: "Mapping[str, Kind]" = NOTHING,
        stay: Sequence[str] = (),
        trainable: bool | str | Sequence[str] | None = None,
        **flags: Any,
    ) -> "Attachment":
        """As `Client.attach`; it runs in a thread.

        A call of the model computes, and waits for its components, in the calling thread. So call
        it in a thread, too: `await asyncio.to_thread(model, x)`.
        """
        with needed("attach"):
            import torch
        if trainable is None and not torch.is_grad_enabled():
            trainable = False  # the mode of this thread: another thread's may differ
        attach = partial(
            self._have_inner().attach,
            settings=settings,
            prefix=prefix,
            policy=policy,
            resident=resident,
            blocks=blocks,
            wrap_methods=wrap_methods,
            extra_tensors=extra_tensors,
            kinds=kinds,
            stay=stay,
            trainable=trainable,
            **flags,
        )
        return await in_thread(attach, model, components)

    async def status(self, *, timeout: float | None = None) -> protocol.StatusReply:
        """As `Client.status`."""
        reply = await self.leasing.question(protocol.Status(self.session.next_id()), timeout)
        assert isinstance(reply, protocol.StatusReply)
        return reply

    async def close(self, *, keep: bool = True) -> None:
        """As `Client.close`."""
        session, inner = self.session, self._inner
        self._dropped.detach()
        if not session.forked:
            if inner is not None:
                await asyncio.to_thread(inner.leasing.keep_no_more)
            await asyncio.to_thread(session.leases.drain)
            if keep:
                with suppress(SessionEnded):  # then the last bytes are already private
                    await self._take(moving.take_back_mutable(session, self.leasing.end))
        await self.leasing.channel.close()
        await asyncio.to_thread(session.close, keep=keep)
        if inner is not None:
            restore_models(inner)
        if not session.forked:
            self.leasing.factory.close()
            await asyncio.to_thread(self.leasing.tracing.close)

    def _have_inner(self) -> Client:
        if self._inner is None:
            leasing = self.leasing
            inner = Client(self.session, leasing.factory, tracing=leasing.tracing)
            inner.dropped.detach()
            self._dropped.detach()  # attached models keep the inner client
            self._dropped = close_when_collected(
                inner, self.session, inner.leasing.in_use, leasing.close_dropped
            )
            self._inner = inner
        return self._inner

    async def _take(self, steps: moving.Steps[T]) -> T:
        return await moving.take_awaited(steps, self.leasing.call)
