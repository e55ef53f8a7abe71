"""The world outside a `Residency`, played by hand: workers, host copies, copies, a clock.

`World.send` hands one event to the core, keeps its own records from the actions alone, and
compares: after every event of every test it checks the promises of the core, and it knows no more
than a worker does. It decides nothing.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from swapd.core import Residency, Rules, twins
from swapd.core.actions import (
    Accept,
    AnyAction,
    CopyIn,
    CopyOut,
    DropHostCopy,
    Evict,
    Evicted,
    Fence,
    Foresee,
    Foreseen,
    Grant,
    Hasten,
    KeepHostCopy,
    Lend,
    Lost,
    MakeHostCopy,
    Reclaim,
    Refuse,
    SealHostCopy,
    SendBroken,
    SendHurry,
    SendRevoke,
    SendWanted,
    StopCopy,
    Waiting,
)
from swapd.core.chunks import count
from swapd.core.events import (
    AnyEvent,
    CopiedIn,
    CopiedOut,
    CopyFailed,
    CopyStopped,
    DeviceDown,
    DropAck,
    Dropping,
    HostCopyFailed,
    HostCopyFound,
    HostCopyMade,
    HostCopySealed,
    Lent,
    MemoryMissing,
    ProcessExited,
    Reclaimed,
    RevokeAck,
    RulesChanged,
    SessionGone,
    SessionOpened,
    SessionRequest,
    Stopping,
    Tick,
    UnmapAck,
    Unread,
)
from swapd.core.records import MISSING, Component, Key, workspace_name
from swapd.core.states import State
from swapd.shared.protocol import (
    Acquire,
    AcquireStart,
    AcquireWorkspace,
    AnyOrder,
    Cancel,
    Code,
    Commit,
    EvictNow,
    Follows,
    Forget,
    GiveUp,
    Pin,
    Placement,
    Policy,
    Prefetch,
    Register,
    Release,
    Resize,
    Runs,
    Scratch,
    Unregister,
    Update,
    UsedRanges,
)
from tests.core.arena import Arena, numbers, places
from tests.core.check import check

Channel = Literal["lifeline", "replies"]

#: Sessions are numbered from here, so that a number found in a snapshot is one of them.
FIRST_SESSION = 7001


class Placed(msgspec.Struct):
    """One generation on the device, as its owner and the copies know it.

    Of a workspace: the chunks that the arena lacks.
    """

    name: str
    session: int
    runs: Runs
    uid: int = 0
    mapped: bool = False
    workspace: bool = False
    #: Its chunks.
    held: set[int] = msgspec.field(default_factory=set)
    #: A write-back of it has failed: its latest bytes are on the device only.
    unsaved: bool = False
    #: Its load failed, and its worker must still let go of it.
    broken: bool = False

    def __post_init__(self) -> None:
        self.held = set(numbers(self.runs))


class Worth(msgspec.Struct):
    """The part of a scratch component that is worth saving, as its owner said last."""

    kind: Scratch
    nbytes: int
    places: list[int]
    #: Whether its host copy has contents before the first save.
    filled: bool = False
    #: The number of that statement.
    number: int = 0
    #: The generation in which its contents began, and the last one that its owner heard of.
    contents: int = 0
    heard: int = 0


class World:
    """One Residency of `chunks` chunks of one byte, and everybody it talks to."""

    def __init__(
        self,
        chunks: int = 10,
        core: Callable[..., Residency] = Residency,
        mutable_one_in: int = 3,
        scratch_one_in: int = 3,
        twin_one_in: int = 2,
        **rules: Any,
    ) -> None:
        #: Of random registrations, one in this many is mutable, and of those one in this many
        #: scratch; of the others, one in this many has the same content as others of its size.
        self.twin_one_in = twin_one_in
        self.mutable_one_in = mutable_one_in
        self.scratch_one_in = scratch_one_in
        self.core = core(chunks, 1, Rules(**rules))
        self.ledger = self.core.ledger
        self.now = 0.0
        #: Whether agents have only some of their leases in use.
        self.keeps = False
        #: Actions of the last event, and of all events.
        self.out: list[AnyAction] = []
        self.log: list[AnyAction] = []
        #: The core waits for: copies by generation, acknowledgements, host copies by uid.
        self.moves: dict[int, CopyIn | CopyOut | Lend | Reclaim] = {}
        self.acks: dict[int, SendRevoke] = {}
        #: Loads that are to end early.
        self.stops: set[int] = set()
        self.making: dict[int, MakeHostCopy | SealHostCopy] = {}
        #: Host copies ordered, and host copies dropped.
        self.masters: set[int] = set()
        self.dropped: set[int] = set()
        #: The host copies that are complete: sealed, or shared from one that is complete.
        self.filled: set[int] = set()
        #: Names whose content is certain; the host copies that were committed under such a name, or
        #: share one of these; and those that are kept without a component.
        self.certain: set[str] = set()
        self.certain_uids: set[int] = set()
        self.vouched: set[int] = set()
        self.kept: set[int] = set()
        self.sessions: set[int] = set()
        self.gone: set[int] = set()
        self.still_running: set[int] = set()
        self.fenced: list[int] = []
        #: Since when each session owes a debt, by debt: the generation that it must unmap or let go
        #: of, or the channel that it must read.
        self.owes: dict[tuple[int, int | str], float] = {}
        self.answers: dict[Key, Grant | Refuse | Accept] = {}
        #: The requests of living sessions that were neither answered nor given up.
        self.unanswered: set[Key] = set()
        #: All acquires, those without an answer, and the components of each lease.
        self.asked: dict[Key, Acquire] = {}
        self.waiting: dict[Key, Acquire] = {}
        self.leases: dict[Key, set[str]] = {}
        #: Sessions that start or wait to start, in order of arrival.
        self.starters: list[Key] = []
        #: (session, name) of each holder whose component the core reported as wanted.
        self.wanted: set[tuple[int, str]] = set()
        #: What is loaded ahead because it follows something.
        self.foreseen: set[str] = set()
        #: Sessions that were told that somebody waits.
        self.hurried: set[int] = set()
        #: By generation.
        self.placed: dict[int, Placed] = {}
        #: The bytes in the chunks and in the host copies.
        self.arena = Arena(chunks)
        #: The workspaces whose memory the driver has, by generation.
        self.lent: set[int] = set()
        #: Registered names; their owners; the names that the owner may write to.
        self.owner: dict[str, int] = {}
        self.mutable: set[str] = set()
        #: The names that are scratch.
        self.scratch: dict[str, Worth] = {}
        #: The device is down.
        self.down = False
        #: Bytes copied in, and out.
        self.bytes_in = self.bytes_out = 0
        #: The family of each name that is a part of one.
        self.part_of: dict[str, str] = {}
        self.dirty: set[str] = set()
        #: By name: the host copy that was ordered last, and the one with its current bytes.
        self.newest: dict[str, int] = {}
        self.current: dict[str, int] = {}
        #: By name: the last requested update.
        self.updates: dict[str, int] = {}
        #: By acquire: the host copies whose bytes, or later ones, it must see.
        self.to_see: dict[Key, dict[str, int]] = {}
        self._committing: dict[Key, tuple[str, ...]] = {}
        self._unregistering: dict[Key, str] = {}
        self._request = 0

    # --- actions of workers --------------------------------------------------------------

    def open(self, label: str = "worker") -> int:
        session = FIRST_SESSION + len(self.sessions) + len(self.gone)
        self.sessions.add(session)
        self.send(SessionOpened(self.now, session, label))
        return session

    def register(
        self,
        session: int,
        name: str,
        nbytes: int = 1,
        policy: Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        part_of: str = "",
        transient: bool = False,
        scratch: Scratch = "",
        filled: bool = False,
    ) -> str:
        """Register and commit, with all steps in between."""
        made = self.ask_register(
            session,
            name,
            nbytes,
            policy,
            group,
            mutable or scratch != "",
            part_of,
            transient,
            scratch=scratch,
            filled=filled,
        )
        self.make_masters()
        assert isinstance(self.answers[made], Accept), self.answers[made]
        committed = self.commit(session, name)
        self.make_masters()
        assert isinstance(self.answers[committed], Accept)
        return name

    def ask_register(
        self,
        session: int,
        name: str,
        nbytes: int = 1,
        policy: Policy = "lru",
        group: str | None = None,
        mutable: bool = False,
        part_of: str = "",
        transient: bool = False,
        content: str = "",
        layout: str = "",
        scratch: Scratch = "",
        filled: bool = False,
        certain: bool = False,
    ) -> Key:
        key = self._key(session)
        # while it waits for another's bytes, it has its name and no host copy
        if name not in self.owner and name not in self.ledger.components:
            self.mutable.discard(name)
            if mutable:
                self.mutable.add(name)
            self.scratch.pop(name, None)
            if scratch:
                all_of_it = places(None if scratch == "saved" else (), nbytes)
                self.scratch[name] = Worth(scratch, nbytes, all_of_it, filled)
            if name not in self.part_of.values():
                self.part_of[name] = part_of
            self.certain.discard(name)
            if certain:
                self.certain.add(name)
        asked = Register(
            key[1],
            name,
            nbytes,
            policy=policy,
            group=group,
            mutable=mutable,
            part_of=part_of,
            content=content,
            layout=layout,
            transient=transient,
            scratch=scratch,
            filled=filled,
            certain=certain,
        )
        self.ask(session, asked)
        return key

    def commit(self, session: int, name: str, *also: str) -> Key:
        key = self._key(session)
        self._committing[key] = (name, *also)
        self.ask(session, Commit(key[1], name, also))
        return key

    def update(self, session: int, name: str) -> Key:
        """Begin an update."""
        key = self._key(session)
        self.updates[name] = key[1]
        self.ask(session, Update(key[1], name))
        return key

    def renew(self, session: int, name: str) -> None:
        """Update and commit, with all steps in between but copies."""
        began = self.update(session, name)
        self.make_masters()
        assert isinstance(self.answers[began], Accept), self.answers[began]
        committed = self.commit(session, name)
        self.make_masters()
        assert isinstance(self.answers[committed], Accept)

    def give_up(self, session: int, name: str) -> Key:
        key = self._key(session)
        self.ask(session, GiveUp(key[1], name, self.updates.get(name, 0)))
        return key

    def unregister(self, session: int, name: str) -> Key:
        key = self._key(session)
        self._unregistering[key] = name
        self.ask(session, Unregister(key[1], name))
        return key

    def acquire(
        self,
        session: int,
        *names: str,
        agent: int = 0,
        priority: int = 0,
        timeout: float | None = None,
        await_registration: bool = False,
        early: bool = False,
        holds: tuple[int, ...] | None = None,
        spare: tuple[Release, ...] = (),
        overtake: int | None = None,
        due: float | None = None,
    ) -> Key:
        key = self._key(session)
        asked = Acquire(
            key[1],
            names,
            agent,
            timeout,
            priority,
            await_registration,
            early,
            holds=self._some_of(session, agent) if self.keeps else holds,
            spare=spare,
            overtake=overtake,
            due_s=due,
        )
        self.asked[key] = self.waiting[key] = asked
        held = {n for (s, _), held in self.leases.items() if s == session for n in held}
        self.to_see[key] = {n: u for n, u in self.current.items() if n not in held}
        self.ask(session, asked)
        return key

    def workspace(
        self,
        session: int,
        nbytes: int,
        agent: int = 0,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Key:
        key = self._key(session)
        names = (workspace_name(*key),)
        self.asked[key] = Acquire(key[1], names, agent, timeout, priority)
        self.waiting[key] = self.asked[key]
        self.ask(session, AcquireWorkspace(key[1], nbytes, agent, timeout, priority))
        return key

    def start(self, session: int, timeout: float | None = None) -> Key:
        key = self._key(session)
        self.starters.append(key)
        self.ask(session, AcquireStart(key[1], timeout))
        return key

    def _some_of(self, session: int, agent: int) -> tuple[int, ...]:
        """Every second lease of an agent."""
        own = [k for k in sorted(self.leases) if k[0] == session]
        return tuple(n for _, n in own if self.asked[session, n].agent == agent)[::2]

    def use(
        self, session: int, *names: str, agent: int = 0, holds: tuple[int, ...] | None = None
    ) -> Key:
        """Acquire, with all copies done: return the lease."""
        key = self.acquire(session, *names, agent=agent, holds=holds)
        self.settle()
        assert key in self.leases, self.answers.get(key, "still waiting")
        return key

    def touch(self, session: int, *names: str) -> None:
        """Use and release at once."""
        self.release(self.use(session, *names))

    def release(self, key: Key, again: int = 0, used: tuple[UsedRanges, ...] = ()) -> None:
        for said in used:
            self._note_used(key[0], said)
        self.leases.pop(key, None)
        self._starts_no_more(key)
        self.ask(key[0], Release(0, key[1], again=again, used=used))

    def _note_used(self, session: int, said: UsedRanges) -> None:
        """It counts if the owner says it during a lease, and said nothing later."""
        worth = self.scratch.get(said.name)
        held = any(said.name in names for names in self.leases.values())
        if worth is None or worth.kind != "saved" or self.owner.get(said.name) != session:
            return
        end = sum(said.ranges[-1]) if said.ranges else 0
        if held and said.number > worth.number and end <= worth.nbytes:
            worth.number, worth.places = said.number, places(said.ranges, worth.nbytes)

    def cancel(self, key: Key) -> None:
        self.unanswered.discard(key)
        self.waiting.pop(key, None)
        self.leases.pop(key, None)
        self._starts_no_more(key)
        self.ask(key[0], Cancel(0, key[1]))

    def _starts_no_more(self, key: Key) -> None:
        if key in self.starters:
            self.starters.remove(key)
            self.unanswered.discard(key)

    def prefetch(
        self,
        session: int,
        *names: str,
        over: tuple[str, ...] | None = None,
        timeout: float | None = None,
    ) -> Key:
        key = self._key(session)
        self.ask(session, Prefetch(key[1], names, over, timeout))
        return key

    def follows(self, session: int, *names: str, after: str, seen: bool = False) -> Key:
        key = self._key(session)
        self.ask(session, Follows(key[1], names, after, seen))
        return key

    def resize(self, session: int, name: str, resident_bytes: int | None = None) -> Key:
        key = self._key(session)
        self.ask(session, Resize(key[1], name, resident_bytes))
        return key

    def pin(self, session: int, name: str, pinned: bool = True) -> Key:
        key = self._key(session)
        self.ask(session, Pin(key[1], name, unpin=not pinned))
        return key

    def evict_now(self, session: int, name: str) -> Key:
        key = self._key(session)
        self.ask(session, EvictNow(key[1], name))
        return key

    def forget(self, session: int, *names: str) -> Key:
        key = self._key(session)
        self.ask(session, Forget(key[1], names))
        return key

    def leave(self, session: int, alive: bool = False, ending: bool = False) -> None:
        """The lifeline of a session ends; `alive`: its process continues for a while, and ends by
        itself if it is `ending`.
        """
        self.sessions.discard(session)
        self.gone.add(session)
        if alive:
            self.still_running.add(session)
        self.unanswered = {key for key in self.unanswered if key[0] != session}
        for key in [k for k in self.waiting if k[0] == session]:
            del self.waiting[key]
        for key in [k for k in self.leases if k[0] == session]:
            del self.leases[key]
        self.starters = [key for key in self.starters if key[0] != session]
        self.wanted = {(s, n) for s, n in self.wanted if s != session}
        self.hurried.discard(session)
        self.owes = {owed: since for owed, since in self.owes.items() if owed[0] != session}
        for generation, revoke in list(self.acks.items()):
            if revoke.session == session:
                del self.acks[generation]
        for name in [n for n, s in self.owner.items() if s == session]:
            self._forget_name(name)
        for generation, placed in list(self.placed.items()):
            if placed.session == session and not placed.workspace:
                kept = placed.mapped or (placed.unsaved and generation not in self.moves)
                placed.mapped = kept and alive and placed.name in self.mutable
                if not placed.mapped and not self._is_copied(generation):
                    del self.placed[generation]
        self.send(SessionGone(self.now, session, alive, ending))
        assert remains(self.core, session) == [], f"left of session {session}"

    def exit(self, session: int, *, lets_go: bool = False) -> None:
        """The process of a session that left `alive` ends, or says that it has let go."""
        self.still_running.discard(session)
        for generation, placed in list(self.placed.items()):
            if placed.session == session and not placed.workspace:
                placed.mapped = False
                if generation not in self.moves:
                    del self.placed[generation]
        self.send(UnmapAck(self.now, session) if lets_go else ProcessExited(self.now, session))

    def lose(self, why: str = "cuda:0 is lost") -> None:
        """The device goes down; its contents stay."""
        self.down = True
        self.send(DeviceDown(self.now, why))

    def stop(self) -> None:
        self.send(Stopping(self.now))

    def change_rules(self, **changed: Any) -> None:
        """Change the rules; those not named stay."""
        rules = {**msgspec.structs.asdict(self.core.rules), **changed}
        _, *names = RulesChanged.__struct_fields__
        self.send(RulesChanged(self.now, **{n: rules[n] for n in names}))

    def find(self, name: str, nbytes: int, content: str, layout: str = "") -> int:
        """A host copy of an earlier daemon: before the first session."""
        uid = -len(self.masters) - 1
        self.masters.add(uid)
        self.certain_uids.add(uid)
        self.arena.make_master(uid, nbytes)
        self.send(HostCopyFound(self.now, uid, name, nbytes, content, layout))
        return uid

    def lack(self, runs: Runs) -> None:
        """Chunks that others use since before the first session."""
        generation = self.ledger._generation + 1
        self.lent.add(generation)
        self.placed[generation] = Placed(MISSING, 0, runs, workspace=True)
        self.send(MemoryMissing(self.now, runs))

    # --- slow actions --------------------------------------------------------------------

    def make_masters(self) -> None:
        while self.making:
            self.make_master(next(iter(self.making)))

    def make_master(self, uid: int, fail: Code | None = None) -> None:
        order = self.making.pop(uid)
        if fail is not None:
            kept, short = set(self.kept), isinstance(order, MakeHostCopy)
            self.send(HostCopyFailed(self.now, uid, fail, "no memory", short))
            assert (uid in self.making) <= (kept > self.kept), "it is tried again in vain"
            if self.owner.get(order.name) is not None and order.name not in self.ledger.components:
                self._forget_name(order.name)
        elif isinstance(order, MakeHostCopy):
            self.send(HostCopyMade(self.now, uid))
        else:
            self.filled.add(uid)
            if uid in self.certain_uids:
                self.vouched.add(uid)
            self.send(HostCopySealed(self.now, uid))

    def move(self, name: str, fail: str | None = None) -> None:
        """The copy of `name` ends, or its lending, or its return."""
        self.end_move(next(g for g, m in self.moves.items() if m.name == name), fail)

    def end_move(self, generation: int, fail: str | None = None) -> None:
        order = self.moves[generation]
        if isinstance(order, CopyIn):
            self._end_load(order, fail)
        elif isinstance(order, CopyOut):
            self._end_save(order, fail)
        else:
            self._end_lending(order, fail)

    def step(self, generation: int) -> bool:
        """A copy advances by one byte, if it can."""
        return self._is_copied(generation) and self.arena.step(generation)

    def _is_copied(self, generation: int) -> bool:
        order = self.moves.get(generation)
        return isinstance(order, CopyOut) or (isinstance(order, CopyIn) and not order.joins)

    def _end_load(self, order: CopyIn, fail: str | None) -> None:
        del self.moves[order.generation]
        if order.joins:
            self.send(CopiedIn(self.now, order.generation))
            return
        placed = self.placed[order.generation]
        left = placed.session in self.gone
        leaves = order.generation in self.stops  # however its load ends
        self.stops.discard(order.generation)
        if leaves and fail is None and self.arena.step(order.generation):
            self.arena.fail(order.generation)
            placed.broken = True
            if left and not placed.mapped:
                del self.placed[order.generation]
            self.send(CopyStopped(self.now, order.generation))
            return
        if fail is not None:
            self.arena.fail(order.generation)
            placed.broken = True
            if not left:
                self.dirty.discard(order.name)
        else:
            self.bytes_in += self.arena.finish(order.generation)
            assert self.arena.holds(placed.uid, placed.runs), f"{order}: not what was saved"
        if (left or (fail is not None and not leaves)) and not placed.mapped:
            del self.placed[order.generation]
        if fail is not None:
            self.send(CopyFailed(self.now, order.generation, fail))
            return
        if any(s == placed.session and placed.name in n for (s, _), n in self.leases.items()):
            self._write(placed)
        self.send(CopiedIn(self.now, order.generation))

    def _end_save(self, order: CopyOut, fail: str | None) -> None:
        if fail is None:
            self.bytes_out += self.arena.finish(order.generation)
        else:
            self.arena.fail(order.generation)
        del self.moves[order.generation]
        left = self.placed[order.generation].session in self.gone
        dropped = fail is not None and order.uid in self.arena.saved and not self.down
        if left:
            del self.placed[order.generation]
        elif dropped:
            self.arena.forget(order.uid)
        elif fail is not None:
            self.placed[order.generation].unsaved = True
        if not left and (fail is None or dropped):
            self.dirty.discard(order.name)
        if fail is not None:
            self.send(CopyFailed(self.now, order.generation, fail))
            if dropped and not left:
                assert any(isinstance(a, Lost) for a in self.out), f"{order}: nobody was told"
                assert order.generation not in self.placed, f"{order}: it did not leave"
                refused = [a for a in self.out if isinstance(a, Refuse)]
                assert all(a.code != "device_failed" for a in refused), f"{refused}: it left"
        else:
            self.send(CopiedOut(self.now, order.generation))

    def _write(self, placed: Placed) -> None:
        """A worker that holds a mutable component writes to it."""
        if placed.name in self.mutable:
            self.arena.write(placed.uid, placed.runs)

    def ask_to_drop(self, name: str, *sessions: int) -> None:
        """Tell these sessions to let go of the memory being lent as `name`."""
        generation = next(g for g, m in self.moves.items() if m.name == name)
        self.owes.update({(session, generation): self.now for session in sessions})
        self.send(Dropping(self.now, generation, sessions))

    def drop(self, session: int, generation: int) -> None:
        """A session has let go of it."""
        self.owes.pop((session, generation), None)
        self.send(DropAck(self.now, session, generation))

    def hear(
        self, session: int, unread: int, channel: Channel = "lifeline", error: str = ""
    ) -> None:
        """A session reads all of its messages but `unread`."""
        self.owes.pop((session, channel), None)
        if unread and session in self.sessions and session not in self.fenced:
            self.owes[session, channel] = self.now
        self.send(Unread(self.now, session, channel, unread, error))

    def come_back(self, name: str, runs: Runs) -> None:
        """A part of the reclaimed memory is back; the rest is still awaited."""
        generation = next(g for g, m in self.moves.items() if m.name == name)
        self.placed[generation].held -= set(numbers(runs))
        self.send(Reclaimed(self.now, generation, runs))

    def _end_lending(self, order: Lend | Reclaim, fail: str | None) -> None:
        """A lending may fail; a return may take any time."""
        for session, what in list(self.owes):
            if what == order.generation:
                self.drop(session, order.generation)
        del self.moves[order.generation]
        if fail is not None and isinstance(order, Lend):
            del self.placed[order.generation]
            self.send(CopyFailed(self.now, order.generation, fail))
        elif isinstance(order, Lend):
            self.lent.add(order.generation)
            self.send(Lent(self.now, order.generation))
        else:
            self.lent.discard(order.generation)
            del self.placed[order.generation]
            self.send(Reclaimed(self.now, order.generation))

    def ack(self, name: str) -> None:
        self.end_ack(next(g for g, r in self.acks.items() if r.name == name))

    def end_ack(self, generation: int) -> None:
        revoke = self.acks.pop(generation)
        self.owes.pop((revoke.session, generation), None)
        self.placed[generation].mapped = False
        self.send(RevokeAck(self.now, revoke.session, revoke.name, generation))

    def settle(self) -> None:
        """All host copies, copies and acknowledgements arrive, until none is left."""
        while self.making or self.moves or self.acks:
            self.make_masters()
            for generation in list(self.acks):
                self.end_ack(generation)
            for generation in list(self.moves):
                self.end_move(generation)

    def sleep(self, seconds: float) -> list[AnyAction]:
        """Let time pass, with every Tick that falls due; return the resulting actions."""
        until, since = self.now + seconds, len(self.log)
        while (due := self.core.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.send(Tick(self.now))
        self.now = until
        return self.log[since:]

    # --- records -------------------------------------------------------------------------

    def ask(self, session: int, request: AnyOrder) -> None:
        """Hand one request to the core, if it is valid by itself."""
        if request.id:
            self.unanswered.add((session, request.id))
        if problem := self.core.problem_with(request):
            self.out = [Refuse(session, request.id, "bad_request", problem)]
            self._note(self.out[0])
        else:
            self.send(SessionRequest(self.now, session, request))

    def send(self, event: AnyEvent) -> list[AnyAction]:
        """Hand one event to the core, and check all of its promises."""
        if isinstance(event, SessionRequest):
            self._unmap(event.session, event.request)
        self.out = self.core.handle(event)
        if isinstance(event, SessionRequest) and isinstance(event.request, Acquire):
            for spare in event.request.spare:
                if (event.session, spare.lease) not in self.ledger.leases:
                    self.leases.pop((event.session, spare.lease), None)
        self.log += self.out
        for action in self.out:
            self._note(action)
        for i, action in enumerate(self.out):
            if isinstance(action, Evict):
                self._check_minimal(i, action)
        if isinstance(event, SessionGone | Tick):
            for session in self.fenced:
                self.acks = {g: r for g, r in self.acks.items() if r.session != session}
        if isinstance(event, Tick):
            for owed, since in self.owes.items():
                late = event.now - since > self._patience_s(owed[1])
                assert not late or owed[0] in self.fenced, f"{owed} since {since}: not fenced"
        self._check()
        due = self.core.next_deadline()
        if isinstance(event, Tick):
            assert due is None or due > event.now, "after a Tick another is due at once"
        elif due is None or due > event.now:
            # The core has decided all that it can: looking again changes nothing.
            undone = self.core.handle(Tick(event.now))
            assert not undone, f"{event} left undone: {undone}"
            then = self.core.next_deadline()
            in_time = then is None or (due is not None and due <= then)
            assert in_time, f"{event}: it would decide at {due}, and has to at {then}"
            again = self.core.next_deadline()
            assert again is None or (due is not None and due <= again), f"{event}: {due}, {again}"
        return self.out

    def _unmap(self, session: int, request: AnyOrder) -> None:
        """A worker unmaps what only these leases have, before it says so."""
        releases = (request,) if isinstance(request, Release) else getattr(request, "spare", ())
        for key in ((session, one.lease) for one in releases if one.unmapped):
            others = {n for k, names in self.leases.items() if k != key for n in names}
            for placed in self.placed.values():
                mine = placed.name in self.leases.get(key, ()) and placed.session == session
                if mine and placed.name not in others and placed.name not in self.mutable:
                    placed.mapped = False

    def _patience_s(self, what: int | str) -> float:
        rules = self.core.rules
        return rules.unread_timeout_s if isinstance(what, str) else rules.ack_timeout_s

    def copies(self) -> list[CopyIn | CopyOut]:
        return [m for m in self.moves.values() if isinstance(m, CopyIn | CopyOut)]

    def answer(self, key: Key) -> Grant | Refuse | Accept | None:
        return self.answers.get(key)

    def granted(self, *keys: Key) -> bool:
        """Whether all of these hold their lease."""
        return all(key in self.leases for key in keys)

    def refusal(self, key: Key) -> Refuse:
        answer = self.answers[key]
        assert isinstance(answer, Refuse), answer
        return answer

    def state(self, name: str) -> State:
        return self.ledger.components[name].state

    def told(self) -> list[str]:
        """The actions of the last event, one short line each, but for hurries and ranks."""
        return [brief(a) for a in self.out if not isinstance(a, SendHurry | Hasten)]

    def evictions(self) -> list[str]:
        """Names evicted so far, in order."""
        return [a.name for a in self.log if isinstance(a, Evict)]

    def _key(self, session: int) -> Key:
        self._request += 1
        return session, self._request

    def expand(self, names: tuple[str, ...]) -> set[str]:
        """`names`, with the name of a family replaced by those of its parts."""
        parts = {n: {p for p in self.owner if self.part_of[p] == n} for n in names}
        return {p for n in names for p in parts[n] or {n}}

    def _forget_name(self, name: str) -> None:
        del self.owner[name]
        self.current.pop(name, None)
        self.dirty.discard(name)
        for held in self.leases.values():
            held.discard(name)

    def _note(self, action: AnyAction) -> None:
        assert getattr(action, "session", None) not in self.gone, f"{action} to who is gone"
        match action:
            case MakeHostCopy() if action.uid in self.masters - self.dropped:
                self.making[action.uid] = action  # it is tried again
            case KeepHostCopy():
                assert action.uid in self.vouched - self.dropped - self.kept, f"{action}: not sure"
                assert action.uid not in self.making, f"{action}: still being made"
                self.kept.add(action.uid)
            case MakeHostCopy():
                assert action.replaces == self.current.get(action.name, 0)
                assert action.replaces or action.name not in self.owner
                self.owner[action.name] = action.session
                self.newest[action.name] = action.uid
                self.making[action.uid] = action
                self.masters.add(action.uid)
                if action.original:
                    assert action.original in self.filled - self.dropped, f"{action}: not filled"
                    self.filled.add(action.uid)  # it has the same bytes
                    if action.original in self.vouched:
                        self.vouched.add(action.uid)
                certain = self.core.rules.keep_host > 0 and action.original in self.vouched
                assert action.certain == certain, f"{action}: what is compared"
                if action.name in self.certain and not action.replaces:
                    self.certain_uids.add(action.uid)
                worth = self.scratch.get(action.name)
                assert action.empty == (worth is not None and worth.kind == "dropped")
                if action.original:
                    self.arena.share(action.uid, action.original)
                elif worth is None:
                    self.arena.make_master(action.uid, action.nbytes)
                else:
                    self.arena.make_scratch(action.uid, action.nbytes, filled=worth.filled)
            case SealHostCopy():
                assert action.uid in self.masters - self.dropped
                self.making[action.uid] = action
            case DropHostCopy():
                assert action.uid in self.masters - self.dropped, f"{action}: not there"
                assert action.uid not in self.making, f"{action}: still being made"
                assert all(m.uid != action.uid for m in self.copies()), f"{action}: copying"
                self.dropped.add(action.uid)
                self.kept.discard(action.uid)
            case CopyIn():
                assert action.uid == self.current[action.name], f"{action}: of old bytes"
                if action.joins:
                    self._check_joined(action)
                    self.moves[action.generation] = action
                else:
                    self._check_chunks(action)
                    self._start(action)
                owner = self.owner[action.name]
                placed = Placed(action.name, owner, action.runs, action.uid)
                if self.arena.begins_anew(action.uid):
                    self.scratch[action.name].contents = action.generation
                self.placed[action.generation] = placed
            case Hasten() | StopCopy():
                load = self.moves[action.generation]
                assert isinstance(load, CopyIn), f"{action}: no load"
                assert action.generation not in self.stops, f"{action}: it ends already"
                if isinstance(action, StopCopy):
                    self._check_unheld(action)
                    self.stops.add(action.generation)
            case CopyOut():
                assert not self.placed[action.generation].mapped, f"{action}: still mapped"
                self._check_unheld(action)
                self._check_saved(action)
                self._start(action)
            case Lend():
                self._check_chunks(action)
                self.moves[action.generation] = action
                self.placed[action.generation] = Placed(
                    action.name, action.session, action.runs, workspace=True
                )
            case Reclaim():
                self._check_unheld(action)
                assert action.generation in self.lent, f"{action}: not lent"
                assert action.generation not in self.moves, f"{action}: twice"
                self.moves[action.generation] = action
            case SendRevoke():
                self._check_unheld(action)
                if action.ack:
                    self.acks[action.generation] = action
                    self.owes[action.session, action.generation] = self.now
                else:
                    self.placed[action.generation].mapped = False
            case SendWanted():
                pair = (action.session, action.name)
                assert (pair in self.wanted) != action.wanted, f"{action}: told already"
                (self.wanted.add if action.wanted else self.wanted.discard)(pair)
            case SendHurry():
                assert (action.session in self.hurried) != action.waits, f"{action}: told already"
                (self.hurried.add if action.waits else self.hurried.discard)(action.session)
            case Accept() | Grant() | Refuse():
                self._note_answer(action)
            case SendBroken():
                assert self.placed[action.generation].name == action.name
                held = [k for k, names in self.leases.items() if action.name in names]
                assert action.session in {s for s, _ in held}, f"{action}: not held"
                for key in held:
                    assert key[0] == action.session, f"{action}: held by {key}"
                    self.leases[key].discard(action.name)
            case Fence():
                assert action.session not in self.fenced, f"{action}: twice"
                self.fenced.append(action.session)
                late = [o for o, since in self.owes.items() if o[0] == action.session]
                late = [o for o in late if self.now >= self.owes[o] + self._patience_s(o[1])]
                assert late, f"{action}: it owes nothing, or has time for it"
            case Evict():
                self._check_unheld(action)
            case Evicted():
                placed = self.placed.pop(action.generation)
                assert not placed.mapped, f"{action}: still mapped"
                assert action.generation not in self.moves, f"{action}: still copied"
                if action.name in self.scratch:
                    self._drop_scratch(action, placed)
                assert action.name not in self.dirty, f"{action}: what was written is lost"
                saved = placed.uid in self.arena.saved or self.arena.is_saved(placed.uid)
                assert saved, f"{action}: not what was written"
            case Foresee() as foreseen:
                assert foreseen.name not in self.foreseen, f"{foreseen}: twice"
                self.foreseen.add(foreseen.name)
            case Foreseen() as foreseen:
                self.foreseen.remove(foreseen.name)
            case Lost():
                worth = self.scratch.get(action.name)
                assert worth is None or worth.kind == "saved", f"{action}: as it should be"
            case Waiting():
                assert (action.session, action.request) in (*self.waiting, *self.starters)

    def _note_answer(self, action: Accept | Grant | Refuse) -> None:
        key = (action.session, action.request)
        assert key not in self.answers, f"{action}: answered already"
        self.answers[key] = action
        self.unanswered.discard(key)
        if key in self.starters:
            return self._note_start(key, action)
        asked = self.waiting.pop(key, None)
        if isinstance(action, Grant):
            assert asked is not None, f"{action}: not asked, or cancelled"
            self._check_seen(key, asked)
            self.leases[key] = set(action.names or asked.names)
            self._note_what_is_old(key)
            whole = self.expand(asked.names)
            assert self.leases[key] <= whole, f"{action}: more than was asked for"
            # it does not wait for a part that is registered later
            assert {self.part_of.get(n) or n for n in whole} == {
                self.part_of.get(n) or n for n in self.leases[key]
            }
            if asked.names == (workspace_name(*key),):
                assert action.placements == ()
                lent = {self.placed[g].name for g in self.lent}
                assert asked.names[0] in lent, f"{action}: not lent yet"
            for placement in action.placements:
                placed = self.placed[placement.generation]
                assert placement.runs == placed.runs
                placed.mapped = True
                self._check_contents(placement, placed)
                if placement.name in self.mutable:
                    self.dirty.add(placement.name)
                if placement.generation not in self.moves:
                    self._write(placed)
        elif isinstance(action, Accept) and (name := self._unregistering.pop(key, None)):
            self._forget_name(name)
        elif isinstance(action, Accept):
            for name in self._committing.pop(key, ()):
                self.current[name] = self.newest[name]

    def _note_start(self, key: Key, action: Accept | Grant | Refuse) -> None:
        """Sessions start one at a time, in the order of arrival."""
        if isinstance(action, Grant):
            assert key == self.starters[0], f"{action}: another one starts"
            assert not action.placements
        else:
            assert isinstance(action, Refuse), f"{action}: no answer to a start"
            self.starters.remove(key)

    def _check_contents(self, placement: Placement, placed: Placed) -> None:
        """Its owner hears of new contents when there are some, and not before; they are zeros."""
        worth = self.scratch.get(placement.name)
        if worth is None:
            assert placement.contents == 0, f"{placement}: no scratch"
            return
        assert placement.contents == worth.contents, f"{placement}: they began in {worth}"
        if worth.heard != worth.contents and placement.generation not in self.moves:
            assert self.arena.is_zero(placed.runs), f"{placement}: not new"
        worth.heard = worth.contents

    def _check_saved(self, order: CopyOut) -> None:
        """Everything worth saving is saved, and of scratch nothing else."""
        worth = self.scratch.get(order.name)
        if worth is None:
            assert order.only is None, f"{order}: in part"
            return
        assert worth.kind == "saved", f"{order}: nobody needs it"
        assert places(order.only, order.nbytes) == worth.places, f"{order}: {worth} was asked for"
        assert order.name in self.dirty, f"{order}: nobody wrote to it"

    def _drop_scratch(self, action: Evicted, placed: Placed) -> None:
        """No part of it is worth saving without a copy out: its contents are gone."""
        if action.name in self.dirty:
            worth = self.scratch[action.name]
            assert worth.places == [], f"{action}: {worth} was to be saved"
            self.arena.forget(placed.uid)
            self.dirty.discard(action.name)

    def _check_seen(self, key: Key, asked: Acquire) -> None:
        """A granted acquire sees the bytes of the last commit before its request.

        If its session already holds the component, it sees the bytes of that lease.
        """
        for placed in self.placed.values():
            held = [k for k, names in self.leases.items() if placed.name in names]
            if placed.name in self.expand(asked.names) and key[0] not in {s for s, _ in held}:
                due = self.to_see.get(key, {}).get(placed.name, 0)
                assert placed.uid >= due or placed.session in self.gone, f"{key}: {placed} is old"

    def _note_what_is_old(self, key: Key) -> None:
        """Other waiters of its session may be promised the bytes that it holds now, even if it
        releases them before their grant.
        """
        held = [p for p in self.placed.values() if p.name in self.leases[key]]
        for other in (k for k in self.waiting if k[0] == key[0]):
            due = self.to_see.get(other, {})
            for placed in held:
                if placed.name in due:
                    due[placed.name] = min(due[placed.name], placed.uid)

    def _start(self, order: CopyIn | CopyOut) -> None:
        assert all(m.uid != order.uid for m in self.copies()), f"{order}: one is under way"
        assert order.uid in self.masters - self.dropped, f"{order}: no master"
        self.moves[order.generation] = order
        self.arena.start(order)

    def _check_chunks(self, order: CopyIn | Lend) -> None:
        if isinstance(order, CopyIn):
            assert count(order.runs) == order.nbytes
        chunks = set(numbers(order.runs))
        assert len(chunks) == count(order.runs), f"{order}: a chunk twice"
        assert chunks <= set(range(self.ledger.pool.total)), f"{order}: beyond the arena"
        taken = [p for p in self.placed.values() if p.held & chunks]
        assert not taken, f"{order} over {taken}"
        held = {placed.runs: len(placed.held) for placed in self.placed.values()}
        used = sum(held.values()) + len(chunks)
        assert used == order.in_use, f"{order}: {used} are in use"

    def _check_joined(self, order: CopyIn) -> None:
        """Its bytes are there already, by a twin that nobody writes to."""
        there = [p for p in self.placed.values() if p.runs == order.runs and p.name == order.joins]
        assert there, f"{order}: nothing is there"
        assert self.mutable.isdisjoint({order.name, order.joins})
        assert self.arena.holds(order.uid, order.runs), f"{order}: other bytes"

    def _check_unheld(self, action: Evict | SendRevoke | StopCopy | CopyOut | Reclaim) -> None:
        held = [key for key, names in self.leases.items() if action.name in names]
        assert not held, f"{action}: leased by {held}"

    def _check(self) -> None:
        check(self.core)
        assert (self.ledger.lane_in.nbytes, self.ledger.lane_out.nbytes) == (
            self.bytes_in,
            self.bytes_out,
        )
        by_chunks = {p.runs: p.held for p in self.placed.values()}  # twins share
        occupied = [i for held in by_chunks.values() for i in held]
        assert len(set(occupied)) == len(occupied), "a chunk has two owners"
        assert len(occupied) == self.ledger.pool.total - self.ledger.pool.free, "chunks unaccounted"
        for generation, placed in self.placed.items():
            if not (placed.workspace or placed.broken or generation in self.moves):
                assert self.arena.holds(placed.uid, placed.runs), f"{placed}: bytes are wrong"
        assert {w.key for w in self.core.ledger.queue} == set(self.waiting), "a waiter is forgotten"
        assert set(self.ledger.leases) == set(self.leases), "a lease is forgotten"
        for key, names in self.leases.items():
            for name in names:
                coming = self.asked[key].early and self.state(name) is State.LOADING
                coming = coming and self.owner[name] == key[0]
                assert coming or self.state(name) is State.RESIDENT, f"{key}: {name} is not in"

    def _placed(self, *, evicting: bool) -> list[Placed]:
        there = [c for c in self.ledger.components.values() if c.on_device]
        return [self.placed[c.generation] for c in there if c.evicting == evicting]

    def _may_join(self, c: Component) -> bool:
        return twins.to_join(self.ledger, c) is not None

    def _check_minimal(self, i: int, last: Evict) -> None:
        """Of all components evicted to make room for one waiter, none could have stayed.

        Counts back from the chunks that are free or leaving after the event.
        """
        later = self.out[i + 1 :]
        if last.reason != "room" or last.waiter is None:
            return
        if any(isinstance(a, Evict) and a.waiter == last.waiter for a in later):
            return
        loads = [a for a in later if isinstance(a, CopyIn | Lend)]
        copied_in = {a.name: count(a.runs) for a in loads if isinstance(a, Lend) or not a.joins}
        evicted = [a for a in later if isinstance(a, Evict) and a.reason != "joined"]
        components = self.ledger.components
        evicting = {p.runs: len(p.held) for p in self._placed(evicting=True)}
        stays = {p.runs for p in self._placed(evicting=False)}
        leaving = sum(n for runs, n in evicting.items() if runs not in stays)
        gone = self.gone | {0}  # the workers of the daemon before
        orphans = [p for p in self.placed.values() if p.workspace and p.session in gone]
        leaving += sum(count(p.runs) for p in orphans)
        dying, quarantined = self.ledger.dying, self.ledger.quarantined
        leaving += sum(count(runs) for s in dying for runs in quarantined[s])
        room = self.ledger.pool.free + leaving + sum(copied_in.values())
        room -= sum(components[a.name].chunks for a in evicted)
        waiter = self.core.ledger.queue.get(last.waiter)
        # a family stands for the parts it had when the waiter joined the queue
        if waiter is not None:
            asked = set(waiter.names)
        else:
            asked = self.leases.get(last.waiter) or self.expand(self.asked[last.waiter].names)
        names = asked & components.keys()
        need = sum(
            components[n].chunks
            for n in names
            if n in copied_in
            or (components[n].state is State.ABSENT and not self._may_join(components[n]))
        )
        assert room >= need, f"{last} was not enough"
        # one that holds what it needs may have gone first, with the room that was made by then
        others = [
            n
            for n in range(i)
            if isinstance(a := self.out[n], CopyIn | Lend) and a.name not in names
        ]
        for other in self.out[max(others, default=0) : i + 1]:
            if isinstance(other, Evict) and other.waiter == last.waiter and other.reason == "room":
                assert room - components[other.name].chunks < need, f"{other} was not needed"


def brief(action: AnyAction) -> str:
    """One action in a few words."""
    match action:
        case Grant() | Refuse() | Accept():
            code = f" {action.code}" if isinstance(action, Refuse) else ""
            return f"{type(action).__name__.lower()} {action.request}{code}"
        case Evict():
            return f"evict {action.name} ({action.reason})"
        case SendRevoke():
            return f"revoke {action.name}" + (" (ack)" if action.ack else "")
        case SendWanted():
            return f"{'want' if action.wanted else 'unwant'} {action.name}"
        case StopCopy():
            return f"stop {action.name}"
        case SendHurry():
            return "hurry" if action.waits else "take time"
        case SendBroken():
            return f"broken {action.name}"
        case Fence():
            return "fence"
        case Waiting():
            return f"waiting {action.request}"
        case CopyIn():
            return f"copy in {action.name}"
        case CopyOut():
            return f"copy out {action.name}"
        case Lend() | Reclaim():
            return type(action).__name__.lower()
        case DropHostCopy():
            return f"drop host copy {action.name}"
        case _:
            return f"{type(action).__name__.lower()} {action.name}"


def remains(core: Residency, session: int) -> list[str]:
    """The places in the state of `core` that contain the number of a session.

    Copies in flight, host copies in the making or kept, and quarantined chunks are the exceptions:
    their data is kept until they end.
    """
    found: list[str] = []
    ledger = core.ledger
    parts: dict[str, object] = {"": core, "ledger.": ledger}
    host = ledger.host
    kept = (ledger.moves, host.owners, host.making, ledger.quarantined, ledger.dying)
    passed_over = [*parts.values(), core.rules, *kept]
    seen = set(map(id, passed_over))
    for part, whole in parts.items():
        for name, value in vars(whole).items():
            _search(value, session, part + name, found, seen)
    for uid, c in ledger.host.owners.items():
        if c.session == session:
            used = any(m.uid == uid for m in ledger.moves.values())
            if not used and uid not in host.making and uid not in host.kept:
                found.append(f"masters: {c}")
    return found


def _search(value: object, number: int, path: str, found: list[str], seen: set[int]) -> None:
    if isinstance(value, int) and not isinstance(value, bool):
        if value == number:
            found.append(path)
        return
    if value is None or isinstance(value, str | float | bool) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for k, v in value.items():
            _search(k, number, f"{path} key", found, seen)
            _search(v, number, f"{path}[{k!r}]", found, seen)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for v in value:
            _search(v, number, f"{path}[]", found, seen)
    else:
        slots = getattr(type(value), "__slots__", None) or vars(value)
        for attribute in slots:
            _search(getattr(value, attribute), number, f"{path}.{attribute}", found, seen)


#: Makes a World, of the real core or of one with a seeded bug.
Make = Callable[..., World]


def outcome(w: World) -> list[str]:
    """The actions of the last event, except those for display only."""
    to_be_read = ("waiting", "evicted", "want", "unwant")
    return [line for line in w.told() if not line.startswith(to_be_read)]
