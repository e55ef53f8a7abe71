"""One session with the daemon: the lifeline, its thread, and what is mapped where.

Both clients, sync and async, are a way of carrying requests; everything they have in
common is here. One background thread per session reads the lifeline: revocations,
`wanted`, the descriptors of masters, and EOF, which ends every wait.
"""

import _thread
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args

from swapd.shared import protocol, vm
from swapd.shared.board import ArrivalFailed, Board, word
from swapd.shared.fds import OwnedFd
from swapd.shared.runtime_dir import Folder
from swapd.shared.units import size
from swapd_client.errors import (
    BadRequest,
    ClientClosed,
    DaemonGone,
    DeviceFailed,
    DeviceMemoryExhausted,
    DuplicateName,
    ForkedClient,
    InvalidSource,
    NotAnswering,
    SessionFenced,
    SwapdError,
    UnknownComponent,
    from_refusal,
)
from swapd_client.leases.agents import Agent
from swapd_client.leases.linger import Work
from swapd_client.memory import former, ranges
from swapd_client.memory.component import Component, Place
from swapd_client.memory.former import Former
from swapd_client.memory.layout import Layout, OtherBytes, Segments, layout_of
from swapd_client.memory.mapping import Range
from swapd_client.session.endpoint import need_descriptors
from swapd_client.session.files import Files
from swapd_client.session.gpu import Gpu, GpuRange, GpuWork
from swapd_client.session.lifeline import ANSWER_S, Lifeline
from swapd_client.session.masters import Masters

log = logging.getLogger("swapd_client")

#: Descriptors that a session opens at once, and that come with a master.
SESSION_DESCRIPTORS = 10
MASTER_DESCRIPTORS = 4
#: How long a client that closes waits for GPU work under leases that were released.
DRAIN_S = 60.0


class Session:
    """What a process has with one daemon. Thread-safe, except that `close` comes last."""

    def __init__(self, endpoint: Path, label: str, answer_s: float = ANSWER_S) -> None:
        """Connect and shake hands, each within `answer_s`.

        Raises: NotRunning, NotAnswering, VersionMismatch, DaemonGone.
        """
        self.endpoint = endpoint
        self.components: dict[str, Component] = {}
        #: Names whose memory somebody waits for; read by `lease.wanted`.
        self.wanted: set[str] = set()
        #: Whether somebody waits for what leases may hold: none is kept that is not used.
        self.hurried = False
        #: What the daemon granted and nobody released, by the request's id.
        self.leases: dict[int, protocol.Granted] = {}
        self._lock = threading.Lock()
        #: What stands for it where it is not to be kept alive.
        self._owner = object()
        self._ids = 0
        #: Leases on what was updated since they were granted.
        self.outdated: set[int] = set()
        #: Why a residency that was granted early will never be complete.
        self._broken: dict[tuple[str, int], str] = {}
        #: By lease: slots and words that streams of this process wait for.
        self._awaited: dict[int, list[tuple[int, int]]] = {}
        #: Leases whose streams went on without what they waited for, as the session ended.
        self._cut: set[int] = set()
        #: By component: where it was when it was granted last.
        self._placed: dict[str, protocol.Placement] = {}
        #: Those of which not every byte had come in there when the session ended.
        self._incomplete: set[str] = set()
        #: Leases that were released, and wait for the GPU.
        self._ending: set[int] = set()
        self._masters = Masters()
        self._error: SwapdError | None = None
        #: Whether requests make sense; if not, `check` says why.
        self.usable = True
        self._listeners: list[Callable[[SwapdError], None]] = []
        self._wanted_listeners: list[Callable[[], None]] = []
        self._forked = False
        self._process = os.getpid()
        self._closed = False
        #: Where memory of the daemon's stays mapped for writing when the session is closed.
        self._staying: list[Place] = []
        #: What closes a session whose client was dropped without a word.
        self._close_late: Callable[[], None] | None = None
        #: The daemon has left this session, and not the other way round.
        self._deserted = False
        need_descriptors(SESSION_DESCRIPTORS, "to connect")
        self._lifeline = Lifeline(endpoint, answer_s)
        #: Becomes readable, for good, when the session ends.
        self.ended = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        try:
            self.welcome, board = self._lifeline.shake_hands(label)
        except BaseException:
            self._lifeline.close()
            self.ended.close()
            raise
        with board:
            self._board = Board(board)
        self._files = Files(self.welcome.chunks_per_file)
        #: None on the host device.
        self.gpu: Gpu | None = None
        if self.welcome.device.startswith("cuda"):
            self.gpu = Gpu(self.welcome, self._files, self._board)
        self._lifeline.listen(self._on_message, self._on_end)
        _alive.add(self)

    @property
    def folder(self) -> Folder:
        """The daemon's runtime folder, open until `close`."""
        return self._lifeline.folder

    def __repr__(self) -> str:
        return f"<Session {self.welcome.session} at {self.endpoint}>"

    # --- for the two clients -------------------------------------------------------------

    def next_id(self) -> int:
        with self._lock:
            self._ids += 1
            return self._ids

    def check(self) -> None:
        """Raise if requests make no sense any more, saying why."""
        if self._forked:
            raise ForkedClient(
                "this process was forked from one that uses swapd: sessions and weights stay "
                "with the parent. Connect in the child, or start it with spawn"
            )
        if self._error is not None:
            raise self._error

    @property
    def forked(self) -> bool:
        """Whether this is another process than the one that connected."""
        return os.getpid() != self._process

    @property
    def error(self) -> SwapdError | None:
        """Why the session ended, or None."""
        return self._error

    def not_answering(self, timeout_s: float) -> NotAnswering:
        """What to raise if the daemon did not answer within that."""
        return self._lifeline.not_answering(timeout_s)

    def when_ended(self, listener: Callable[[SwapdError], None]) -> None:
        """Call `listener` with why, in the lifeline's thread, when the session ends."""
        self._listeners.append(listener)

    def when_wanted(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the lifeline's thread when `wanted` grows, or somebody begins to wait
        for what leases hold. It must not block."""
        self._wanted_listeners.append(listener)

    def may_linger(self, granted: protocol.Granted, names: tuple[str, ...]) -> bool:
        """Whether a lease may stay held for a moment after its release, unseen by the daemon.

        Asked when it is granted. Not under strict isolation, where nothing may be touched from
        its release on; not if something it was granted early still comes in; and not of what
        other sessions own, which may be gone or another when it is taken again.
        """
        if len(granted.placements) != len(set(granted.names or names)):
            return False
        if self._error is not None or self.welcome.strict:
            return False
        self.check()
        with suppress(ArrivalFailed):
            return all(self._has_arrived(place) for place in granted.placements)
        return False

    def _has_arrived(self, place: protocol.Placement) -> bool:
        part = self.components[place.name]
        return self._board.has(part._slot, word(place.generation, part.segments))

    def _is_complete(self, place: protocol.Placement) -> bool:
        try:
            return self._has_arrived(place)
        except ArrivalFailed:
            return False

    def unwrap(self, reply: protocol.AnyReply) -> protocol.AnyReply:
        """Return a reply that is not a refusal; raise the one that is."""
        if isinstance(reply, protocol.Refused):
            self.check()  # a session that has ended says so itself, and why
            raise from_refusal(reply)
        return reply

    @property
    def gpu_index(self) -> int | None:
        """The number of the daemon's GPU in this process; None on the host device."""
        return self.gpu.card.index if self.gpu else None

    def prepare(
        self,
        name: str,
        source: object,
        *,
        mutable: bool,
        segments: Segments = (),
        part_of: str = "",
        stays: bool = False,
    ) -> Component:
        """Reserve a range for `source`, or take back the one that it lies in since it was a
        component before. Nothing is copied or rebound yet.

        On a GPU it blocks for a moment the first time. Raises: DeviceUnavailable there; if it
        `stays`, and cannot where it is, InvalidSource.
        """
        self.check()
        with self._lock:
            if name in self.components:
                raise DuplicateName(f"{name!r} is registered by this process; unregister it first")
        with ranges.moving:
            layout = layout_of(source, segments, self.gpu_index)
            claim = ranges.Claim(self._owner, part_of or name, tuple(layout.memory))
            ranges.claim(claim, layout.origins())
        try:
            where = self._place(name, layout, writable=mutable, stays=stays)
        except BaseException:
            ranges.release(claim)
            raise
        part = Component(name, layout, where, mutable=mutable, part_of=part_of)
        part._claim = claim
        return part

    def _place(self, name: str, layout: Layout, *, writable: bool, stays: bool) -> Place:
        before = self._take_back(layout)
        try:
            if stays and before is None and layout.nbytes:
                raise InvalidSource(
                    f"{name!r} cannot stay where it is: it was no component as it is now, or was "
                    f"one in chunks of another size than {size(self.welcome.chunk_bytes)}"
                )
            return self._reserve(layout.nbytes, before and before.where, writable=writable)
        except BaseException:
            if before is not None:
                former.keep(self._device, before)
            raise

    def _reserve(self, nbytes: int, before: Place | None, *, writable: bool) -> Place:
        if self.gpu is not None:
            assert before is None or isinstance(before, GpuRange)
            return GpuRange(nbytes, self.gpu.card, writable=writable, before=before)
        assert before is None or isinstance(before, Range)
        chunk_bytes = self.welcome.chunk_bytes
        return Range(nbytes, chunk_bytes, self._files, writable=writable, before=before)

    @property
    def _device(self) -> str:
        """Where private memory of this session's is: the GPU, or "" for the host."""
        return self.welcome.uuid if self.gpu is not None else ""

    def _take_back(self, layout: Layout) -> Former | None:
        """What of this process's own memory `layout` lies in, if it can be a component there."""
        found = former.take(self._device, layout.lies())
        if found is None:
            return None
        where = found.where
        if self._has_room(where) and layout.stay(where.address):
            return found
        former.keep(self._device, found)
        return None

    def _has_room(self, where: Place) -> bool:
        """On a GPU a chunk is mapped as a whole."""
        if not isinstance(where, GpuRange):
            return True
        return vm.round_up(where.nbytes, self.welcome.chunk_bytes) <= where.reserved

    def _keep(self, part: Component) -> None:
        """Its tensors are over private memory now: those that lost their daemon can go back.

        What somebody took back by `unregister` or `close` is his own: he may share it with tensors
        that swapd knows nothing of.
        """
        if part._range.taken_over or self._deserted:
            former.keep(self._device, Former(part._range, part._layout.spans(part.address)))

    def prepare_family(
        self, name: str, parts: Mapping[str, Any], *, mutable: bool
    ) -> list[Component]:
        """Reserve a range for each of `parts`, or for none of them."""
        if not parts:
            raise BadRequest(f"{name!r} has no parts; give at least one")
        prepared: list[Component] = []
        try:
            for part, source in parts.items():
                called = protocol.part_name(name, part)
                prepared.append(self.prepare(called, source, mutable=mutable, part_of=name))
            _check_apart(prepared)
        except BaseException:
            for made in prepared:
                self.discard(made)
            raise
        return prepared

    def family(self, name: str) -> list[str]:
        """The components that this process registered as parts of `name`, in order."""
        with self._lock:
            return [part.name for part in self.components.values() if part.part_of == name]

    def register_request(
        self, part: Component, policy: protocol.Policy, group: str | None, *, passing: bool
    ) -> protocol.Register:
        if policy not in (policies := get_args(protocol.Policy)):
            raise BadRequest(f"there is no policy {policy!r}; there are: {', '.join(policies)}")
        need_descriptors(MASTER_DESCRIPTORS, f"to register {part.name}")
        part._asked = self.next_id()
        return protocol.Register(
            part._asked,
            part.name,
            part.nbytes,
            part._layout.digest(),
            policy,
            group,
            part.mutable,
            part._layout.segments if part.segments > 1 else (),
            part.part_of,
            part._layout.content,
            passing,
        )

    def fill(self, part: Component) -> None:
        """Copy the source into the master the daemon has sent. Blocks for the copy.

        If another process has filled it, it is compared instead: all that the daemon knows is that
        this process said that it would have these bytes. Raises: OtherBytes if it has not.
        """
        message, part._master = self.take_master(part._asked)
        part._slot = message.slot
        if part.nbytes and message.filled:
            if not part._layout.matches(part._master.fileno()):
                raise OtherBytes(part.name)
        elif part.nbytes:
            part._layout.fill_file(part._master.fileno())
        with self._lock:  # before the commit: another thread may be granted it right after
            self.components[part.name] = part

    def bind(self, part: Component) -> None:
        """The daemon has accepted the master: the source now lives at the range."""
        assert part._claim is not None
        with ranges.moving:
            part.bind()
            ranges.add(part, self._owner)
            ranges.release(part._claim)
        self._try(part._range.give_up_private)

    def start_over(self, parts: Iterable[Component], lie: OtherBytes) -> None:
        """These are to be registered again, and share nothing: what they were to share is a lie."""
        log.warning(
            "what another process shares as %r has other bytes than the files: it is not used, and "
            "read from the files instead. swapd status says who loads the same",
            lie.name,
        )
        for part in parts:
            self._forget(part)
            part._close()
            part._master, part._asked, part._layout.content = None, 0, ""

    def _forget(self, part: Component) -> None:
        with self._lock:
            if self.components.get(part.name) is part:
                del self.components[part.name]
        if part._asked and part._master is None:
            self.forget_master(part._asked)

    def discard(self, part: Component) -> None:
        """Registering failed: leave nothing of it. The source was not touched."""
        assert part._claim is not None
        ranges.release(part._claim)
        self._forget(part)
        if not part._range.taken_over:
            part._range.discard()
        elif part._range.stay_private():
            self._keep(part)
        else:  # another thread was granted it already
            self._try_unbind(part, keep_shown=part.mutable)
        part._close()

    def renew(self, part: Component, master: OwnedFd) -> None:
        """An update is committed: `master` has the bytes now; leases are on the old ones."""
        with self._lock:
            old, part._master = part._master, master
            part._renewed = self._ids
            self.outdated.update(
                lease
                for lease, granted in self.leases.items()
                if any(place.name == part.name for place in granted.placements)
            )
        if old is not None:
            old.close()

    def map_master(self, part: Component) -> int | None:
        """A private mapping of a component's master, which the caller frees (`part.span` bytes).

        None if it is no component any more: its bytes are private memory then. Of a mutable one
        the master has the bytes as they were last written back.
        """
        with self._lock:  # a master is closed only once it is no component's any more
            return part.map_master() if self.components.get(part.name) is part else None

    def own(self, name: str) -> Component:
        with self._lock:
            part = self.components.get(name)
        if part is None:
            raise UnknownComponent(f"{name!r} is not registered by this process")
        return part

    def before_unbind(self, part: Component) -> None:
        """Make sure that `unbind` will have the memory. Raises: DeviceMemoryExhausted."""
        try:
            part._range.set_memory_aside()
        except DeviceMemoryExhausted as exc:
            raise DeviceMemoryExhausted(f"{part.name!r} stays registered: {exc}") from exc

    def unbind(self, part: Component, *, keep_shown: bool = False) -> None:
        """Make a component's tensors ordinary private memory, values and addresses kept.

        On a GPU it blocks for the copy. Raises: DeviceMemoryExhausted, DeviceFailed there; then
        the range is unmapped.
        """
        assert part._master is not None
        try:
            saved = self._board.saved(part._slot, part._range.generation)
            part._range.make_private(part._master, keep_shown=keep_shown, saved=saved)
            self._keep(part)
            ranges.remove(part)
        except BaseException:
            ranges.remove(part, is_gone=True)
            raise
        finally:
            self._note_staying(part)
            with self._lock:
                self.components.pop(part.name, None)
                self.wanted.discard(part.name)
                self._placed.pop(part.name, None)
            part._close()

    # --- leases --------------------------------------------------------------------------

    def enter(self, who: int, timeout_s: float | None = None) -> Agent:
        """Who the thread or task `who` is in its next acquire; see `agents.Agents.enter`."""
        if self.gpu is None:
            return Agent(who, who)
        return self.gpu.agents.enter(who, timeout_s)

    def must_wait(self, who: int) -> bool:
        """Whether `enter` would block."""
        return self.gpu is not None and self.gpu.agents.must_wait(who)

    def must_map(self, granted: protocol.Granted) -> bool:
        """Whether `granted` would make calls of the GPU's driver."""
        return self.gpu is not None and not all(
            self.components[place.name]._range.is_shown(place.generation)
            for place in granted.placements
        )

    def granted(self, granted: protocol.Granted, agent: Agent) -> None:
        """Put the chunks of what was granted behind its ranges.

        Raises: DaemonGone, DeviceFailed; then the lease is still to be given back.
        """
        with self._lock:
            if self._error is not None:
                raise self._error  # whether all of it had come in by then was not looked at
            self.leases[granted.id] = granted
            self._placed.update((place.name, place) for place in granted.placements)
            parts = [self.components[place.name] for place in granted.placements]
            for part in parts:
                part._holders += 1
                if granted.id <= part._renewed:  # on its way when the update was committed
                    self.outdated.add(granted.id)
        if self.gpu is not None:
            self.gpu.agents.took(agent, granted.id)
        try:
            for part, place in zip(parts, granted.placements, strict=True):
                part._range.show(place.generation, place.runs)
        except DaemonGone:
            self.check()  # why the session ended, rather than what did not come by it
            raise

    def wait(
        self,
        granted: protocol.Granted,
        name: str,
        segment: int | None,
        stream: int | None = None,
    ) -> None:
        """Block until a segment of a granted component, or all of it, is on the device.

        With `stream` it is the stream that waits, if the GPU can. Raises: DeviceFailed if it
        never will be; what ended the session.
        """
        for place in granted.placements:
            part = self.components[place.name]
            if name not in (part.name, part.part_of):
                continue
            arrived = part.segments if segment is None else segment + 1
            target = word(place.generation, arrived)
            try:
                if stream is None or not self._wait_on(stream, granted.id, part, target):
                    self._board.wait(part._slot, target)
            except ArrivalFailed:
                raise self._not_arrived(part.name, place.generation) from None
        # whatever is not this session's was complete when it was granted

    def _wait_on(self, stream: int, lease: int, part: Component, target: int) -> bool:
        """Have the stream wait, unless there is nothing to wait for; False if it cannot."""
        if self.gpu is None:
            return False
        with self._lock:  # before the word is looked at: who ends the session sees it
            self._awaited.setdefault(lease, []).append((part._slot, target))
        return self._board.has(part._slot, target) or self.gpu.doorbell.wait(
            stream, part._slot, target
        )

    def _not_arrived(self, name: str, generation: int) -> SwapdError:
        if self._error is not None:
            return self._error
        why = self._broken.get((name, generation), "this lease is over")
        return DeviceFailed(f"{name!r} did not come in: {why}")

    def problem_with(self, granted: protocol.Granted) -> SwapdError | None:
        """Why what was computed under a lease is not to be used; None if nothing is known."""
        for place in granted.placements:
            if (place.name, place.generation) in self._broken:
                return self._not_arrived(place.name, place.generation)
        if granted.id in self._cut or isinstance(self._error, SessionFenced):
            return self._error
        return None

    def current_streams(self) -> tuple[int, ...]:
        """The stream of a GPU on which this thread works; none on the host."""
        if self.gpu is None or not self.gpu.card.opened:
            return ()
        return (self.gpu.current_stream(),)

    def mark(self, streams: Iterable[int]) -> Work | None:
        """What the GPU was asked to do on `streams` by now; None if it is done. Does not block."""
        if self.gpu is None or self._forked or not self.gpu.card.opened:
            return None
        return self.gpu.releases.mark(streams)

    def taken_again(self, work: Work) -> None:
        """The lease that was to wait for it is held again."""
        if self.gpu is not None and isinstance(work, GpuWork):
            self.gpu.releases.forget(work)

    def ends_later(
        self,
        granted: protocol.Granted,
        work: Work | None,
        give_back: Callable[[protocol.Granted], None],
    ) -> bool:
        """Have a lease given back once its GPU work is done; False if that is now, or is over.

        `work` is what `mark` gave when it was released. `give_back(granted)` is called in a
        thread of the session's, and returns when the daemon knows it before anything this
        process asks later. Does not block.
        """
        gpu = self.gpu
        if gpu is None or self._forked:
            return False
        if self._error is not None or work is None:
            gpu.agents.released(granted.id, ended=True)
            return False
        with self._lock:
            if granted.id in self._ending:
                return True
            self._ending.add(granted.id)
        gpu.agents.released(granted.id, ended=False)

        def end() -> None:
            try:
                if problem := self.problem_with(granted):
                    log.warning(
                        "a lease ended, and what was computed under it is void: %s", problem
                    )
                give_back(granted)
            except SwapdError as exc:
                log.warning("a lease ended late: %s", exc)
            except Exception:  # its thread must live: others' leases end there too
                log.exception("a lease could not be given back")
            finally:
                self._has_ended(granted.id)

        assert isinstance(work, GpuWork)
        gpu.releases.after(work, end)
        return True

    def _has_ended(self, lease: int) -> None:
        with self._lock:
            self._ending.discard(lease)
        if self.gpu is not None:
            self.gpu.agents.ended(lease)

    def is_ending(self, lease: int) -> bool:
        """Whether a lease that was released waits for its GPU work."""
        return self.gpu is not None and self.gpu.agents.is_ending(lease)

    def await_end(self, lease: int) -> None:
        """Block until the GPU work of a lease that was released is done."""
        if self.gpu is not None:
            self.gpu.agents.await_end(lease)

    def drain(self) -> None:
        """Wait until the GPU work of released leases is done, but not for ever."""
        if self.gpu is not None and not self.gpu.releases.drain(DRAIN_S):
            log.warning("GPU work under leases that were released does not end: %s", self.gpu)

    def give_back(self, granted: protocol.Granted) -> bool:
        """A lease ends here; whether the daemon is still there to be told.

        Raises: SessionFenced if it ended before, because the daemon had ended the session:
        for a moment others may have had the memory. ForkedClient.
        """
        if isinstance(self._error, SessionFenced):
            raise self._error
        if self._error is not None:
            return False
        self.check()
        self._released(granted)
        return True

    def _released(self, granted: protocol.Granted) -> None:
        """Under strict isolation, what nobody in this process holds may not be touched."""
        self.leases.pop(granted.id, None)
        self.outdated.discard(granted.id)
        if self._awaited:
            with self._lock:
                self._awaited.pop(granted.id, None)
        for place in granted.placements:
            part = self.components.get(place.name)
            if part is None:
                continue
            with self._lock:
                part._holders -= 1
                hide = self.welcome.strict and not part._holders and self._error is None
                if hide:
                    self._try(part._range.hide, place.generation)

    def close(self, *, keep: bool = True) -> None:
        """End the session: every component becomes private memory, with its weights.

        Unless `keep`: then their addresses are nobody's any more. Closed twice is closed once.
        """
        with self._lock:
            if self._forked or self._closed:
                return
            self._closed = True
        # it may not have been heard of yet
        self._deserted |= not self._lifeline.is_daemon_alive()
        self._end(ClientClosed("this client is closed; connect again"))
        self._lifeline.close()
        could_write = any(part.mutable for part in self.components.values())
        without_memory = self._make_all_private() if keep else self._let_go_of_all()
        self._masters.close()
        self._files.close()
        if self.gpu is not None:
            self.gpu.close()
        _alive.discard(self)
        if could_write:
            self._let_go()
        if without_memory:
            names = ", ".join(map(repr, without_memory))
            warnings.warn(
                f"the GPU has no room for private copies of {names}: their tensors must not be "
                "touched any more. Free GPU memory before close(), or keep the client open",
                RuntimeWarning,
                stacklevel=3,
            )

    def leave_behind(self, close: Callable[[], None]) -> None:
        """The client was dropped, and nobody can close it any more: have `close` called in a
        thread once the session has ended. Takes no lock: it is the garbage collector that calls.
        """
        self._close_late = close
        if self._error is not None:
            self._close_what_was_left()

    def _close_what_was_left(self) -> None:
        if self._close_late is not None and not self._forked:
            with suppress(RuntimeError):  # the process ends
                _thread.start_new_thread(self._close_late, ())

    def _note_staying(self, part: Component) -> None:
        if part.mutable and part._range.on_chunks:
            self._staying.append(part._range)

    def _let_go(self) -> None:
        """Tell the daemon, now or when the last of what stays on its memory has left it."""
        staying = self._staying
        let_go = partial(self._lifeline.let_go, self.welcome.token)

        def left(where: Place) -> None:
            staying.remove(where)
            if not staying:
                let_go()

        for where in staying:
            where.when_left = partial(left, where)
        if not staying:
            let_go()

    def _make_all_private(self) -> list[str]:
        """Unbind every component; return the names of those that have no memory now."""
        parts = list(self.components.values())
        if self.gpu is not None and any(part._holders for part in parts):
            self.gpu.card.settle()
        staying = [part for part in parts if self._stays(part)]
        leaving = [part for part in parts if not self._stays(part)]
        bare = [part.name for part in staying if not self._try_unbind(part, keep_shown=True)]
        if self.gpu is not None:  # first of all: the memory of a dead daemon comes free so
            for part in leaving:
                self._try(part._range.revoke)
            self._try(self.gpu.card.drop_all)
        bare += [part.name for part in leaving if not self._try_unbind(part, keep_shown=False)]
        return bare

    def _let_go_of_all(self) -> list[str]:
        for part in list(self.components.values()):
            self._try(part._range.revoke)
            ranges.remove(part, is_gone=True)
            self._note_staying(part)
            part._close()
        self.components.clear()
        if self.gpu is not None:
            self._try(self.gpu.card.drop_all)
        return []

    def _stays(self, part: Component) -> bool:
        """Whether its chunks may have later bytes than its master, or are as good.

        On a GPU there may be no room for a copy of what is in use, and there need be none when
        the daemon is dead: nobody else will use its memory. What was still coming in when the
        session ended is in the master alone.
        """
        if part.name in self._incomplete:
            return False
        died = isinstance(self._error, DaemonGone) and not isinstance(self._error, SessionFenced)
        return part.mutable or (self.gpu is not None and died and part._holders > 0)

    def _try_unbind(self, part: Component, *, keep_shown: bool) -> bool:
        try:
            self.unbind(part, keep_shown=keep_shown)
        except DeviceMemoryExhausted:
            return False
        except DeviceFailed as exc:
            assert self.gpu is not None
            self.gpu.card.complain(exc)
            return False
        return True

    def _try(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Make a call that only a GPU's driver can refuse; whether it did not."""
        try:
            call(*arguments)
        except DeviceFailed as exc:
            assert self.gpu is not None
            self.gpu.card.complain(exc)
            return False
        return True

    # --- the lifeline --------------------------------------------------------------------

    def _on_message(self, message: protocol.FromDaemon, fds: list[OwnedFd]) -> None:
        match message:
            case protocol.Revoke() as revoke:
                self._revoke(revoke)
            case protocol.Saved() as saved:
                if part := self.components.get(saved.name):
                    part._range.saved(saved.generation)
            case protocol.Wanted() as wanted:
                self._set_wanted(wanted)
            case protocol.Hurry() as hurry:
                self._set_hurried(hurry.waits)
            case protocol.Master() as master:
                (fd,) = fds
                self._masters.add(master, fd)
            case protocol.Files() as files:
                self._files.add(files, fds)
            case protocol.Drop() as drop:
                self._drop(drop)
            case protocol.Broken() as broken:
                self._on_broken(broken)
            case protocol.Goodbye() as goodbye:
                if goodbye.code == "stopping":
                    self._end(from_refusal(goodbye))
                else:
                    self._cut_off(from_refusal(goodbye))
            case protocol.Welcome():
                raise ValueError("a second welcome")

    def _revoke(self, revoke: protocol.Revoke) -> None:
        part = self.components.get(revoke.name)
        hidden = part is None or self._take_away(part, revoke.generation)
        if revoke.ack and hidden:
            self._lifeline.send(protocol.Revoked(revoke.name, revoke.generation))

    def _take_away(self, part: Component, generation: int) -> bool:
        """Have the chunks of this generation no longer behind the range; whether they are not."""
        if self.gpu is not None:
            self.gpu.card.leave_captures_alone()
            if part._holders and part._range.is_shown(generation):
                self.gpu.card.settle()  # it did not come in, but work on it may be under way
        return self._try(part._range.revoke, generation)

    def _drop(self, drop: protocol.Drop) -> None:
        """Said only if it is true: else the daemon ends the session when its time is up."""
        parts = list(self.components.values())
        dropped = all([self._try(part._range.drop, drop.numbers) for part in parts])
        if self.gpu is not None:
            self.gpu.card.leave_captures_alone()
            dropped &= self._try(self.gpu.card.drop, drop.numbers)
        if dropped:
            self._lifeline.send(protocol.Dropped(drop.ticket))

    def _on_broken(self, broken: protocol.Broken) -> None:
        """Say why before the word on the board ends the waits."""
        self._broken[broken.name, broken.generation] = broken.why
        if part := self.components.get(broken.name):
            self._board.fail(part._slot, broken.generation)

    def _on_end(self, why: Exception | None) -> None:
        """The lifeline ended; if without a word, the daemon died, or goes on without us."""
        if why is not None:
            untaken = (
                f"{self.endpoint}: what the daemon sent could not be taken, so this session is "
                f"over: {why}. close() makes all tensors private memory. Then connect again"
            )
            self._cut_off(SessionFenced(untaken))
        elif self._error is not None:
            return
        elif self._lifeline.is_daemon_alive():
            now = "private memory now" if self.gpu is None else "no longer there"
            fenced = (
                f"{self.endpoint}: the daemon has ended this session, and its log says why. What "
                f"you hold is {now}; close() makes all tensors private memory. Then connect again"
            )
            self._cut_off(SessionFenced(fenced))
        else:
            gone = (
                f"{self.endpoint}: the daemon is gone. What you hold stays mapped; close() "
                "makes all tensors private memory. Start swapd again, then reconnect"
            )
            self._end(DaemonGone(gone))

    def _cut_off(self, error: SwapdError) -> None:
        """The daemon goes on without this session: others will use the chunks it holds.

        Whoever computes on a clean component of the host's finds the same bytes there, in the
        master; on a GPU, once what is under way has ended, nothing is there. The chunks of a
        mutable one are kept for this process by the daemon.
        """
        clean = [part for part in list(self.components.values()) if not part.mutable]
        if self.gpu is None:
            for part in clean:
                with self._lock:  # it may just be given another master
                    if part._range.shown:
                        assert part._master is not None
                        part._range.make_private(part._master, keep_shown=False)
            return self._end(error)
        self._end(error)  # first: then streams that wait go on, and the work ends
        self.gpu.card.settle()
        for part in clean:
            self._try(part._range.revoke)

    def _set_wanted(self, wanted: protocol.Wanted) -> None:
        if wanted.wanted:
            self.wanted.add(wanted.name)
            self._tell_wanted()
        else:
            self.wanted.discard(wanted.name)

    def _set_hurried(self, hurried: bool) -> None:
        self.hurried = hurried
        if hurried:
            self._tell_wanted()

    def _tell_wanted(self) -> None:
        for listener in self._wanted_listeners:
            listener()

    def take_master(self, request: int) -> tuple[protocol.Master, OwnedFd]:
        """The master that was made for a request, its descriptor from now on the caller's."""
        if taken := self._masters.take(request):
            return taken
        self.check()
        raise DaemonGone(f"{self.endpoint}: the daemon sent no master that it had made")

    def forget_master(self, request: int) -> None:
        """Nobody will take the master that was asked for: it is closed, now or when it comes."""
        self._masters.forget(request)

    def _end(self, error: SwapdError) -> None:
        """Remember why, once, and wake every wait."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            self._deserted |= isinstance(error, DaemonGone)
            self.usable = False
            self._incomplete = {
                name
                for name, place in self._placed.items()
                if name in self.components and not self._is_complete(place)
            }
            self._cut.update(
                lease for lease, words in self._awaited.items() if not self._all_there(words)
            )
        self._masters.end()
        self._files.end()
        self._board.fail_all([part._slot for part in list(self.components.values())])
        os.eventfd_write(self.ended.fileno(), 1)
        for listener in self._listeners:
            listener(error)
        self._close_what_was_left()

    def _all_there(self, words: list[tuple[int, int]]) -> bool:
        try:
            return all(self._board.has(slot, target) for slot, target in words)
        except ArrivalFailed:
            return False

    def _after_fork(self) -> None:
        self._forked = True
        self.usable = False
        self._lifeline.forget()


_alive: "weakref.WeakSet[Session]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for session in list(_alive):
        session._after_fork()


os.register_at_fork(after_in_child=_forget_in_child)


def _check_apart(parts: Iterable[Component]) -> None:
    """Raise if two parts share memory: each would move it to where it is itself."""
    seen: dict[int, str] = {}
    for part in parts:
        for address in part._layout.memory:
            other = seen.setdefault(address, part.name)
            if other != part.name:
                raise InvalidSource(
                    f"{other!r} and {part.name!r} share tensors (tied weights, or views of one "
                    "storage); name those in one part only, the one that is needed first"
                )
