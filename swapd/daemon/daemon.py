"""The composition root: connects one device, one event loop and one core with their I/O. Also
applies settings, handles signals, and orders start and stop."""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from swapd import __version__
from swapd.core import Residency, Rules, actions, events, explain
from swapd.daemon.dispatch import Dispatch, Perform
from swapd.daemon.host_copies import HostCopies
from swapd.daemon.host_copy_orders import HostCopyOrders
from swapd.daemon.lending import Lender, WorkerConnection
from swapd.daemon.mover import Mover
from swapd.daemon.parking import Parking
from swapd.daemon.router import Publisher
from swapd.daemon.sessions import Sessions
from swapd.daemon.statuses import Statuses
from swapd.device import Device
from swapd.log.records import Start
from swapd.log.swap_log import SwapLog, SwapLogFile, place
from swapd.shared import runtime_dir
from swapd.shared.config import Config, ConfigError, shown, watchdog_s
from swapd.shared.runtime_dir import Folder
from swapd.shared.system import LimitError, has_terminal, notify_systemd, start
from swapd.shared.units import seconds

log = logging.getLogger("swapd")

#: Rules of the core. Their changes are records of the swap log, so that replays follow them.
RULES = (
    *("ack_timeout", "residency_factor", "residency_bound", "patience", "overtake", "turn"),
    *("keep_host", "overtake_of"),
)
#: Settings that a reload changes.
RELOADED = (*RULES, "stop_timeout", "linger", "swap_log_size", "swap_log_age", "host_memory")
#: Shortest wait for the first session of a daemon with `linger`.
FIRST_S = 10.0


class Daemon:
    """Serves one device from one runtime folder until it is told to stop.

    The caller owns `device` and `folder`, and has claimed `folder`.
    """

    def __init__(
        self,
        config: Config,
        device: Device,
        folder: Folder,
        read_again: Callable[[], Config] | None = None,
        own: Callable[[], int | None] = lambda: None,
        *,
        may_upgrade: bool = False,
    ) -> None:
        """`read_again()` returns the current settings, for SIGHUP; `own()` the pid of the daemon's
        own child, whose session does not keep the daemon running. With `may_upgrade`, SIGUSR2 ends
        `run`."""
        self._config = config
        self._read_again = read_again or (lambda: config)
        self._reads = False
        self._own = own
        self._may_upgrade, self._upgrades = may_upgrade, False
        #: Whether it was told to stop since `upgrade`, perhaps after the loop has ended.
        self.told_to_stop = False
        self._device = device
        self._folder = folder
        self._core = Residency(device.chunks, device.chunk_bytes, _rules(config))
        self._copies = HostCopies(config.host_memory, device)
        self._connections: dict[int, WorkerConnection] = {}
        #: Timer that stops a daemon without sessions; whether there has been one: the first client
        #: may take a while to connect.
        self._linger: asyncio.TimerHandle | None = None
        self._used = False
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()

    async def run(self, ready: Callable[[], None] = lambda: None) -> bool:
        """Serve until SIGTERM, SIGINT, `stop` or `upgrade`; call `ready` when clients may connect.

        Return True after `upgrade`: leases may still be held. On return, all bytes that were only
        on the device are saved, unless the daemon was told twice to stop. Threads may still use
        host copies and the device: do not close it, and end the process without waiting
        (`os._exit`). Raises: any error that broke the daemon; workers keep their mappings.
        """
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._open()
        stopping = self._loop.create_task(self._stop.wait(), name="stop")
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            self._loop.add_signal_handler(signal.SIGHUP, self._on_hangup, has_terminal())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))
        if self._may_upgrade:
            self._loop.add_signal_handler(signal.SIGUSR2, self.upgrade)
        self._beat()
        self._count_users()
        try:
            notify_systemd("READY=1")
            ready()
            log.info("serving %s in %s", self._device, self._folder.path)
            await asyncio.wait((stopping, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            if not self._upgrades:
                await self._wind_down()
        finally:
            stopping.cancel()
            await self._close()
        if self._upgrades:
            self._parking.leave()
        else:
            self._parking.close()
        return self._upgrades

    def _beat(self) -> None:
        if (waits_s := watchdog_s()) is not None:
            notify_systemd("WATCHDOG=1")
            self._loop.call_later(waits_s / 2, self._beat)

    def stop(self) -> None:
        """Stop cleanly: refuse waiters, and wait until leases end and bytes are saved. A second
        call stops all waiting; after `upgrade`, the first call turns that into a stop."""
        if self._stop.is_set() and not self._upgrades:
            log.warning("told twice to stop: waiting for nothing more")
            self._dispatch.quiet.set()
            self._at_once.set()
        self._upgrades = False
        self._stop.set()

    def upgrade(self) -> None:
        """End without waiting for leases, for the next version to take over."""
        self._loop.remove_signal_handler(signal.SIGUSR2)
        # until the next version has its handlers: without them these signals end it
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))
        if not self._stop.is_set():
            log.warning("upgrading: sessions end, and their processes join the next version")
            self._upgrades = True
            self._stop.set()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._note_stop)  # the loop's handlers are called as before

    def _note_stop(self, *_: object) -> None:
        self.told_to_stop = True

    def _stop_unused(self, linger_s: float) -> None:
        """Stop, and accept no more clients: they must find the next daemon."""
        if self._stop.is_set():
            return  # its sessions have ended because it stops or upgrades
        log.info("stopping: no session for %s, as --linger says", seconds(linger_s))
        self._sessions.close()
        self.stop()

    def _on_hangup(self, had_terminal: bool) -> None:
        if had_terminal and not has_terminal():
            self.stop()
        else:
            self._reload()

    def _count_users(self) -> None:
        own, linger_s = self._own(), self._config.linger
        users = any(one.lifeline.pid != own for one in self._connections.values())
        self._used = self._used or users
        if self._linger is not None:
            self._linger.cancel()
        if not users and linger_s is not None:
            after_s = linger_s if self._used else max(linger_s, FIRST_S)
            self._linger = self._loop.call_later(after_s, self._stop_unused, linger_s)

    def _crashed(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    # --- reload --------------------------------------------------------------------------

    def _reload(self) -> None:
        """Read the settings in a thread, because a disk may hang. Ignore calls while it runs."""
        if self._reads:
            return
        self._reads = True
        try:  # a daemon thread: nobody waits for it if a disk blocks it for ever
            start(threading.Thread(target=self._read, name="swapd-reload", daemon=True))
        except LimitError as exc:
            self._have_read(exc)

    def _read(self) -> None:
        found: Config | Exception
        try:
            found = self._read_again()
        except Exception as exc:  # noqa: BLE001 - it is raised in the loop, or said there
            found = exc
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._have_read, found)

    def _have_read(self, found: Config | Exception) -> None:
        self._reads = False
        if isinstance(found, Config):
            self._change(found)
        elif isinstance(found, ConfigError | LimitError):
            log.warning("not reloaded, and no setting has changed: %s", found)
        else:
            self._crashed(found)

    def _change(self, found: Config) -> None:
        old = {name: getattr(self._config, name) for name in Config.__struct_fields__}
        new = {name: value for name in old if (value := getattr(found, name)) != old[name]}
        changed = {name: value for name, value in new.items() if name in RELOADED}
        fixed = {name: value for name, value in new.items() if name not in RELOADED}
        self._apply(msgspec.structs.replace(self._config, **changed))
        said = _changes(old, changed) or "no setting that can be reloaded differs"
        log.warning("reloaded: %s", said)
        if fixed:
            log.warning("not reloaded, restart swapd for it: %s", _changes(old, fixed))

    def _apply(self, config: Config) -> None:
        self._config = config
        self._count_users()
        self._swap_log.limit(config.swap_log_size, config.swap_log_age)
        self._copies.limit_bytes = config.host_memory
        if (rules := _rules(config)) != self._core.rules:
            _, *names = events.RulesChanged.__struct_fields__
            changed = {name: getattr(rules, name) for name in names}
            self._dispatch.post(events.RulesChanged(self._dispatch.clock(), **changed))

    # --- start ---------------------------------------------------------------------------

    def _open(self) -> None:
        loop, device, folder = self._loop, self._device, self._folder
        core, connections = self._core, self._connections
        self._publisher = Publisher(loop, folder.inside / runtime_dir.EVENTS, self._crashed)
        self._open_swap_log()
        self._dispatch = dispatch = Dispatch(core, self._swap_log, loop, self._crashed)
        self._mover = Mover(device, dispatch)
        self._lender = lender = Lender(device, connections, dispatch)
        self._copy_orders = HostCopyOrders(self._copies, device, connections, dispatch)
        self._parking = Parking(core.ledger.host, self._copies, folder, dispatch)
        self._statuses = Statuses(
            core, device, self._copies, folder.path, self._swap_log, connections, dispatch, lender
        )
        self._sessions = Sessions(
            connections,
            core,
            device,
            folder,
            dispatch,
            self._mover,
            lender,
            self._statuses,
            self._count_users,
        )
        dispatch.perform = self._orders()
        self._parking.take_back(core.rules.keep_host, device)
        if device.missing:
            dispatch.post(events.MemoryMissing(dispatch.clock(), device.missing))

    def _open_swap_log(self) -> None:
        config, device = self._config, self._device
        path, own, self._log_lock = place(config, self._folder)
        file = SwapLogFile(path, config.swap_log_size, config.swap_log_age, own)
        self._swap_log = SwapLog(file, self._publisher.publish, self._loop)
        chunks, chunk_bytes = device.chunks, device.chunk_bytes
        self._swap_log.start(Start(__version__, device.name, chunks, chunk_bytes, self._core.rules))

    def _orders(self) -> dict[type, Perform]:
        """Return how to carry out each action; actions without an entry are only logged."""
        copies, lender, owners = self._copy_orders, self._lender, self._core.ledger.host.owners
        return {
            **self._sessions.orders(),
            actions.CopyIn: self._copy_in,
            actions.Hasten: lambda a: self._mover.hasten(a.generation, a.urgency),
            actions.StopCopy: lambda a: self._mover.stop(a.generation),
            actions.CopyOut: self._copy_out,
            actions.Lend: lender.lend,
            actions.Reclaim: lender.reclaim,
            actions.MakeHostCopy: copies.make,
            actions.SealHostCopy: lambda a: copies.seal(a, owners[a.uid].session),
            actions.KeepHostCopy: self._keep_host_copy,
            actions.DropHostCopy: lambda a: copies.drop(a.uid, self._parking.unpark(a.uid)),
        }

    def _keep_host_copy(self, a: actions.KeepHostCopy) -> None:
        self._copy_orders.keep(a.uid)
        self._parking.park(a.uid)

    def _copy_in(self, a: actions.CopyIn) -> None:
        landed = partial(self._copy_orders.progress[a.uid].landed, a.generation)
        self._mover.copy_in(a, self._copies.address(a.uid), landed)

    def _copy_out(self, a: actions.CopyOut) -> None:
        saved = partial(self._copy_orders.progress[a.uid].saved, a.generation)
        self._mover.copy_out(a, self._copies.address(a.uid), saved)

    # --- stop ----------------------------------------------------------------------------

    async def _wind_down(self) -> None:
        log.info("stopping: %s", self._core)
        notify_systemd("STOPPING=1")
        self._dispatch.post(events.Stopping(self._dispatch.clock()))
        try:
            async with asyncio.timeout(self._config.stop_timeout):
                await self._dispatch.quiet.wait()
        except TimeoutError:
            log.warning(
                "stopping with leases still %s; --stop-timeout (%g s) is over",
                explain.held(self._core.ledger),
                self._config.stop_timeout,
            )

    async def _close(self) -> None:
        """Save bytes and close all connections. Host copies are not freed: the end of the process
        does that many times faster."""
        self._sessions.close()
        self._dispatch.close()
        self._dispatch.stop()
        await self._saved()
        self._swap_log.close()
        if self._log_lock is not None:
            self._log_lock.close()
        self._publisher.close()
        self._folder.remove_sockets()

    async def _saved(self) -> None:
        work = self._loop.create_task(self._mover.finish(), name="save")
        told = self._loop.create_task(self._at_once.wait(), name="at once")
        await asyncio.wait((work, told), return_when=asyncio.FIRST_COMPLETED)
        for task in (work, told):
            task.cancel()
        await asyncio.gather(work, told, return_exceptions=True)


def _rules(config: Config) -> Rules:
    return Rules(
        strict=config.isolation == "strict",
        ack_timeout_s=config.ack_timeout,
        residency_factor=config.residency_factor,
        residency_bound_s=config.residency_bound,
        patience_s=config.patience,
        overtake=config.overtake,
        overtake_of=config.overtakes,
        turn_s=config.turn,
        eviction=config.eviction,
        order=config.orders,
        keep_host=int(config.keep_host),
    )


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    return ", ".join(f"{name} {shown(name, old[name])} -> {shown(name, new[name])}" for name in new)
