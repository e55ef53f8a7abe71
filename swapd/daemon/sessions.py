"""Opens and ends sessions, turns their requests and messages into events, and sends the answers.
Never blocks."""

from collections.abc import Callable
from functools import partial

from swapd.core import Residency, actions, events, explain
from swapd.core.status import forecast
from swapd.daemon.dispatch import Dispatch, Perform
from swapd.daemon.lending import Lender, Quarantine, WorkerConnection
from swapd.daemon.lifeline import Lifeline, LifelineServer
from swapd.daemon.mover import Mover
from swapd.daemon.peers import Peer
from swapd.daemon.router import Router
from swapd.daemon.statuses import Statuses
from swapd.device import Device
from swapd.shared import fds, protocol, runtime_dir
from swapd.shared.runtime_dir import Folder

#: Waiters, components and leases of an ending session to end in one step.
END_STEP = 32
#: Most sessions, of all processes and of one: each has two connections and a board.
SESSIONS_MAX = 1024
SESSIONS_OF_ONE_MAX = 256
#: Limit of characters of names in a session's open requests: a wait keeps about two bytes for each.
NAMES_CHARS_MAX = 16 << 20
_TOO_MANY_REQUESTS = (
    f"{protocol.UNANSWERED_MAX} requests of this session wait for their reply, which is the limit: "
    "wait for some of them, or cancel them"
)
_TOO_MANY_NAMES = (
    "the requests of this session that wait for their reply name too many components: wait for "
    "some of them, or cancel them"
)
#: Sessions' share of all descriptors.
SESSIONS_SHARE = 10


class Sessions:
    def __init__(
        self,
        connections: dict[int, WorkerConnection],
        core: Residency,
        device: Device,
        folder: Folder,
        dispatch: Dispatch,
        mover: Mover,
        lender: Lender,
        statuses: Statuses,
        count: Callable[[], None],
    ) -> None:
        """Listen in `folder`. `connections`: the open sessions, which others read. `count()`: their
        number has changed."""
        self._connections = connections
        self._core = core
        self._device = device
        self._dispatch = dispatch
        self._mover = mover
        self._lender = lender
        self._statuses = statuses
        self._quarantine = Quarantine(core, dispatch, lender, outlasts=device.outlasts)
        self._count = count
        self._last_session = 0
        loop, inside = dispatch.loop, folder.inside
        self._address = f"ipc://{folder.path / runtime_dir.RPC}"
        self._router = Router(
            loop,
            inside / runtime_dir.RPC,
            self._on_request,
            self._on_unread_replies,
            self._fence,
            dispatch.crashed,
        )
        self._server = LifelineServer(
            inside / runtime_dir.LIFELINE,
            loop,
            self._on_hello,
            self._on_message,
            self._on_unread,
            self._on_gone,
        )

    def orders(self) -> dict[type, Perform]:
        tell = self._tell
        return {
            actions.Grant: self._grant,
            actions.Refuse: self._refuse,
            actions.Accept: lambda a: self.reply(a.session, protocol.Done(a.request)),
            actions.SendRevoke: lambda a: tell(
                a.session, protocol.Revoke(a.name, a.generation, a.ack)
            ),
            actions.SendWanted: lambda a: tell(a.session, protocol.Wanted(a.name, a.wanted)),
            actions.SendHurry: lambda a: tell(a.session, protocol.Hurry(a.waits)),
            actions.SendBroken: lambda a: tell(
                a.session, protocol.Broken(a.name, a.generation, a.why)
            ),
            actions.Evicted: self._evicted,
            actions.Fence: lambda a: self._fence(a.session, a.why),
        }

    def close(self) -> None:
        """End all sessions, and accept no sessions or requests. May be called more than once."""
        self._server.close("stopping", explain.STOPPING)
        self._router.close()

    # --- requests and messages become events ---------------------------------------------

    def _on_request(self, session: int, peer: Peer, request: protocol.AnyRequest) -> None:
        connection = self._connections[session]
        code: protocol.Code = "bad_request"
        problem = self._core.problem_with(request)
        if not problem and not isinstance(request, protocol.Release | protocol.Cancel):
            if request.id in connection.unanswered:
                problem = explain.REPLAYED
            elif problem := _one_too_many(connection):
                code = "limit"
            else:
                connection.opens(request, peer)
        if problem:
            self._router.reply(peer, protocol.Refused(request.id, code, problem))
            return
        self._serve(session, request)
        if isinstance(request, protocol.Release) and request.ack:
            self._router.reply(peer, protocol.Done(request.id))

    def _serve(self, session: int, request: protocol.AnyRequest) -> None:
        match request:
            case protocol.ForecastRequest():
                now = self._dispatch.clock()
                self.reply(session, forecast(self._core, request, session, now))
                return
            case protocol.StatusRequest():
                self._statuses.ask(request.id, partial(self.reply, session))
                return
            case protocol.Cancel():
                self._connections[session].answers(request.acquire)
                self._dispatch.traces.drop(session, request.acquire)
            case protocol.Acquire() | protocol.AcquireWorkspace() | protocol.AcquireStart():
                if request.traced:
                    self._dispatch.traces.begin(session, request, self._dispatch.clock())
        self._ask(session, request)

    def _ask(self, session: int, request: protocol.AnyOrder) -> None:
        self._mover.settle()
        self._dispatch.post(events.SessionRequest(self._dispatch.clock(), session, request))

    def _on_hello(self, lifeline: Lifeline, hello: protocol.Hello) -> None:
        problem = self._no_more_sessions(lifeline.pid)
        try:
            connection = None if problem else WorkerConnection(lifeline, self._device)
        except OSError as exc:
            connection, problem = None, fds.why_none(exc)
        if connection is None:
            self._server.drop(lifeline, "limit", problem or "")
            return
        self._last_session += 1
        session = lifeline.session = self._last_session
        self._connections[session] = connection
        self._count()
        label = hello.label or f"process {lifeline.pid}"
        self._router.open(lifeline.token, session)
        self._dispatch.post(events.SessionOpened(self._dispatch.clock(), session, label))
        connection.welcome(self._address, strict=self._core.rules.strict)

    def _no_more_sessions(self, pid: int) -> str | None:
        most = fds.share(SESSIONS_MAX, SESSIONS_SHARE)
        if len(self._connections) >= most:
            return (
                f"this daemon has {most} sessions, which is the limit: close some, "
                f"or raise its `ulimit -n`, which is {fds.limit()}"
            )
        of_one = min(SESSIONS_OF_ONE_MAX, max(most // 2, 1))
        mine = sum(1 for one in self._connections.values() if one.lifeline.pid == pid)
        if mine >= of_one:
            return f"process {pid} has {mine} sessions, which is its limit: close some"
        return None

    def _on_message(self, lifeline: Lifeline, message: protocol.FromClient) -> None:
        match message:
            case protocol.Revoked():
                now = self._dispatch.clock()
                name, generation = message.name, message.generation
                self._dispatch.post(events.RevokeAck(now, lifeline.session, name, generation))
            case protocol.Dropped():
                self._lender.dropped(lifeline.session, message.ticket)
            case protocol.ReleaseKept():
                for release in message.releases:
                    if not self._core.problem_with(release):
                        self._ask(lifeline.session, release)
            case protocol.SessionUnmapped():
                self._on_let_go(lifeline.pid, message.token)

    def _on_unread(self, lifeline: Lifeline, count: int, error: str) -> None:
        now = self._dispatch.clock()
        self._dispatch.post(events.Unread(now, lifeline.session, "lifeline", count, error))

    def _on_unread_replies(self, session: int, count: int) -> None:
        self._dispatch.post(events.Unread(self._dispatch.clock(), session, "replies", count))

    # --- the end of a session ------------------------------------------------------------

    def _on_gone(self, lifeline: Lifeline) -> None:
        session = lifeline.session
        self._connections.pop(session).boards.close()
        self._count()
        self._lender.session_gone(session)
        self._dispatch.traces.session_gone(session)
        self._router.forget(lifeline.token)
        self._quarantine.add(lifeline.token, session, lifeline.pid)
        self._end(session, lifeline.token)

    def _end(self, session: int, token: bytes) -> None:
        """End a session in the core, in steps if it has much, so that other work gets its turn."""
        now = self._dispatch.clock()
        alive, ending = token in self._quarantine, self._quarantine.is_ending(token)
        if self._core.has_more(session, END_STEP):
            self._dispatch.post(events.SessionEnds(now, session, END_STEP, alive, ending))
            self._dispatch.loop.call_soon(self._end, session, token)
            return
        self._dispatch.post(events.SessionGone(now, session, alive, ending))
        if alive:
            # later: SessionGone may be queued behind the event that fenced this session
            self._dispatch.loop.call_soon(self._quarantine.watch, token)

    def _on_let_go(self, pid: int, token: bytes) -> None:
        for one in list(self._connections.values()):
            if one.lifeline.token == token and one.lifeline.pid == pid:
                self._server.gone(one.lifeline)  # its EOF is on its way
        self._quarantine.let_go(pid, token)

    # --- answers and notices -------------------------------------------------------------

    def reply(self, session: int, reply: protocol.AnyReply) -> None:
        """Answer an open request; no-op if the session has ended or nobody waits."""
        if (connection := self._connections.get(session)) is None:
            return
        if (peer := connection.answers(reply.id)) is not None:
            self._router.reply(peer, reply)

    def _tell(self, session: int, message: protocol.FromDaemon) -> None:
        if connection := self._connections.get(session):
            connection.lifeline.send(message)

    def _fence(self, session: int, why: str) -> None:
        if connection := self._connections.get(session):
            self._server.drop(connection.lifeline, "fenced", why)

    def _grant(self, a: actions.Grant) -> None:
        if connection := self._connections.get(a.session):
            for place in a.placements:
                mutable = self._core.ledger.components[place.name].mutable
                connection.send_files(place.runs, writable=mutable)
        account = self._dispatch.account_of(a.session, a.request, a.names)
        self.reply(
            a.session,
            protocol.Granted(
                a.request, a.placements, a.waited_s, a.loaded, a.names, account, a.spent
            ),
        )

    def _refuse(self, a: actions.Refuse) -> None:
        account = self._dispatch.account_of(a.session, a.request)
        self.reply(a.session, protocol.Refused(a.request, a.code, a.message, account))

    def _evicted(self, a: actions.Evicted) -> None:
        """Tell the worker that a write-back is complete, before others get the chunks. So a worker
        that outlives the daemon knows whether the host copy has the latest bytes."""
        c = self._core.ledger.components.get(a.name)
        if c is not None and (a.bytes_back or c.scratch):
            self._tell(c.session, protocol.Saved(a.name, a.generation, anew=c.kept == ()))


def _one_too_many(connection: WorkerConnection) -> str | None:
    if len(connection.unanswered) >= protocol.UNANSWERED_MAX:
        return _TOO_MANY_REQUESTS
    return _TOO_MANY_NAMES if connection.names_chars >= NAMES_CHARS_MAX else None
