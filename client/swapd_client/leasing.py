"""How the threads of a client ask for leases, keep them and give them back.

Each thread sends its requests on a channel of its own, in order. Before each, it gives back the
leases that it keeps: the daemon counts them as held by the thread that asks.

Lives here: messages to the daemon, and when a thread sends them. May not live here: the state of a
lease, and the changes that its grant and its end make in this process (`leases/`). The functions
are for the async client, too.
"""

import threading
from collections.abc import Callable, Collection
from contextlib import suppress

import msgspec

from swapd.shared import protocol
from swapd_client.errors import AcquireTimeout, ComponentInUse, SessionEnded, SwapdError
from swapd_client.lease import Lease
from swapd_client.leases.agents import Agent
from swapd_client.leases.book import Record
from swapd_client.leases.keeper import Keeper
from swapd_client.leases.keeping import Key
from swapd_client.leases.leases import Leases
from swapd_client.session.channel import Channel, ChannelFactory
from swapd_client.session.session import Session
from swapd_client.tracing import Trace, Tracing


class Asked(msgspec.Struct, frozen=True):
    """An acquire, before a thread or task asks the daemon."""

    #: Makes the request, from its id and the number of its agent.
    request: Callable[[int, int], protocol.AnyAcquire]
    names: tuple[str, ...]
    timeout_s: float | None
    #: Whether its holder waits for the copies by itself.
    early: bool = False
    is_workspace: bool = False


def of_components(
    session: Session,
    names: tuple[str, ...],
    timeout_s: float | None = None,
    priority: int = 0,
    await_registration: bool = False,
    early: bool = False,
) -> Asked:
    """An acquire of components."""
    # on a GPU the daemon does not wait for the copies: `bring_in` does
    at_once = early or session.processor.works_late

    def request(number: int, agent: int) -> protocol.Acquire:
        return protocol.Acquire(
            number, names, agent, timeout_s, priority, await_registration, at_once
        )

    return Asked(request, names, timeout_s, early)


def of_workspace(nbytes: int, said: object, timeout_s: float | None, priority: int) -> Asked:
    """An acquire of device memory for the process's own allocator; `said`: its size in messages."""

    def request(number: int, agent: int) -> protocol.AcquireWorkspace:
        return protocol.AcquireWorkspace(number, nbytes, agent, timeout_s, priority)

    return Asked(request, (f"workspace of {said}",), timeout_s, is_workspace=True)


def of_start(timeout_s: float | None) -> Asked:
    """An acquire of the right to start alone."""

    def request(number: int, agent: int) -> protocol.AcquireStart:
        return protocol.AcquireStart(number, timeout_s)

    return Asked(request, (protocol.THE_START,), timeout_s)


def granted(session: Session, reply: protocol.AnyReply, asked: Asked, agent: Agent) -> Record:
    """The record of the lease that was granted to `agent`. Raises the error of a refusal."""
    grant = session.unwrap(reply)
    assert isinstance(grant, protocol.Granted)
    return session.leases.record(grant, asked.names, agent, is_workspace=asked.is_workspace)


class _Thread:
    """The thread that has it as a variable; its end is the end of that thread."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._ident = threading.get_ident()
        leases.thread_began(self._ident)

    def __del__(self) -> None:
        self._leases.thread_ended(self._ident)


class _Own(threading.local):
    """The variables of each thread, for one client."""

    channel: Channel | None = None

    def __init__(self, leases: Leases) -> None:
        self.thread = _Thread(leases)


class Leasing:
    """The requests and leases of one client's threads. Thread-safe; a lease may end in any thread.

    Unless another error is named, its methods raise the error that ended the session.
    """

    def __init__(self, session: Session, factory: ChannelFactory, tracing: Tracing) -> None:
        self.session = session
        self.tracing = tracing
        self.keeper = Keeper(session.told, self.end, session.processor.after)
        session.told.when_wanted(self.keeper.hurry)
        session.life.when_ended(self.keeper.forget)
        self._factory = factory
        self._own = _Own(session.leases)

    # --- requests ------------------------------------------------------------------------

    def channel(self) -> Channel:
        """This thread's channel. While a caller keeps it, answers on it are not lost."""
        channel = self._own.channel
        if channel is None:
            channel = self._own.channel = Channel(self._factory)
        return channel

    def call(
        self, request: protocol.AnyRequest, timeout_s: float | None = None
    ) -> protocol.AnyReply:
        """Send a request and wait for its reply. Raises the error of a refusal."""
        self._before_a_request()
        return self.session.unwrap(self.channel().call(request, timeout_s))

    def question(self, request: protocol.AnyRequest, timeout_s: float | None) -> protocol.AnyReply:
        """As `call`, for requests answered at once. Raises: NotAnswering if there is no answer in
        time.
        """
        if timeout_s is None:
            return self.call(request)
        self._before_a_request()
        channel = self.channel()
        channel.ask(request)
        reply = channel.collect(request.id, timeout_s)
        if reply is None:
            channel.abandon(request.id)
            raise self.session.not_answering(timeout_s)
        return self.session.unwrap(reply)

    def _before_a_request(self) -> None:
        self.session.check()
        self._end_kept()
        self.keeper.hand_over()

    # --- acquires ------------------------------------------------------------------------

    def acquire(self, asked: Asked, *, again: bool = False) -> Lease:
        """Wait for the grant, and for the copies unless `asked.early`.

        `again`: this thread may soon ask for the same, so its lease may be kept. Blocks and raises
        as `Client.acquire`; then nothing is held.
        """
        record = self._acquire(asked)
        if again:
            record.may_be_kept = record.lingers = self.session.leases.may_be_kept(record)
        return self._lease(record)

    def ask(self, *names: str) -> int:
        """Ask for components ahead without waiting; collect or abandon the request in this thread.

        No thread waits for them, and this thread may release other leases meanwhile. So the request
        has an agent of its own: deadlock detection would else report a deadlock that does not
        exist.
        """
        request = self.session.next_id()
        self.channel().ask(protocol.Acquire(request, names, _agent_ahead(request), early=True))
        return request

    def collect(self, request: int, *names: str, within_s: float) -> Lease | None:
        """Return the early lease that was asked for ahead; None if it is not granted in that time.

        Raises as `acquire`. Before a thread blocks for it, it must end the request: with `abandon`,
        or with `acquire_in_place_of`.
        """
        reply = self.channel().collect(request, within_s)
        if reply is None:
            return None
        number = _agent_ahead(request)
        asked = of_components(self.session, names, early=True)
        return self._lease(self._held(reply, asked, Agent(number, number)))

    def acquire_in_place_of(self, request: int, *names: str) -> Lease:
        """As an early `acquire`, of components that were asked for ahead and not collected.

        The daemon first receives this acquire, and then the end of the request ahead. So components
        loaded for that request stay on the device; without a request they would leave.
        """
        record = self._acquire(of_components(self.session, names, early=True), request)
        record.may_be_kept = self.session.leases.may_be_kept(record)
        return self._lease(record)

    def hint(self, *names: str, over: Collection[str] | None = None) -> None:
        """As `prefetch`, without an answer. Blocks as `Channel.send`."""
        self.channel().send(prefetch_of(self.session.next_id(), names, over))

    def _lease(self, record: Record) -> Lease:
        return Lease(self.release, self.session, record, (threading.get_ident(), record.names))

    def _acquire(self, asked: Asked, in_place_of: int | None = None) -> Record:
        self.session.check()
        if self.session.processor.works_late:
            for end in self.keeper.returned():
                end(self._give_back_here)
        self._end_kept()  # first: a lease still held belongs to the same agent
        trace = self.tracing.begin(asked.names)
        if trace is None:
            return self._acquire_now(asked, in_place_of, None)
        with trace:
            return self._acquire_now(asked, in_place_of, trace)

    def _acquire_now(self, asked: Asked, in_place_of: int | None, trace: Trace | None) -> Record:
        session = self.session
        agent = session.leases.enter(threading.get_ident(), asked.timeout_s)
        request = asked.request(session.next_id(), agent.number)
        if trace is not None:
            request = trace.marked(request)
        reply = self.channel().call(request, asked.timeout_s, in_place_of=in_place_of)
        if trace is not None:
            trace.answered(reply)
        return self._held(reply, asked, agent)

    def _held(self, reply: protocol.AnyReply, asked: Asked, agent: Agent) -> Record:
        """Hold a granted lease: have it mapped, and wait for its copies unless `asked.early`."""
        leases = self.session.leases
        record = granted(self.session, reply, asked, agent)
        try:
            leases.add(record)
            if asked.early:
                leases.show(record)
            else:
                leases.bring_in(record, asked.timeout_s)
        except BaseException:
            with suppress(SwapdError):
                self.end(record, ack=False)
            raise
        return record

    # --- giving back ---------------------------------------------------------------------

    def release(self, record: Record, key: Key) -> None:
        """End a lease, or keep it for the next step. Raises as `Lease.release`."""
        same = key[0] == threading.get_ident()
        keeps = same and record.may_be_kept and self.session.life.usable
        if keeps and self.keeper.keep(key, record):
            return
        self.end(record, ack=not same)  # on another channel it may arrive late, so wait for it

    def end(self, record: Record, ack: bool = True) -> None:
        """Tell the daemon that a lease ends, from any thread, once its GPU work is done."""
        linger = None if ack else self.keeper.linger
        if not self.session.leases.ends_later(record, self._give_back, linger):
            self._give_back(record, ack)

    def flush_kept(self) -> None:
        """End the leases that all threads keep."""
        self.session.check()  # first: after a fork the keeper's lock may be held for good
        self.keeper.flush_all()

    def refuse_in_use(self, names: Collection[str]) -> None:
        """Raise ComponentInUse if one of these is leased: `unregister` would fail."""
        if not names:
            return
        self.flush_kept()
        self.session.leases.drain()
        reply = self.call(protocol.Status(self.session.next_id()))
        assert isinstance(reply, protocol.StatusReply)
        for component in reply.components:
            if component.leases and component.name in names:
                raise ComponentInUse(
                    f"{component.name!r} is leased by {', '.join(component.holders)}; release it, "
                    "then detach"
                )

    def _end_kept(self) -> None:
        """End the leases that this thread keeps, before it sends its next request."""
        for record in self.keeper.pop(threading.get_ident()):
            self.end(record, ack=False)

    def _give_back_here(self, record: Record) -> None:
        """End a lease in its own thread, before that thread sends its next request."""
        self._give_back(record, ack=False)

    def _give_back(self, record: Record, ack: bool = True) -> None:
        session = self.session
        if not session.leases.give_back(record):
            return
        release = session.leases.release_of(record, session.next_id(), ack=ack)
        # callers may wait for this under a lock, so a stopped daemon must not block it for ever
        with suppress(SessionEnded, AcquireTimeout):
            if ack:
                self.channel().call(release, 0.0)
            else:
                self.channel().send(release)

    # --- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """After the session: close all channels, and end the thread that makes spans."""
        self._factory.close()
        self.tracing.close()

    def close_late(self) -> None:
        """As `close`, for a client that was garbage collected; after its session has ended."""
        self.keeper.close()
        self.session.close()
        self.close()


def prefetch_of(
    number: int, names: tuple[str, ...], over: Collection[str] | None
) -> protocol.Prefetch:
    """The request of `Client.prefetch`."""
    return protocol.Prefetch(number, names, None if over is None else tuple(over))


def _agent_ahead(request: int) -> int:
    """Number of the agent for a request ahead; no thread has it."""
    return -request
