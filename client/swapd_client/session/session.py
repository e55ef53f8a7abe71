"""One session with the daemon: its parts, and the handling of the daemon's messages.

All that both clients share is here and in the modules beside. A background thread reads the
lifeline: revocations, `wanted`, descriptors, and EOF, which ends every wait.
"""

import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from swapd.shared import protocol
from swapd.shared.board import Board
from swapd.shared.fds import OwnedFd
from swapd_client.errors import (
    ClientClosed,
    DaemonGone,
    SessionEnded,
    SessionFenced,
    SwapdError,
    from_refusal,
)
from swapd_client.leases.arrivals import Arrivals
from swapd_client.leases.leases import Leases
from swapd_client.memory import ranges
from swapd_client.memory.part import Part
from swapd_client.session.endpoint import need_descriptors, need_threads
from swapd_client.session.gpu import Gpu
from swapd_client.session.life import Files, Life, Masters, WaiterNotices
from swapd_client.session.lifeline import ANSWER_S, Lifeline
from swapd_client.session.processor import Processor
from swapd_client.session.registry import Registry

Call = Callable[[protocol.AnyRequest], protocol.AnyReply]

AFTERWARDS = (
    "attached models join it at their next call, and what has no model: close() makes all tensors "
    "private memory, then connect again"
)

SESSION_DESCRIPTORS = 10


class Session:
    """A process's session with one daemon. Thread-safe, except that `close` comes last."""

    #: Whether there is no daemon: see `disabled.py`.
    is_disabled = False
    _line: type[Lifeline] = Lifeline
    _gpu: Any = Gpu
    _registry: type[Registry] = Registry
    channels: Any = None
    #: Opens a session with the next daemon, within the seconds given.
    again: Callable[[float], "Session"]

    def __init__(self, endpoint: Path, label: str, answer_s: float = ANSWER_S) -> None:
        """Connect and shake hands, each within `answer_s`.

        Raises: NotRunning, Timeout, VersionMismatch, DaemonGone, LimitReached.
        """
        self.endpoint = endpoint
        need_descriptors(SESSION_DESCRIPTORS, "to connect")
        need_threads(2, "to connect")
        self.lifeline = self._line(endpoint, answer_s)
        self.life = Life()
        try:
            self.welcome, board = self.lifeline.shake_hands(label)
        except BaseException:
            self.lifeline.close()
            self.life.ended.close()
            raise
        with board:
            self._board = Board(board)
        self.told = WaiterNotices()
        self._files = Files(self.welcome.chunks_per_file)
        self.masters = Masters(self.life)
        on_gpu = self.welcome.device.startswith("cuda")
        self.processor: Processor = (
            self._gpu(self.welcome, self._files, self._board)
            if on_gpu
            else Processor(self.welcome, self._files, self.life.lock)
        )
        self.registry = self._registry(
            self.life,
            self.processor,
            self._board,
            self.masters,
            self.told,
            self.welcome.chunk_bytes,
        )
        self.components = parts = self.registry.parts
        self.arrivals = Arrivals(self.life, self.processor, self._board, parts)
        self.leases = Leases(
            self.life, self.processor, parts, self.arrivals, strict=self.welcome.strict
        )
        #: Bound methods save a call: each hit calls `check`.
        self.check, self.own = self.life.check, self.registry.own
        self._ids = 0
        #: Whether a call of `close` is under way, or was the last; whether that is done.
        self._closing = self.closed = False
        self.lifeline.listen(self._on_message, self._on_end)
        alive[self] = None

    def __repr__(self) -> str:
        return f"<Session {self.welcome.session} at {self.endpoint}>"

    # --- for the two clients -------------------------------------------------------------

    def next_id(self) -> int:
        with self.life.lock:
            self._ids += 1
            return self._ids

    def harmless(self) -> protocol.Release:
        """Return a request that changes nothing. Its reply shows that earlier messages arrived."""
        number = self.next_id()
        return protocol.Release(number, number, ack=True)

    @property
    def forked(self) -> bool:
        return self.life.forked

    @property
    def locks(self) -> tuple[Any, ...]:
        """RLocks that the session's threads take, beside those of components."""
        return self.life.lock, self._files.lock, self.masters.lock

    @property
    def error(self) -> SwapdError | None:
        return self.life.error

    def has(self, part: Part) -> bool:
        """Whether a component is registered here, or waits for the next daemon."""
        return self.components.get(part.name) is part

    def unwrap(self, reply: protocol.AnyReply) -> protocol.AnyReply:
        """Return a reply; raise the error of a refusal."""
        if isinstance(reply, protocol.Refused):
            self.check()  # the reason for the session's end goes first
            error = from_refusal(reply)
            self.life.deserted |= isinstance(error, SessionEnded)  # the daemon stops
            raise error
        return reply

    def renew(self, part: Part, master: OwnedFd) -> None:
        """Use the host copy of a committed update. Leases hold the old bytes. May be repeated."""
        with self.life.lock:
            if not self.has(part):  # another thread has closed the client
                return master.close()
            old = part.master
            part.master, part.renewed = master, self._ids
            part.layout.content = ""  # no longer the bytes of its source, for the next daemon
            self.leases.renewed(part.name)
        if old is not None and old is not master:
            old.close()

    # --- the lifeline --------------------------------------------------------------------

    def _on_message(self, message: protocol.FromDaemon, fds: list[OwnedFd]) -> None:
        match message:
            case protocol.Revoke() as revoke:
                self._revoke(revoke)
            case protocol.Saved() as saved:
                self.registry.saved(saved)
            case protocol.Wanted() | protocol.Hurry():
                self.told.hear(message)
            case protocol.Master() as master:
                (fd,) = fds
                self.masters.add(master, fd)
            case protocol.Files() as files:
                self._files.add(files, fds)
            case protocol.Drop() as drop:
                self._drop(drop)
            case protocol.Broken() as broken:
                self.arrivals.broken(broken)
            case protocol.Goodbye() as goodbye:
                self._on_goodbye(goodbye)
            case protocol.Welcome():
                raise ValueError("a second welcome")

    def _revoke(self, revoke: protocol.Revoke) -> None:
        if self.registry.take_away(revoke.name, revoke.generation) and revoke.ack:
            self.lifeline.send(protocol.Revoked(revoke.name, revoke.generation))

    def _drop(self, drop: protocol.Drop) -> None:
        """Drop chunks and confirm it, or the daemon ends the session."""
        if self.processor.drop(self.registry.all(), drop.numbers):
            self.lifeline.send(protocol.Dropped(drop.ticket))

    def _on_goodbye(self, goodbye: protocol.Goodbye) -> None:
        if goodbye.code == "stopping":
            self.end(from_refusal(goodbye))
        else:
            self._cut_off(from_refusal(goodbye))

    def _on_end(self, why: Exception | None) -> None:
        """Handle the end of the lifeline. If nothing announced it, the daemon died or ended this
        session.
        """
        if why is not None:
            untaken = (
                f"{self.endpoint}: a message of the daemon is unusable, so this session is "
                f"over: {why}. close() makes all tensors private memory. Then connect again"
            )
            self._cut_off(SessionFenced(untaken))
        elif self.error is not None:
            return
        elif self.lifeline.is_daemon_alive():
            now = "unmapped" if self.processor.memory_is_scarce else "private now"
            fenced = (
                f"{self.endpoint}: the daemon has ended this session; its log tells why. Leased "
                f"memory is {now}; {AFTERWARDS}"
            )
            self._cut_off(SessionFenced(fenced))
        else:
            gone = (
                f"{self.endpoint}: the daemon is gone. Leased memory stays mapped. Start swapd "
                "again: once no lease is in use, the next call joins it (after "
                "connect(reconnect=0), that of an attached model). Or close(): all tensors are "
                "private memory then"
            )
            self.end(DaemonGone(gone))

    def fenced(self) -> SessionFenced | None:
        """Return the error if results may be wrong, because others may have used the memory
        meanwhile.

        None is reliable: the board shows the end before others use the memory. If it does, this
        blocks until the reason is known. Costs no system call.
        """
        life = self.life
        if life.error is None:
            if life.left_to_parent or not self._board.ended:
                return None
            life.await_end()
        return life.error if isinstance(life.error, SessionFenced) else None

    # --- the end -------------------------------------------------------------------------

    def _cut_off(self, error: SwapdError) -> None:
        """End the session of a daemon that goes on, whose chunks others will use.

        The daemon keeps the chunks of mutable components for this process.
        """
        clean = [part for part in self.registry.all() if not part.mutable]
        self.processor.cut_off(clean, partial(self.end, error))

    def end(self, error: SwapdError) -> None:
        """Set the reason, once, and wake every wait. May be repeated after an interrupt."""
        with self.life.lock:
            if self.life.error is None:
                self.life.deserted |= isinstance(error, SessionEnded)
                for part in self.components.values():
                    part.incomplete = part.placed is not None and not self.arrivals.is_complete(
                        part.placed
                    )
                self.leases.cut()
                self.life.end(error)
        if self.life.told:
            return
        self.masters.end()
        self._files.end()
        self._board.fail_all([part.slot for part in self.registry.all()])
        assert self.life.error is not None
        self.life.tell(self.life.error)
        self.leases.free_unused()

    def leave(self) -> None:
        """Leave all components to the next daemon's session: they wait until `handed_over` or
        `close`.

        On a GPU, bytes that a host copy has take no memory meanwhile. May be repeated. Raises:
        DeviceFailed.
        """
        self._hang_up()
        self.registry.unbinding.leave_all(self.registry.all())
        self._let_go()

    def handed_over(self) -> None:
        """Close the session: the next daemon has all that waited here."""
        for part in self.registry.all():
            if part.where.over:  # without tensors, so it did not join
                ranges.remove(part)
                part.close_old()
        alive.pop(self, None)
        self._closing = self.closed = True

    def close(self, *, keep: bool = True) -> None:
        """End the session: every component becomes private memory, with its weights.

        Without `keep` the ranges are unmapped instead. No-op if closed, and while another call is
        under way, in another thread or interrupted by this signal handler. After an error or an
        interrupt, the next call goes on.
        """
        mine = False
        try:
            if self.life.left_to_parent:  # first: the lock may be held for good
                return
            with self.life.lock:
                if self._closing:
                    return
                self._closing = mine = True
            self._close(keep=keep)
        except BaseException:
            if mine:
                self._closing = False
            raise
        self.registry.unbinding.warn()

    def _close(self, *, keep: bool) -> None:
        """Close the session. Each step may be repeated."""
        self._hang_up()
        if keep:
            self.registry.unbinding.make_all_private(self.registry.all(), self.error)
        else:
            self.registry.unbinding.let_go_of_all(self.registry.all())
        self._let_go()
        alive.pop(self, None)
        self.closed = True

    def _hang_up(self) -> None:
        # the daemon's end may not be known yet
        self.life.deserted |= not self.lifeline.is_daemon_alive()
        self.end(ClientClosed("this client is closed; connect again"))
        self.lifeline.close()
        self.registry.unbinding.note_mutable(self.registry.all())

    def _let_go(self) -> None:
        """Close the rest. What still maps memory of the daemon, `Unbinding.when_left` awaits."""
        with self.life.lock:
            self.leases.closed = True
        self.masters.close()
        self._files.close()
        self.processor.close()
        self.registry.unbinding.when_left(partial(self.lifeline.let_go, self.welcome.token))

    def _leave_to_parent(self) -> None:
        self.life.leave_to_parent()
        self.lifeline.forget()


#: Open sessions. `keyrefs` may be listed while other threads add some.
alive: "weakref.WeakKeyDictionary[Session, None]" = weakref.WeakKeyDictionary()


def _forget_in_child() -> None:
    for session in list(alive):
        session._leave_to_parent()


os.register_at_fork(after_in_child=_forget_in_child)
