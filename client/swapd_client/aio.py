"""The asyncio client: the same names, awaited.

Acquires, and questions that the daemon answers at once, are awaited on a channel of the loop. All
other calls are those of the synchronous client of the same session, in threads: also those that
first end the leases which model calls keep.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial, wraps
from threading import get_ident
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from swapd.shared import protocol
from swapd_client import agents, rejoining
from swapd_client.async_lease import Acquiring, AsyncLease
from swapd_client.cancellation import cancellable, in_thread
from swapd_client.checks import Uncopied, check_seconds
from swapd_client.client import Client, restore_models
from swapd_client.errors import DaemonGone, InvalidArgument, SwapdError
from swapd_client.faults import explain_if
from swapd_client.finalizers import close_when_collected
from swapd_client.interrupts import to_its_end
from swapd_client.lease_request import (
    PREFETCH_TIMEOUT_S,
    LeaseRequest,
    Progress,
    cheapest_first,
    each_once,
    few,
    granted,
    nbytes_of,
    of_components,
    of_start,
    of_workspace,
    prefetch_of,
    record_of,
)
from swapd_client.leases.record import Record
from swapd_client.leasing import Leasing
from swapd_client.memory.component import Component
from swapd_client.registration import end, unregister
from swapd_client.session.disabled import LoopChannel
from swapd_client.session.lifeline import ANSWER_S
from swapd_client.session.loop_channel import AsyncChannel
from swapd_client.session.session import Session
from swapd_client.session.starting import open_session, seconds_to_wait
from swapd_client.tracing import Trace, check_installed
from swapd_client.wait_forecasts import tell

T = TypeVar("T")
P = ParamSpec("P")

#: A loop that is busy for longer (seconds) keeps the channel of a collected client open.
CLOSE_S = 60.0


async def connect_async(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    label: str | None = None,
    timeout: float = ANSWER_S,
    faults: Literal["explain"] | None = "explain",
    start: bool = False,
    budget: int | str | None = None,
    tracing: bool | None = None,
    disabled: bool | None = None,
    reconnect: float | None = None,
) -> "AsyncClient":
    """As `swapd_client.connect`, for the running event loop: no wait blocks the loop."""
    explain_if(faults)
    check_installed(tracing)
    reconnect_s = seconds_to_wait(reconnect)
    connect = partial(
        open_session, endpoint, device, label, timeout, disabled, start=start, budget=budget
    )
    session = await in_thread(connect, undo=lambda session: Client(session).close())
    return AsyncClient(session, tracing=tracing, reconnect_s=reconnect_s)


def _in_thread(
    method: Callable[Concatenate[Client, P], T],
    undo: Callable[[Client, T], object] = lambda *_: None,
) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    @wraps(method)
    async def call(self: "AsyncClient", /, *arguments: P.args, **options: P.kwargs) -> T:
        return await self._in_thread(partial(method, self._client, *arguments, **options), undo)

    return call


def _unregister(client: Client, made: Component | list[Component]) -> None:
    for component in made if isinstance(made, list) else [made]:
        unregister(client.leasing, component.name)


class AsyncClient(Uncopied, AbstractAsyncContextManager["AsyncClient"]):
    """A session with one daemon, used from one event loop. Made by `connect_async`.

    A cancelled call ends before its task does, and changes nothing. An attached model computes, and
    waits for its components, in the thread that calls it. So call it in a thread, too: `await
    asyncio.to_thread(model, x)`.
    """

    def __init__(
        self, session: Session, *, tracing: bool | None = None, reconnect_s: float = 0.0
    ) -> None:
        self._client = client = Client(session, tracing=tracing, reconnect_s=reconnect_s)
        self._leasing = self._leasing_of(client)
        self._joining = asyncio.Lock()

    @property
    def session(self) -> Session:
        """The session. When the client joins the next daemon, another one takes its place."""
        return self._client.session

    @property
    def leasing(self) -> "AsyncLeasing":
        """The requests and leases of its tasks. Use it in the loop only."""
        if self._leasing.session is not self.session:
            self._leasing = self._leasing_of(self._client)
        return self._leasing

    def _leasing_of(self, client: Client) -> "AsyncLeasing":
        leasing = AsyncLeasing(client.leasing)
        client.dropped.detach()
        client.dropped = close_when_collected(
            client, leasing.session, client.leasing.in_use, leasing.close_dropped
        )
        return leasing

    def __repr__(self) -> str:
        return f"<AsyncClient session={self.session.welcome.session} at {self.session.endpoint}>"

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    register = _in_thread(Client.register, _unregister)
    register_scratch = _in_thread(Client.register_scratch, _unregister)
    register_family = _in_thread(Client.register_family, _unregister)
    load = _in_thread(Client.load, _unregister)
    load_family = _in_thread(Client.load_family, _unregister)
    unregister = _in_thread(Client.unregister)
    update = _in_thread(Client.update)
    resize = _in_thread(Client.resize)
    evict = _in_thread(Client.evict)
    attach = _in_thread(Client.attach, lambda _, attachment: attachment.detach())

    def acquire(
        self,
        *names: str,
        timeout: float | None = None,
        priority: int = 0,
        await_registration: bool = False,
        early: bool = False,
        overtake: int | None = None,
        progress: Progress | None = None,
        deadline: float | None = None,
    ) -> Acquiring:
        """As `Client.acquire`: `await client.acquire("a")`, or `async with` it.

        Exceptions of `progress` go to the loop's exception handler.
        """
        how = (timeout, priority, await_registration, early, overtake, progress, deadline)
        return self._acquiring(of_components(self.session, names, *how))

    def acquire_workspace(
        self, size: int | str, *, timeout: float | None = None, priority: int = 0
    ) -> Acquiring:
        """As `Client.acquire_workspace`: await it, or `async with` it."""
        return self._acquiring(of_workspace(nbytes_of(size), size, timeout, priority))

    def acquire_start(self, *, timeout: float | None = None) -> Acquiring:
        """As `Client.acquire_start`: await it, or `async with` it."""
        return self._acquiring(of_start(timeout), flush=True)

    def _acquiring(self, asked: LeaseRequest, *, flush: bool = False) -> Acquiring:
        """`flush`: first end leases that model calls keep, which would count as use."""

        async def acquire() -> AsyncLease:
            if flush:
                await cancellable(self._client.leasing.end_kept)
            return await self.leasing.acquire(asked)

        return Acquiring(partial(self._repeated, acquire, asked.timeout_s))

    async def prefetch(
        self,
        *names: str,
        over: Collection[str] | None = None,
        timeout: float | None = PREFETCH_TIMEOUT_S,
    ) -> None:
        """As `Client.prefetch`."""
        await self._ask(lambda number: prefetch_of(number, names, over, timeout))

    async def follows(self, *names: str, after: str) -> None:
        """As `Client.follows`."""
        await self._ask(lambda number: protocol.Follows(number, names, after))

    async def pin(self, name: str, *, timeout: float | None = None) -> None:
        """As `Client.pin`."""
        await self._ask(lambda number: protocol.Pin(number, name), timeout)

    async def unpin(self, name: str, *, timeout: float | None = None) -> None:
        """As `Client.unpin`."""
        await self._ask(lambda number: protocol.Pin(number, name, unpin=True), timeout)

    async def forget(self, *names: str, timeout: float | None = None) -> None:
        """As `Client.forget`."""
        await self._ask(lambda number: protocol.Forget(number, names), timeout)

    async def forecast(self, *names: str, timeout: float | None = None) -> protocol.Forecast:
        """As `Client.forecast`."""
        reply = await self._ask(lambda number: protocol.ForecastRequest(number, names), timeout)
        assert isinstance(reply, protocol.Forecast)
        return reply

    async def cheapest(
        self, names: Iterable[str], *, timeout: float | None = None
    ) -> list[protocol.Forecast]:
        """As `Client.cheapest`."""
        found = [await self.forecast(name, timeout=timeout) for name in each_once("names", names)]
        return cheapest_first(found)

    async def status(self, *, timeout: float | None = None) -> protocol.Status:
        """As `Client.status`."""
        reply = await self._ask(protocol.StatusRequest, timeout)
        assert isinstance(reply, protocol.Status)
        return reply

    async def close(self, *, keep: bool = True) -> None:
        """As `Client.close`. Once its loop is closed, any loop may close the client."""
        client = self._client
        if not self.session.forked:
            self.leasing.check_loop(closes=True)
        await in_thread(partial(rejoining.stay, client))
        if not self.session.forked:
            with suppress(SwapdError):  # it has ended, is silent, or too many requests are open
                await self.leasing.be_heard()
        await in_thread(partial(end, client.leasing, keep=keep))
        await self.leasing.channel.close()
        await in_thread(client.leasing.close)
        restore_models(client)
        client.dropped.detach()

    async def _in_thread(self, call: Callable[[], T], undo: Callable[[Client, T], object]) -> T:
        if isinstance(self.session.error, DaemonGone):
            await self._join_next(self.session.error, rejoining.until_of(self._client))
        with suppress(DaemonGone):  # `call` raises it, or joins the next daemon
            await self.leasing.be_heard()
        torch: Any = sys.modules.get("torch")
        if hasattr(torch, "set_grad_enabled"):  # not while another thread is importing it
            call = torch.set_grad_enabled(torch.is_grad_enabled())(call)  # grad mode is per thread
        return await cancellable(call, partial(undo, self._client))

    async def _ask(
        self, request: Callable[[int], protocol.AnyRequest], timeout: float | None = None
    ) -> protocol.AnyReply:
        def ask() -> Coroutine[Any, Any, protocol.AnyReply]:
            return self.leasing.call(request(self.session.next_id()), timeout)

        return await self._repeated(ask, timeout)

    async def _repeated(self, call: Callable[[], Coroutine[Any, Any, T]], timeout_s: object) -> T:
        until = None
        while True:
            life = self.session.life
            try:
                return await call()
            except DaemonGone as exc:
                if not life.is_over:  # as in `rejoining.repeated`
                    raise
                until = until or rejoining.until_of(self._client, timeout_s)
                await self._join_next(exc, until)

    async def _join_next(self, error: DaemonGone, until: float) -> None:
        """As `Client._join_next`. One task waits in a thread, the others for that task."""
        if self.session.leases.held_by(agents.task()):
            raise error
        async with self._joining:
            await cancellable(partial(self._client._join_next, error, until))


class AsyncLeasing:
    """The requests and leases of the tasks of one event loop, on one channel.

    As `Leasing`, but no leases are kept.
    """

    def __init__(self, blocking: Leasing) -> None:
        self.session = blocking.session
        kind = LoopChannel if self.session.is_disabled else AsyncChannel
        self.channel = kind(blocking.factory)
        self._blocking = blocking
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()

    def check_loop(self, *, closes: bool = False) -> None:
        """Raises: InvalidArgument in another loop, unless it closes the client of a closed one."""
        is_here = asyncio.get_running_loop() is self._loop
        if not (is_here or (closes and self._loop.is_closed())):
            raise InvalidArgument(
                "this AsyncClient belongs to another event loop, the one that made it: "
                "await connect_async() in each loop"
            )

    async def call(
        self, request: protocol.AnyRequest, timeout_s: float | None = None
    ) -> protocol.AnyReply:
        """As `Leasing.call`."""
        check_seconds(timeout_s)
        self.check_loop()
        try:
            async with asyncio.timeout(timeout_s):
                return self.session.unwrap(await self.channel.call(request))
        except TimeoutError as exc:
            if isinstance(exc, SwapdError) or timeout_s is None:
                raise
            raise self.session.lifeline.not_answering(timeout_s) from exc

    async def acquire(self, asked: LeaseRequest) -> AsyncLease:
        """As `Leasing.acquire`, for the running task."""
        self.check_loop()
        trace = self._blocking.tracing.begin(asked.names)
        with trace or nullcontext():
            return await self._acquire(asked, trace)

    async def _acquire(self, asked: LeaseRequest, trace: Trace | None) -> AsyncLease:
        session, task = self.session, agents.task()
        leases = session.leases
        record = record_of(session, session.next_id(), asked, task)
        request = asked.request(record.id, agent=task, holds=few(leases.held_by(task)))
        if trace is not None:
            request = trace.marked(request)
        telling = None
        try:
            if asked.progress is not None:
                told = tell(self.channel, session, record.id, asked.progress)
                telling = self._loop.create_task(told)
            try:
                reply = await self.channel.call(request, asked.timeout_s)
            finally:
                if telling is not None and not telling.done():  # `cancel` would hide its error
                    telling.cancel()
            if trace is not None:
                trace.answered(reply)
            show = granted(session, record, reply, asked)
            if leases.must_show(record):
                await in_thread(show, partial(session.arrivals.give_up, record))
            else:
                show()
            return AsyncLease(session, record, self.end)
        except BaseException:
            with suppress(SwapdError):
                to_its_end(partial(self.end, record))
            raise

    def end(self, record: Record) -> None:
        """Tell the daemon that a lease ends, once its GPU work is done.

        Does not block in the loop's thread; elsewhere, and once the loop is closed, as
        `Channel.send`.
        """
        leases, give_back = self.session.leases, self._blocking.giving_back.give_back
        if record.is_asked:  # an interrupt may have lost the grant
            self._send(protocol.Cancel(self.session.next_id(), record.id))
        elif not leases.ends_later(record, give_back) and leases.give_back(record):
            self._send(leases.release_of(record))

    def _send(self, request: protocol.AnyRequest) -> None:
        is_here = get_ident() == self._thread and not self._loop.is_closed()
        (self.channel if is_here else self._blocking.factory.channel()).send(request)

    async def be_heard(self) -> None:
        """Wait until the daemon has all messages sent so far: a thread's might overtake them.

        Raises Timeout after ANSWER_S.
        """
        if self.session.error is None:
            await self.call(self.session.harmless(), ANSWER_S)

    def close_dropped(self) -> None:
        """Close for a collected client. Blocks: called in a thread."""
        self.session.close()
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self.channel.close(), self._loop).result(CLOSE_S)
        else:
            self.channel.close_socket()
        self._blocking.close()
