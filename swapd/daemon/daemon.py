"""The composition root: one device, one loop, one core, and the I/O around them.

Lives here: turning requests into events and actions into I/O, the timer, signals, and the
order of start and stop. Decisions live in `swapd.core`.
"""

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, ClassVar, TypeVar

from swapd import __version__
from swapd.core import Residency, Rules, actions, events, explain
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.core.status import forecast
from swapd.daemon.accounts import Accounts
from swapd.daemon.host_copies import HostCopies
from swapd.daemon.left import Left
from swapd.daemon.lending import Lender
from swapd.daemon.lifeline import Lifeline, LifelineServer
from swapd.daemon.masters import Masters
from swapd.daemon.mover import Mover
from swapd.daemon.peers import Peer
from swapd.daemon.publisher import Publisher
from swapd.daemon.reloading import Reloading
from swapd.daemon.router import Router
from swapd.daemon.statuses import Statuses
from swapd.daemon.timers import Linger, Watchdog
from swapd.daemon.turns import copies_first
from swapd.daemon.worker import Worker
from swapd.device import Device
from swapd.log.place import place
from swapd.log.records import Start
from swapd.log.swap_log import SwapLog, SwapLogFile
from swapd.shared import fds, protocol, runtime_dir
from swapd.shared.config import Config, watchdog_s
from swapd.shared.runtime_dir import Folder
from swapd.shared.system import has_terminal, notify_systemd

log = logging.getLogger("swapd")

T = TypeVar("T")

#: Things of an ending session to end before other work has its turn.
END_STEP = 32
#: Most sessions at a time, and of one process: each has two connections and a board.
SESSIONS_MAX = 1024
SESSIONS_OF_ONE_MAX = 256
#: Their share of all descriptors.
SESSIONS_SHARE = 10
#: Descriptors that no new session takes, so that existing ones may use more threads.
SPARE_FOR_PEERS = 4


class Daemon:
    """Serves one device from one runtime folder until it is told to stop.

    `device` and `folder`, which is claimed, belong to the caller.
    """

    def __init__(
        self,
        config: Config,
        device: Device,
        folder: Folder,
        read_again: Callable[[], Config] | None = None,
        own: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`read_again()`: the current settings, for SIGHUP; None: they do not change. `own()`: pid
        of the daemon's own child process, if it has one: its session alone does not keep the daemon
        running."""
        self._config = config
        self._read_again = read_again or (lambda: config)
        self._own = own
        self._device = device
        self._folder = folder
        self._core = Residency(device.chunks, device.chunk_bytes, _rules(config))
        self._masters = Masters(config.host_memory, device)
        self._events: deque[AnyEvent] = deque()
        self._draining = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        #: The clock of all events: the loop's own counts whole milliseconds under uvloop.
        self._clock = time.monotonic
        self._workers: dict[int, Worker] = {}
        self._last_session = 0
        #: The peer for the reply to each open request, by session.
        self._peers: dict[int, dict[int, Peer]] = {}
        #: The record that ordered a slow action, by the name that its event will have.
        self._causes: dict[tuple[str, int], int] = {}
        self._accounts = Accounts(self._clock)
        #: The record that ordered a revocation, by session and generation.
        self._revocations: dict[tuple[int, int], int] = {}
        self._stop = asyncio.Event()
        self._quiet = asyncio.Event()
        self._at_once = asyncio.Event()

    async def run(self, ready: Callable[[], None] = lambda: None) -> bool:
        """Serve until SIGTERM, SIGINT or `stop`; call `ready` when clients may connect.

        Returns True after an orderly end. Returns False after a second request to stop: then its
        threads still use the device, which must not be closed, and the process must end without
        waiting for them. Raises: any error that broke the daemon itself; then workers keep their
        mappings.
        """
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._open()
        statuses = self._loop.create_task(self._statuses.run(), name="status")
        stopping = self._loop.create_task(self._stop.wait(), name="stop")
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it is ignored
            self._loop.add_signal_handler(signal.SIGHUP, self._on_hangup, has_terminal())
        self._watchdog = Watchdog(self._loop, watchdog_s())
        self._linger = Linger(self._loop, self._config.linger, self._stop_unused)
        try:
            notify_systemd("READY=1")
            ready()
            log.info("serving %s in %s", self._device, self._folder.path)
            tasks = (statuses, stopping, self._failed)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if statuses.done() or self._failed.done():
                await asyncio.gather(statuses, self._failed)  # raises the daemon's own failure
            await self._wind_down()
        finally:
            for task in (statuses, stopping):
                task.cancel()
            await asyncio.gather(statuses, stopping, return_exceptions=True)
            finished = await self._close()
        return finished

    def stop(self) -> None:
        """Stop cleanly: refuse waiters, and wait for leases to end and for bytes to be saved. A
        second call stops all waiting."""
        if self._stop.is_set():
            log.warning("told twice to stop: waiting for nothing more")
            self._quiet.set()
            self._at_once.set()
        self._stop.set()

    def _stop_unused(self) -> None:
        """Stop, and let no more clients in: new ones must find the next daemon."""
        self._server.close("stopping", explain.STOPPING)
        self.stop()

    def _on_hangup(self, had_terminal: bool) -> None:
        """SIGHUP: read the settings again; if the terminal has gone, stop with it."""
        if had_terminal and not has_terminal():
            self.stop()
        else:
            self._reloading.begin()

    def _reload(self, config: Config) -> None:
        self._config = config
        self._linger.set(config.linger)
        self._swap_log.limit(config.swap_log_size, config.swap_log_age)
        self._masters.limit(config.host_memory)
        if (rules := _rules(config)) != self._core.rules:
            changed = events.RulesChanged(
                self._clock(),
                rules.ack_timeout_s,
                rules.residency_factor,
                rules.residency_bound_s,
                rules.patience_s,
            )
            self._post(changed)

    # --- start and stop ------------------------------------------------------------------

    def _open(self) -> None:
        loop, folder = self._loop, self._folder.inside
        self._publisher = Publisher(loop, folder / runtime_dir.EVENTS, self._crashed)
        config = self._config
        path, own = place(config, self._folder)
        self._swap_log = SwapLog(
            SwapLogFile(path, config.swap_log_size, config.swap_log_age, own),
            self._publisher.publish,
            loop,
        )
        self._swap_log.start(
            Start(
                __version__,
                self._device.name,
                self._device.chunks,
                self._device.chunk_bytes,
                self._core.rules,
            )
        )
        self._reloading = Reloading(config, self._read_again, loop, self._reload, self._crashed)
        self._mover = Mover(self._device, loop, self._clock, self._post_move, self._crashed)
        self._lender = Lender(self._device, loop, self._clock, self._post, self._crashed)
        self._copies = HostCopies(
            self._masters,
            self._workers,
            SPARE_FOR_PEERS,
            loop,
            self._clock,
            self._post,
            self._crashed,
        )
        exchange = self._exchange if self._device.outlasts else None
        self._left = Left(self._core, loop, self._clock, self._post, exchange)
        self._statuses = Statuses(
            self._core,
            self._device,
            self._masters,
            config,
            self._folder.path,
            path,
            loop,
            self._clock,
            pids=lambda: {worker.lifeline.pid for worker in self._workers.values()},
            notes=self._lender.notes,
            records=self._swap_log.counted,
            reply=self._reply,
            post=self._post,
            crashed=self._crashed,
        )
        self._router = Router(
            loop,
            folder / runtime_dir.RPC,
            self._on_request,
            self._on_unread_replies,
            self._fence,
            self._crashed,
        )
        self._server = LifelineServer(
            folder / runtime_dir.LIFELINE,
            loop,
            self._on_hello,
            self._on_message,
            self._on_unread,
            self._on_gone,
        )

    async def _wind_down(self) -> None:
        log.info("stopping: %s", self._core)
        notify_systemd("STOPPING=1")
        self._post(events.Stopping(self._clock()))
        self._note_quiet()
        try:
            await asyncio.wait_for(self._quiet.wait(), self._config.stop_timeout)
        except TimeoutError:
            log.warning(
                "stopping with leases still %s; --stop-timeout (%g s) is over",
                explain.held(self._core.ledger),
                self._config.stop_timeout,
            )

    async def _close(self) -> bool:
        """End everything; return whether nothing still runs."""
        self._server.close("stopping", explain.STOPPING)
        if self._timer is not None:
            self._timer.cancel()
        finished = await self._finish()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)  # from now on they end the process
        self._watchdog.close()
        self._linger.close()
        self._swap_log.close()
        self._router.close()
        self._publisher.close()
        self._folder.remove_sockets()
        if not finished:
            return False
        self._lender.close()
        self._mover.close()
        for threads in (self._copies, self._statuses):
            threads.shutdown()
        self._masters.close()
        for worker in self._workers.values():
            worker.close()
        return True

    async def _finish(self) -> bool:
        """Wait for the threads until the second request to stop; return whether they are done."""
        parts = (self._lender, self._mover, self._copies, self._statuses)
        work = asyncio.gather(*(part.finish() for part in parts))
        told = self._loop.create_task(self._at_once.wait(), name="at once")
        await asyncio.wait((work, told), return_when=asyncio.FIRST_COMPLETED)
        finished = work.done()
        told.cancel()
        work.cancel()
        await asyncio.gather(work, told, return_exceptions=True)
        return finished

    def _crashed(self, error: BaseException) -> None:
        """A bug of the daemon, or a device that cannot be trusted any more: the daemon ends."""
        if not self._failed.done():
            self._failed.set_exception(error)

    def _note_quiet(self) -> None:
        if self._core.ledger.stopping and self._core.quiet:
            self._quiet.set()

    # --- events in, actions out ----------------------------------------------------------

    def _post(self, event: AnyEvent) -> None:
        """Queue an event; drain unless a caller up the stack is already draining."""
        self._events.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            while self._events:
                self._step(self._events.popleft())
        except Exception as exc:  # noqa: BLE001 - a bug in here must end the daemon, loudly
            self._crashed(exc)
        finally:
            self._draining = False
        self._set_timer()
        self._note_quiet()

    def _post_move(self, event: AnyEvent) -> None:
        self._accounts.moved(event)
        self._post(event)

    def _step(self, event: AnyEvent) -> None:
        if isinstance(event, events.DeviceDown) and not self._core.ledger.down:
            log.critical("%s", explain.device_down(event.why))
        done = self._core.handle(event)
        seq = self._swap_log.event(event, self._cause_of(event))
        numbered = [(a, self._swap_log.action(a, seq, event.now)) for a in done]
        for action, number in copies_first(numbered):
            self._do[type(action)](self, action, number)

    def _cause_of(self, event: AnyEvent) -> int:
        match event:
            case events.Reclaimed() if event.runs:
                return self._causes.get(("copy", event.generation), 0)
            case (
                events.CopiedIn()
                | events.CopiedOut()
                | events.CopyFailed()
                | events.Lent()
                | events.Reclaimed()
            ):
                return self._causes.pop(("copy", event.generation), 0)
            case events.Revoked():
                return self._revocations.pop((event.session, event.generation), 0)
            case events.HostCopyMade() | events.HostCopySealed() | events.HostCopyFailed():
                return self._causes.pop(("master", event.uid), 0)
            case _:
                return 0

    def _set_timer(self) -> None:
        at = self._core.next_deadline()
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at is not None:
            # uvloop's timers count whole milliseconds: better late once than a busy loop
            self._timer = self._loop.call_later(max(at - self._clock(), 0) + 0.001, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        self._post(events.Tick(self._clock()))

    # --- requests and lifelines become events --------------------------------------------

    def _on_request(self, session: int, peer: Peer, request: protocol.AnyRequest) -> None:
        unanswered = self._peers[session]
        problem = self._core.problem_with(request)
        one_way = isinstance(request, protocol.Release | protocol.Cancel)
        if not one_way:
            problem = problem or _one_too_many(request.id, unanswered)
        if problem:
            self._router.reply(peer, protocol.Refused(request.id, "bad_request", problem))
            return
        if isinstance(request, protocol.Forecast):
            self._router.reply(peer, forecast(self._core, request, session, self._clock()))
            return
        if isinstance(request, protocol.Cancel):
            unanswered.pop(request.acquire, None)
            self._accounts.drop(session, request.acquire)
        elif not one_way:
            unanswered[request.id] = peer
            if isinstance(request, protocol.AnyAcquire) and request.traced:
                self._accounts.open(session, request)
        if isinstance(request, protocol.Status):
            self._statuses.ask(session, request.id)
            return
        self._mover.settle()
        self._post(events.Asked(self._clock(), session, request))
        if isinstance(request, protocol.Release) and request.ack:
            self._router.reply(peer, protocol.Done(request.id))

    def _on_hello(self, lifeline: Lifeline, hello: protocol.Hello) -> None:
        if problem := self._no_more_sessions(lifeline.pid):
            self._server.drop(lifeline, "limit", problem)
            return
        try:
            worker = Worker(lifeline, self._device, SPARE_FOR_PEERS)
        except OSError as exc:
            self._server.drop(lifeline, "limit", fds.why_none(exc))
            return
        self._last_session += 1
        session = lifeline.session = self._last_session
        self._workers[session] = worker
        self._count_users()
        label = hello.label or f"process {lifeline.pid}"
        self._peers[session] = {}
        self._router.open(lifeline.token, session)
        self._post(events.SessionOpened(self._clock(), session, label))
        rpc = f"ipc://{self._folder.path / runtime_dir.RPC}"
        worker.welcome(rpc, strict=self._core.rules.strict)

    def _no_more_sessions(self, pid: int) -> str | None:
        """Why a process may not open another session; None if it may."""
        most = fds.share(SESSIONS_MAX, SESSIONS_SHARE)
        if len(self._workers) >= most:
            return (
                f"this daemon has {most} sessions, which is the limit: close some, "
                f"or raise its `ulimit -n`, which is {fds.limit()}"
            )
        of_one = min(SESSIONS_OF_ONE_MAX, max(most // 2, 1))
        mine = sum(1 for worker in self._workers.values() if worker.lifeline.pid == pid)
        if mine >= of_one:
            return f"process {pid} has {mine} sessions, which is its limit: close some"
        return None

    def _count_users(self) -> None:
        """The number of sessions has changed."""
        own = self._own()
        users = sum(1 for worker in self._workers.values() if worker.lifeline.pid != own)
        self._linger.count(users)

    def _on_message(self, lifeline: Lifeline, message: protocol.FromClient) -> None:
        if isinstance(message, protocol.Revoked):
            now = self._clock()
            self._post(events.Revoked(now, lifeline.session, message.name, message.generation))
        elif isinstance(message, protocol.Dropped):
            self._lender.dropped(lifeline.session, message.ticket)
        elif isinstance(message, protocol.GivenBack):
            self._mover.settle()
            for release in message.releases:
                if not self._core.problem_with(release):
                    self._post(events.Asked(self._clock(), lifeline.session, release))
        elif isinstance(message, protocol.LetGo):
            self._on_let_go(lifeline.pid, message.token)

    def _on_unread(self, lifeline: Lifeline, count: int, error: str) -> None:
        self._post(events.Unread(self._clock(), lifeline.session, "lifeline", count, error))

    def _on_unread_replies(self, session: int, count: int) -> None:
        self._post(events.Unread(self._clock(), session, "replies", count))

    def _on_gone(self, lifeline: Lifeline) -> None:
        session = lifeline.session
        self._workers.pop(session).close()
        self._count_users()
        self._lender.session_gone(session)
        self._accounts.session_gone(session)
        self._router.forget(lifeline.token)
        del self._peers[session]
        self._left.add(lifeline.token, session, lifeline.pid)
        self._end(session, lifeline.token)

    def _end(self, session: int, token: bytes) -> None:
        """End a session in the core; one that has much ends in steps, with other work in
        between."""
        alive, ending = token in self._left, self._left.is_ending(token)
        if self._core.has_more(session, END_STEP):
            self._post(events.SessionEnds(self._clock(), session, END_STEP, alive, ending))
            self._loop.call_soon(self._end, session, token)
            return
        for key in [k for k in self._revocations if k[0] == session]:
            del self._revocations[key]
        self._post(events.SessionGone(self._clock(), session, alive, ending))
        if alive:
            # later: the event may be queued behind the one that fenced this session
            self._loop.call_soon(self._left.watch, token)

    def _on_let_go(self, pid: int, token: bytes) -> None:
        for worker in list(self._workers.values()):
            if worker.lifeline.token == token and worker.lifeline.pid == pid:
                self._server.gone(worker.lifeline)  # its end is on its way
        self._left.let_go(pid, token)

    # --- actions become I/O --------------------------------------------------------------

    def _reply(self, session: int, request: int, reply: protocol.AnyReply) -> None:
        peer = self._peers.get(session, {}).pop(request, None)
        if peer is not None:
            self._router.reply(peer, reply)

    def _end_session(self, session: int, code: protocol.Code, why: str) -> None:
        if worker := self._workers.get(session):
            self._server.drop(worker.lifeline, code, why)

    def _fence(self, session: int, why: str) -> None:
        self._end_session(session, "fenced", why)

    def _tell(self, session: int, message: protocol.FromDaemon) -> None:
        if worker := self._workers.get(session):
            worker.lifeline.send(message)

    def _do_grant(self, a: actions.Grant, seq: int) -> None:
        if worker := self._workers.get(a.session):
            for place in a.placements:
                mutable = self._core.ledger.components[place.name].mutable
                worker.send_files(place.runs, writable=mutable)
        account = self._accounts.answer(a.session, a.request, a.names, seq)
        granted = protocol.Granted(
            a.request, a.placements, a.waited_s, a.loaded, a.names, account, a.spent
        )
        self._reply(a.session, a.request, granted)

    def _do_refuse(self, a: actions.Refuse, seq: int) -> None:
        account = self._accounts.answer(a.session, a.request, (), seq)
        refused = protocol.Refused(a.request, a.code, a.message, account)
        self._reply(a.session, a.request, refused)

    def _do_accept(self, a: actions.Accept, seq: int) -> None:
        self._reply(a.session, a.request, protocol.Done(a.request))

    def _do_copy_in(self, a: actions.CopyIn, seq: int) -> None:
        self._causes["copy", a.generation] = seq
        self._accounts.load(a, seq)
        landed = partial(self._copies.progress[a.uid].landed, a.generation)
        self._mover.copy_in(a, self._masters.address(a.uid), landed)

    def _do_copy_out(self, a: actions.CopyOut, seq: int) -> None:
        self._causes["copy", a.generation] = seq
        saved = partial(self._copies.progress[a.uid].saved, a.generation)
        self._mover.copy_out(a, self._masters.address(a.uid), saved)

    def _do_lend(self, a: actions.Lend, seq: int) -> None:
        self._causes["copy", a.generation] = seq
        self._lender.lend(a, self._workers)

    def _do_reclaim(self, a: actions.Reclaim, seq: int) -> None:
        self._causes["copy", a.generation] = seq
        self._lender.reclaim(a)

    def _exchange(self, session: int, runs: protocol.Runs, then: Callable[[], None]) -> None:
        self._lender.exchange(session, runs, self._workers, then)

    def _do_revoke(self, a: actions.Revoke, seq: int) -> None:
        if a.ack:
            self._revocations[a.session, a.generation] = seq
        self._tell(a.session, protocol.Revoke(a.name, a.generation, a.ack))

    def _do_evicted(self, a: actions.Evicted, seq: int) -> None:
        """Tell the worker that a write-back is complete, before the core grants the chunks to
        others.

        So a worker that outlives the daemon knows whether the host copy has the latest bytes.
        """
        self._accounts.evicted(a)
        c = self._core.ledger.components.get(a.name)
        if c is not None and (a.bytes_back or c.scratch):
            self._tell(c.session, protocol.Saved(a.name, a.generation, anew=c.kept == ()))

    def _do_want(self, a: actions.Want, seq: int) -> None:
        self._tell(a.session, protocol.Wanted(a.name, a.wanted))

    def _do_hurry(self, a: actions.Hurry, seq: int) -> None:
        self._tell(a.session, protocol.Hurry(a.waits))

    def _do_broken(self, a: actions.Broken, seq: int) -> None:
        self._tell(a.session, protocol.Broken(a.name, a.generation, a.why))

    def _do_make_master(self, a: actions.MakeHostCopy, seq: int) -> None:
        self._causes["master", a.uid] = seq
        self._copies.make(a)

    def _do_seal_master(self, a: actions.SealHostCopy, seq: int) -> None:
        self._causes["master", a.uid] = seq
        self._copies.seal(a, self._core.ledger.masters[a.uid].session)

    def _do_drop_master(self, a: actions.DropHostCopy, seq: int) -> None:
        self._copies.drop(a.uid)

    def _do_waiting(self, a: actions.Waiting, seq: int) -> None:
        self._accounts.waiting(a)

    def _do_evict(self, a: actions.Evict, seq: int) -> None:
        self._accounts.evict(a, seq)

    def _do_fence(self, a: actions.Fence, seq: int) -> None:
        self._fence(a.session, a.why)

    def _do_nothing(self, a: AnyAction, seq: int) -> None:
        """For the record only."""

    _do: ClassVar[dict[type, Callable[["Daemon", Any, int], None]]] = {
        actions.Grant: _do_grant,
        actions.Refuse: _do_refuse,
        actions.Accept: _do_accept,
        actions.CopyIn: _do_copy_in,
        actions.CopyOut: _do_copy_out,
        actions.Lend: _do_lend,
        actions.Reclaim: _do_reclaim,
        actions.Revoke: _do_revoke,
        actions.Want: _do_want,
        actions.Hurry: _do_hurry,
        actions.Broken: _do_broken,
        actions.MakeHostCopy: _do_make_master,
        actions.SealHostCopy: _do_seal_master,
        actions.DropHostCopy: _do_drop_master,
        actions.Fence: _do_fence,
        actions.Waiting: _do_waiting,
        actions.Evict: _do_evict,
        actions.Evicted: _do_evicted,
        actions.Lost: _do_nothing,
        actions.Unpinned: _do_nothing,
    }


def _one_too_many(request: int, unanswered: Collection[int]) -> str | None:
    """Why a session with these unanswered requests may not make this one; None if it may."""
    if request in unanswered:
        return explain.REPLAYED
    if len(unanswered) >= protocol.UNANSWERED_MAX:
        return explain.TOO_MANY_REQUESTS
    return None


def _rules(config: Config) -> Rules:
    return Rules(
        strict=config.isolation == "strict",
        ack_timeout_s=config.ack_timeout,
        residency_factor=config.residency_factor,
        residency_bound_s=config.residency_bound,
        patience_s=config.patience,
    )
