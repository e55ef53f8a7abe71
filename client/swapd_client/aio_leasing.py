"""How the tasks of an event loop ask for leases and give them back, on one channel.

As `leasing.py`, without leases that are kept: blocking steps run in threads.
"""

import asyncio
from contextlib import suppress
from functools import partial

from swapd.shared import protocol
from swapd_client.errors import SwapdError
from swapd_client.lease import AsyncLease
from swapd_client.leases.book import Record
from swapd_client.leasing import Asked, record_of
from swapd_client.moving import in_thread
from swapd_client.session.channel import AsyncChannel, ChannelFactory
from swapd_client.session.session import Session
from swapd_client.tracing import Trace, Tracing

#: Seconds; a loop that is busy for longer keeps the channel of a collected client open.
CLOSE_S = 60.0


class AsyncLeasing:
    """The requests and leases of one async client. Made and used in its loop."""

    def __init__(self, session: Session, factory: ChannelFactory, tracing: Tracing) -> None:
        self.session = session
        self.tracing = tracing
        self.factory = factory
        self.channel = AsyncChannel(factory)
        self._loop = asyncio.get_running_loop()

    async def call(
        self, request: protocol.AnyRequest, timeout_s: float | None = None
    ) -> protocol.AnyReply:
        """Send a request and wait for its reply. Raises the error of a refusal."""
        return self.session.unwrap(await self.channel.call(request, timeout_s))

    async def question(
        self, request: protocol.AnyRequest, timeout_s: float | None
    ) -> protocol.AnyReply:
        """As `call`, for requests answered at once. Raises: NotAnswering if there is no answer in
        time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self.call(request)
        except TimeoutError as exc:
            if isinstance(exc, SwapdError) or timeout_s is None:
                raise
            raise self.session.not_answering(timeout_s) from exc

    async def acquire(self, asked: Asked) -> AsyncLease:
        """As `Leasing.acquire`, for the running task."""
        trace = self.tracing.begin(asked.names)
        if trace is None:
            return await self._acquire_now(asked, None)
        with trace:
            return await self._acquire_now(asked, trace)

    async def _acquire_now(self, asked: Asked, trace: Trace | None) -> AsyncLease:
        session, task = self.session, id(asyncio.current_task())
        leases = session.leases
        record = record_of(session, session.next_id(), asked, task)
        request = asked.request(record.id, task, leases.held_by(task), ())
        if trace is not None:
            request = trace.marked(request)
        reply = await self.channel.call(request, asked.timeout_s)
        if trace is not None:
            trace.answered(reply)
        grant = session.unwrap(reply)
        assert isinstance(grant, protocol.Granted)
        record.granted = grant
        try:
            leases.add(record)
            bring_in = partial(leases.bring_in, record, asked.timeout_s)
            show = partial(leases.show, record) if asked.early else bring_in
            if leases.must_show(record):
                await in_thread(show, give_up=partial(leases.give_up, record))
            else:
                show()
        except BaseException:
            with suppress(SwapdError):
                self.end(record)
            raise
        return AsyncLease(session, record, self.end)

    def end(self, record: Record) -> None:
        """Tell the daemon that a lease ends, once its GPU work is done. Does not block."""
        session = self.session
        if session.leases.ends_later(record, self._give_back_later):
            return
        if session.leases.give_back(record):
            self.channel.send(session.leases.release_of(record))

    def close_dropped(self) -> None:
        """Its client was collected. Blocks: called in a thread of the session."""
        self.session.close()
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self.channel.close(), self._loop).result(CLOSE_S)
        else:
            self.channel.close_socket()
        self.factory.close()
        self.tracing.close()

    def _give_back_later(self, record: Record) -> None:
        """Called in a thread of the session; requests that the loop sends arrive in order."""
        if self.session.leases.give_back(record):
            release = self.session.leases.release_of(record)
            with suppress(RuntimeError):  # the loop is closed, and the session soon will be
                self._loop.call_soon_threadsafe(self.channel.send, release)
