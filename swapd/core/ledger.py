"""What is where, who holds it, and the steps in which that changes. Decides nothing.

Lives here: every fact about components, leases, copies in flight and chunks, and the
transitions between the states of a component, each with the actions that it orders. May
not live here: who waits and who is let in (`admission.py`), what is evicted for whom
(`planner.py`), messages for people (`explain.py`).

Free chunks are those counted here (`ChunkPool`), never asked of the device.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable

from swapd.core.actions import (
    Accept,
    AnyAction,
    Broken,
    CopyIn,
    CopyOut,
    DropMaster,
    Evict,
    Evicted,
    Hurry,
    Lend,
    Lost,
    MakeMaster,
    Reason,
    Reclaim,
    Refuse,
    Revoke,
    SealMaster,
    Want,
)
from swapd.core.chunks import ChunkPool, count, join, split
from swapd.core.events import Register
from swapd.core.holdings import Holders
from swapd.core.policy import Rules
from swapd.core.records import (
    Component,
    Key,
    Lease,
    Move,
    Renewal,
    Session,
    State,
    Waiter,
    workspace_name,
)
from swapd.core.turns import Turns
from swapd.protocol import Code, Placement, Runs

#: So far uses are counted that clients tell of: as many again, one by one, fit into 64 bits.
HITS_MAX = (1 << 63) - 1


class Ledger:
    """All that is true of one device of `chunks` chunks. Each method is one step."""

    def __init__(self, chunks: int, chunk_bytes: int, rules: Rules) -> None:
        self.rules = rules
        self.chunk_bytes = chunk_bytes
        self.pool = ChunkPool(chunks)
        self.sessions: dict[int, Session] = {}
        #: By name; the name is free again as soon as the component is gone.
        self.components: dict[str, Component] = {}
        #: Those that are no workspaces, and families, in order.
        self.names: list[str] = []
        self.leases: dict[Key, Lease] = {}
        #: Resident, leased by nobody, promised to nobody, not `resident`: what may be evicted,
        #: in this order. First what was brought in ahead and leaves after its use in any case,
        #: then the least recently used.
        self.idle = Turns()
        #: Who holds what.
        self.holders = Holders(self.idle)
        #: Copies in flight, and what is being lent or reclaimed, by generation.
        self.moves: dict[int, Move] = {}
        #: Acknowledgements waited for, by generation, in order of their deadline.
        self.acks: dict[int, tuple[float, Component]] = {}
        #: Chunks of components being evicted and workspaces given back: soon to be free.
        self.leaving = 0
        #: Those of them that are being saved: a load may follow; and the copies that save them.
        self.inheritable = 0
        self.saves: dict[int, Move] = {}
        #: Chunks of workspaces that are given back.
        self.reclaiming = 0
        #: Chunks that a process which may still be alive can write to, by session.
        self.quarantined: dict[int, list[Runs]] = {}
        #: Chunks that will not come free: these, and those of `resident` components that are in.
        self.fixed = 0
        #: Chunks of all components that will not leave once they are in.
        self.staying = 0
        #: Whose master it is, by uid; kept until DropMaster is ordered.
        self.masters: dict[int, Component] = {}
        #: Those of them that are being made or sealed.
        self.making: set[int] = set()
        #: The parts of each family, in order of registration: its name is no component's.
        self.families: dict[str, dict[str, Component]] = {}
        #: Families that keep as much as there is room for beside what never leaves.
        self.automatic: dict[str, None] = {}
        #: Components on the device that were updated meanwhile.
        self.superseded: dict[str, Component] = {}
        #: Alternating components by group.
        self.groups: dict[str, dict[str, Component]] = {}
        #: The same, of those that are on the device.
        self.groups_in: dict[str, dict[str, Component]] = {}
        #: Components kept for who waits, and the holders that were told so.
        self.wanted: dict[str, set[int]] = {}
        #: Those of them that were leased since the holders were told.
        self.joined: dict[str, None] = {}
        #: Sessions that were told that somebody waits for what may be held; and those that hold
        #: something and were not.
        self.hurried: set[int] = set()
        self.unhurried: dict[int, None] = {}
        #: Names to bring in when nobody waits for memory.
        self.prefetches: dict[str, None] = {}
        #: Why the device does nothing any more; "" if it does. Then nothing is loaded, nor
        #: evicted to make room, since it could not come back.
        self.down = ""
        #: When the last copy in ended: they run one after the other.
        self.copied_at = 0.0
        #: Totals since the start, for status.
        self.loads = self.evictions = self.hits = self.bytes_in = self.bytes_out = 0
        self.peak_chunks = 0

        #: The time of the event being handled, what it orders, and whether there is
        #: something to decide anew.
        self.now = 0.0
        self.out: list[AnyAction] = []
        self.replan = False
        #: What fitted beside all that never leaves may not fit any more.
        self.room_shrank = False
        #: There is more or less room beside what never leaves than there was.
        self.room_differs = False

        self._uid = self._generation = self._leased_seq = 0

    def accept(self, key: Key) -> None:
        self.out.append(Accept(*key))

    def refuse(self, key: Key, code: Code, message: str) -> None:
        self.out.append(Refuse(*key, code, message))

    # --- what is there -------------------------------------------------------------------

    def chunks_for(self, nbytes: int) -> int:
        return -(-nbytes // self.chunk_bytes)

    def is_current(self, c: Component) -> bool:
        return self.components.get(c.name) is c

    def may_be_acquired(self, name: str) -> bool:
        """Whether it is registered, committed, and not going away."""
        c = self.components.get(name)
        if c is None or c.workspace:
            return False
        return c.state is not State.FILLING and not c.unregistering and not c.ending

    def must_leave_first(self, c: Component, w: Waiter | None) -> bool:
        """Whether `c` is on the device with bytes that are no longer its own, and not for `w`.

        An agent that holds it may take it again: it could not release otherwise.
        """
        if not c.superseded or w is None:
            return c.superseded
        if w.takes_old and self.is_held_beside(c, w):
            return False
        return w.owner not in c.agents

    def is_held_beside(self, c: Component, w: Waiter) -> bool:
        """Whether the session of `w` holds `c`, if not `w` itself."""
        return w.session in c.holders

    def expand(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """`names`, each once, and instead of a family's name those of its parts."""
        families = self.families
        if not families or families.keys().isdisjoint(names):
            return tuple(dict.fromkeys(names))
        return tuple(dict.fromkeys(part for n in names for part in families.get(n, (n,))))

    def rivals(self, asked: list[Component]) -> list[Component]:
        """The members of its alternating groups that are on the device and exclude it."""
        rivals: dict[str, Component] = {}  # several of one family have the same ones
        for c in asked:
            if c.group is not None:
                mates = self.groups_in.get(c.group, {}).values()
                rivals.update((m.name, m) for m in mates if c.excludes(m))
        return list(rivals.values())

    def never_leaving(self, but: Collection[Component] = ()) -> int:
        """Chunks of all components that will not leave once they are in."""
        return self.staying - sum(c.chunks for c in but if c.policy == "resident")

    def fixed_chunks(self, but: Iterable[Component]) -> int:
        """Chunks that will not come free: `resident` components that are in, quarantine."""
        return self.fixed - sum(c.fixed for c in but)

    def _recount(self, c: Component) -> None:
        """It came to the device or left it, or its policy changed: keep sums and groups."""
        there = c.on_device and self.is_current(c)
        fixed = c.chunks if there and c.policy == "resident" and not c.unregistering else 0
        if fixed != c.fixed:
            with self.holders.reclassified(c):
                self.fixed += fixed - c.fixed
                c.fixed = fixed
        if c.group is not None and there:
            self.groups_in.setdefault(c.group, {})[c.name] = c
        elif c.group is not None and c.name in self.groups_in.get(c.group, ()):
            _leave(self.groups_in, c.group, c)

    # --- components, from registered to gone ---------------------------------------------

    def register(self, asked: Register, chunks: int) -> None:
        c = Component(
            self._next_uid(),
            asked.name,
            asked.session,
            asked.nbytes,
            chunks,
            "sequential" if asked.passing else asked.policy,
            asked.group,
            asked.mutable,
            part_of=asked.part_of,
            own_policy=asked.policy,
        )
        self.components[c.name] = c
        self.staying += c.chunks if c.policy == "resident" else 0
        self.room_differs |= c.policy == "resident"
        insort(self.names, c.name)
        if c.part_of:
            if c.part_of not in self.families:
                insort(self.names, c.part_of)
            self.families.setdefault(c.part_of, {})[c.name] = c
        self.sessions[c.session].owns[c.name] = None
        c.answer = asked.request
        self._make_master(c, c.uid, asked.request, asked.segments, asked.content)

    def _next_uid(self) -> int:
        self._uid += 1
        return self._uid

    def _make_master(
        self,
        c: Component,
        uid: int,
        request: int,
        segments: tuple[int, ...] = (),
        content: str = "",
    ) -> None:
        self.masters[uid] = c
        self.making.add(uid)
        replaces = c.uid if c.uid != uid else 0
        self.out.append(
            MakeMaster(
                c.session, uid, c.name, c.nbytes, c.mutable, segments, request, content, replaces
            )
        )

    def seal(self, c: Component, uid: int) -> None:
        self.making.add(uid)
        self.out.append(SealMaster(uid, c.name))

    def commit(self, c: Component) -> None:
        """Its master is sealed: it may be acquired."""
        self.answer(c)
        c.state = State.ABSENT
        if c.group is not None:
            self.groups.setdefault(c.group, {})[c.name] = c

    def answer(self, c: Component) -> None:
        """Accept the register, commit or unregister that waited for this."""
        assert c.answer is not None
        self.accept((c.session, c.answer))
        c.answer = None

    def set_unregistering(self, c: Component, going: bool) -> None:
        """It goes as soon as it can; or stays after all."""
        c.unregistering = going
        self._recount(c)

    def finish_unregister(self, c: Component) -> None:
        self.answer(c)
        self.remove(c)
        self.drop_master(c.uid)

    def remove(self, c: Component) -> None:
        """The name is free again. Chunks and master are the caller's to settle."""
        del self.components[c.name]
        if session := self.sessions.get(c.session):
            session.owns.pop(c.name, None)
        self.staying -= c.chunks if c.policy == "resident" else 0
        self.idle.drop(c)
        self._recount(c)
        if c.name in self.prefetches:
            del self.prefetches[c.name]
            self.replan = True  # others may have been held back for it
        self.superseded.pop(c.name, None)
        self.unwant(c.name)
        _leave(self.groups, c.group, c)
        if not c.workspace:
            self._forget_name(c.name)
        _leave(self.families, c.part_of, c)
        if c.part_of and c.part_of not in self.families:
            self._forget_name(c.part_of)
            self.automatic.pop(c.part_of, None)
        self.room_differs |= c.policy == "resident"

    def _forget_name(self, name: str) -> None:
        del self.names[bisect_left(self.names, name)]

    def strand(self, c: Component, alive: bool) -> None:
        """The owner is gone: free what can be freed now, the rest when its copy ends."""
        self._take_from_leases(c)
        self._leave_room(c)
        if c.workspace:
            self.close_workspace(c)
            if self.is_current(c):
                self.remove(c)
            return
        self.acks.pop(c.generation, None)
        move = self.moves.get(c.generation)
        if c.evicting:
            self.leaving -= count(move.runs if move else c.runs)
        if move:
            self._bar_heirs(move)
        # what could not be saved is nowhere else: its process may go on with it where it is
        unsaved = c.dirty and c.state is State.RESIDENT
        writer = c.session if alive and c.mutable and (c.mapped or unsaved) else None
        if writer is not None:
            self.quarantined.setdefault(writer, [])  # perhaps to be added when a copy ends
        if move:
            move.writer = writer
        elif c.on_device:
            self._free(c.runs, writer)
        self.remove(c)
        if not (move and move.uid == c.uid):
            self.drop_master(c.uid)
        if c.renewal is not None:
            self.drop_master(c.renewal.uid)
            c.renewal = None

    def abandon(self, move: Move) -> None:
        """A copy ended that nobody wants any more."""
        self._hand_back(move)
        self._free(move.runs, move.writer)
        self.drop_master(move.uid)
        self.replan = True

    def _free(self, runs: Runs, writer: int | None) -> None:
        """Nobody uses these chunks; `writer` may write to them until its process ends."""
        if writer in self.quarantined:
            self.quarantined[writer].append(runs)
            self.fixed += count(runs)
            self.room_shrank = True
        else:
            self.pool.give(runs)

    def end_quarantine(self, session: int) -> None:
        """Its process has ended: nobody can write to these chunks any more."""
        for runs in self.quarantined.pop(session, ()):
            self.fixed -= count(runs)
            self.pool.give(runs)

    def drop_master(self, uid: int) -> None:
        """Nobody wants it any more: it goes, or will when it is made or sealed."""
        if uid not in self.making:
            c = self.masters.pop(uid)
            self.out.append(DropMaster(uid, c.name))

    # --- new bytes -----------------------------------------------------------------------

    def begin_update(self, c: Component, request: int) -> None:
        """Have a second master made. What is on the device, and in the first, stays."""
        c.renewal = Renewal(self._next_uid(), request, request)
        self._make_master(c, c.renewal.uid, request)

    def answer_update(self, c: Component, renewal: Renewal) -> None:
        assert renewal.request is not None
        self.accept((c.session, renewal.request))
        renewal.request = None

    def give_up_update(self, c: Component, renewal: Renewal) -> None:
        c.renewal = None
        self.drop_master(renewal.uid)

    def give_up_together(self, c: Component, renewal: Renewal) -> None:
        """Drop this new master, and those that were to take place with it."""
        for one in renewal.together or (c,):
            assert one.renewal is not None
            self.give_up_update(one, one.renewal)

    def seal_together(self, parts: tuple[Component, ...], request: int) -> None:
        """Their new masters are filled: have them sealed, and answer when all are."""
        for c in parts:
            assert c.renewal is not None
            c.renewal.request, c.renewal.together = request, parts
            self.seal(c, c.renewal.uid)

    def sealed(self, c: Component, renewal: Renewal) -> None:
        """If all that take place together are sealed, they do, in this one step."""
        renewal.sealed = True
        renewals = [one.renewal for one in renewal.together]
        if all(r is not None and r.sealed for r in renewals):
            assert renewal.request is not None
            self.accept((c.session, renewal.request))
            for one in renewal.together:
                assert one.renewal is not None
                self._renew(one, one.renewal)

    def _renew(self, c: Component, renewal: Renewal) -> None:
        """The new master takes the place of the old one.

        What is on the device, or on its way there, is superseded: it goes when nobody holds it.
        """
        old, c.uid, c.renewal = c.uid, renewal.uid, None
        c.updated_by = renewal.begun_by
        move = self.moves.get(c.generation)
        if not (move and move.uid == old):
            self.drop_master(old)
        if c.state in (State.LOADING, State.RESIDENT):
            with self.holders.reclassified(c):
                c.superseded = True
            self.superseded[c.name] = c
            self.settle(c)
            self.room_shrank = True  # who holds it is in the way of who waits for it
        self.replan = True

    def end_copy_of(self, move: Move) -> None:
        """Its master was kept for it if the component has another by now."""
        if move.uid != move.component.uid:
            self.drop_master(move.uid)

    def _leave_superseded(self, c: Component) -> None:
        c.superseded = False
        self.superseded.pop(c.name, None)

    # --- leases --------------------------------------------------------------------------

    def lend(self, w: Waiter) -> tuple[Placement, ...]:
        """Give `w` its lease; return where the components are that its session owns."""
        self.sessions[w.session].leases.add(w.request)
        if w.session not in self.hurried:
            self.unhurried[w.session] = None
        self.leases[w.key] = Lease(w.session, w.agent, dict.fromkeys(w.names))
        self.holders.open(w.key, self.leases[w.key])
        placements = []
        for name in w.names:
            c = self.components[name]
            c.promised.pop(w.key, None)
            self.holders.take_up(c, w.key, w.owner)
            if name in self.wanted:
                self.joined[name] = None
            c.used = True
            if c.session == w.session and not c.workspace:
                c.mapped = True
                c.dirty = c.mutable
                passing = c.policy == "sequential"
                placements.append(Placement(name, c.generation, c.runs, passing))
        return tuple(placements)

    def take_back(self, key: Key, again: int = 0) -> bool:
        """End a lease that was used `again` times more; return whether there was one."""
        lease = self.leases.pop(key, None)
        if lease is None:
            return False
        session = self.sessions.get(lease.session)
        for name in lease.names:
            c = self.components[name]
            self.holders.lay_down(c, key, lease.owner)
            if again:
                c.hits = min(c.hits + again, HITS_MAX)
                self.hits = min(self.hits + again, HITS_MAX)
            if not c.leases:
                c.last_used = self.now
                if session is not None:
                    c.released_at = self.now  # it may come back
                self.settle(c)
        self.holders.close(key, lease)
        if session is not None:
            session.leases.discard(key[1])
            if not session.leases:
                self.unhurried.pop(lease.session, None)
        return True

    def break_leases(self, c: Component, why: str) -> None:
        """Its load failed: tell the holders that were let in early."""
        for session in sorted(c.holders):
            self.out.append(Broken(session, c.name, c.generation, why))
        if c.leases:
            self._take_from_leases(c)
            c.last_used = self.now

    def _take_from_leases(self, c: Component) -> None:
        """Those that hold it hold it no longer; what else they hold they keep."""
        for key in list(c.leases):
            lease = self.leases[key]
            del lease.names[c.name]
            self.holders.lay_down(c, key, lease.owner)

    # --- coming in -----------------------------------------------------------------------

    def load(self, c: Component) -> None:
        self._generation += 1
        c.generation = self._generation
        c.state = State.LOADING
        c.load_started = self.now
        c.used = False
        move = self.moves[c.generation] = self._take_chunks(c)
        c.runs = join(move.runs, *move.inherited.values()) if move.inherited else move.runs
        self._recount(c)
        self.peak_chunks = max(self.peak_chunks, self.pool.total - self.pool.free)
        self.prefetches.pop(c.name, None)
        if c.policy == "resident":
            self.room_shrank = self.replan = True
        if c.workspace:
            self.out.append(Lend(c.session, c.name, c.generation, c.runs))
        else:
            behind = tuple(move.inherited)
            self.out.append(CopyIn(c.uid, c.name, c.generation, c.nbytes, c.runs, behind))

    def _take_chunks(self, c: Component) -> Move:
        """Free chunks; if they are too few, also those that are saved first."""
        free = min(c.chunks, self.pool.free)
        load = Move(c, c.uid, self.pool.take(free, prefer=c.runs))
        short = c.chunks - free
        for generation, save in self.saves.items() if short else ():
            if n := min(short, count(save.runs)):
                load.inherited[generation], save.runs = split(save.runs, n)
                save.heirs.append(c.generation)
                self.inheritable -= n
                self.leaving -= n
                short -= n
            if not short:
                break
        return load

    def loaded(self, c: Component) -> None:
        c.state = State.RESIDENT
        c.resident_since = self.now
        c.swap_in_s = self.now - c.load_started
        self.holders.rank(c)
        if not c.workspace:
            c.copy_s = self.now - max(c.load_started, self.copied_at)
            self.copied_at = self.now
            c.loads += 1
            self.loads += 1

    def load_failed(self, c: Component, move: Move) -> None:
        """It is absent again; once its worker has let go of it, if that knew the chunks."""
        if move.inherited:
            self._hand_back(move)
            c.runs = move.runs
        c.dirty = False  # what was written beside the copy is not worth keeping
        if c.mapped:
            return self.evict(c, "failed", None)
        self.pool.give(c.runs)
        self._leave_superseded(c)
        c.state = State.ABSENT
        self._recount(c)
        if c.unregistering:
            self.finish_unregister(c)

    def settle(self, c: Component) -> None:
        """After a lease or a promise ended, or a load: idle if nobody needs it now."""
        if c.state is not State.RESIDENT or c.leases or c.promised:
            return
        if c.workspace:
            self.close_workspace(c)
        elif c.unregistering:
            self.evict(c, "unregister", None)
        elif c.superseded:
            self.evict(c, "update", None)
        elif self.is_done_with(c):
            self.evict(c, "sequential", None)
        else:
            self.make_idle(c)
        self.replan = True

    def is_done_with(self, c: Component) -> bool:
        """Whether a component with no lease and no promise is to be dropped at once."""
        return c.policy == "sequential" and c.used and not c.waiting and not self.down

    def set_kept(self, c: Component, kept: bool) -> None:
        """A part has its own policy from now on, or passes through the device."""
        policy = c.own_policy if kept else "sequential"
        if policy == c.policy:
            return
        self.room_differs |= "resident" in (c.policy, policy)
        self.room_shrank |= policy == "resident"
        self.staying += c.chunks if policy == "resident" else 0
        self.staying -= c.chunks if c.policy == "resident" else 0
        c.policy = policy
        self._recount(c)
        self.holders.rank(c)
        self.replan = True
        if c.state is State.RESIDENT and not (c.leases or c.promised):
            if not kept and not c.waiting and not self.down:
                self.evict(c, "resized", None)
            else:
                self.idle.drop(c)
                self.make_idle(c)

    def make_idle(self, c: Component) -> None:
        c.idle_since = self.now
        if c.policy != "resident":
            self.idle.add(c)

    # --- leaving -------------------------------------------------------------------------

    def evict(self, c: Component, reason: Reason, key: Key | None) -> None:
        """Decided: `c` leaves. It does so at once, or when its worker has let go of it."""
        self.idle.drop(c)
        self.unwant(c.name)
        self._leave_superseded(c)
        c.reason, c.evicting_for = reason, key
        if key is not None:
            self.sessions[key[0]].makes_way[c.generation] = c
        self.leaving += count(c.runs)
        self.replan = True
        c.state = State.REVOKING
        self.out.append(Evict(c.name, c.generation, reason, key))
        ack = c.mapped and (self.rules.strict or c.mutable)
        if c.mapped:
            self.out.append(Revoke(c.session, c.name, c.generation, ack))
        if ack:
            self.acks[c.generation] = (self.now + self.rules.ack_timeout_s, c)
        else:
            self.take_out(c)

    def take_out(self, c: Component) -> None:
        """The worker can no longer write: save what it wrote, or just drop it."""
        c.mapped = False
        if c.dirty:
            c.state = State.WRITING_BACK
            save = self.moves[c.generation] = Move(c, c.uid, c.runs, heritable=True)
            self.saves[c.generation] = save
            self.inheritable += c.chunks
            self.replan = True
            self.out.append(CopyOut(c.uid, c.name, c.generation, c.nbytes, c.runs))
        else:
            self.vacate(c, c.runs, bytes_back=0)

    def vacate(self, c: Component, runs: Runs, bytes_back: int) -> None:
        """It has left, and `runs` are free: all it had, but what was inherited."""
        self.leaving -= count(runs)
        self.pool.give(runs)
        c.state = State.ABSENT
        self._recount(c)
        self._leave_room(c)
        c.evictions += 1
        self.evictions += 1
        self.out.append(Evicted(c.name, c.generation, c.nbytes, bytes_back))
        if c.unregistering:
            self.finish_unregister(c)
        self.replan = True

    def write_back_failed(self, c: Component, move: Move) -> None:
        """It stays, with what its worker wrote."""
        assert count(move.runs) == c.chunks, f"{c} has heirs that were not told before"
        self.leaving -= c.chunks
        c.state = State.RESIDENT
        self._leave_room(c)

    def lose(self, c: Component, move: Move, why: str) -> None:
        """Its bytes are nowhere whole: part of them were overwritten, part not saved."""
        self.leaving -= count(move.runs)
        self.pool.give(move.runs)
        c.state = State.ABSENT
        self._recount(c)
        self._leave_room(c)
        c.dirty = bool(self.down)  # then the part that was not saved stays where it is
        c.damaged = why
        self.prefetches.pop(c.name, None)
        self.out.append(Lost(c.name, c.generation, why))

    def _leave_room(self, c: Component) -> None:
        """It is evicted for nobody any more."""
        if c.evicting_for is not None and (session := self.sessions.get(c.evicting_for[0])):
            session.makes_way.pop(c.generation, None)
        c.evicting_for = None

    # --- chunks that are inherited: overwritten as soon as each is saved -----------------

    def end_move(self, generation: int) -> tuple[Move, list[Component]]:
        """A copy has ended; return also the components whose chunks are all their own now.

        What was inherited from a write-back that ended stays with the heirs.
        """
        move = self.moves.pop(generation)
        self._bar_heirs(move)
        heirs = self.heirs(generation, move)
        for heir in heirs:
            heir.runs += heir.inherited.pop(generation)
        on_their_own = [m.component for m in heirs if not m.inherited]
        return move, [c for c in on_their_own if self.is_current(c)]

    def heirs(self, generation: int, save: Move) -> list[Move]:
        """The copies in flight that have inherited from this one, and are still to be told."""
        under_way = (self.moves.get(heir) for heir in save.heirs)
        return [m for m in under_way if m is not None and generation in m.inherited]

    def _hand_back(self, load: Move) -> None:
        """A load came to nothing: what it inherited is to be saved first, as if it had not.

        The save may be failing too. So nobody inherits from it again; else one after the
        other would, and fail with it.
        """
        for generation, runs in load.inherited.items():
            save = self.moves[generation]
            self._bar_heirs(save)
            save.runs += runs
            if self.is_current(save.component):
                self.leaving += count(runs)
        load.inherited.clear()

    def _bar_heirs(self, save: Move) -> None:
        if save.heritable:
            save.heritable = False
            del self.saves[save.component.generation]
            self.inheritable -= count(save.runs)

    def want(self, name: str) -> None:
        """Somebody waits for `name`: tell the holders that were not told."""
        told = self.wanted.setdefault(name, set())
        self.joined.pop(name, None)
        for session in sorted(self.components[name].holders.keys() - told):
            self.out.append(Want(session, name, True))
            self.sessions[session].told.add(name)
            told.add(session)

    def unwant(self, name: str) -> None:
        """Nobody waits for `name` any more: tell the holders that were told."""
        self.joined.pop(name, None)
        for session in sorted(self.wanted.pop(name, ())):
            self.out.append(Want(session, name, False))
            self.sessions[session].told.discard(name)

    def hurry(self) -> None:
        """Somebody waits for what may be held: tell all that hold something, once."""
        for number in self.unhurried:
            self.hurried.add(number)
            self.out.append(Hurry(number, True))
        self.unhurried.clear()

    def take_time(self) -> None:
        """Nobody waits for that any more: tell those that were told."""
        for number in sorted(self.hurried):
            self.out.append(Hurry(number, False))
            if self.sessions[number].leases:
                self.unhurried[number] = None
        self.hurried.clear()

    # --- workspaces ----------------------------------------------------------------------

    def open_workspace(self, key: Key, nbytes: int, chunks: int) -> str:
        """Somebody waits for a workspace: return its name."""
        session, name = key[0], workspace_name(*key)
        c = Component(0, name, session, nbytes, chunks, "sequential", None, False, workspace=True)
        c.state = State.ABSENT
        self.components[name] = c
        self.sessions[session].owns[name] = None
        return name

    def close_workspace(self, c: Component) -> None:
        """Nobody needs it any more: nothing is left of it, or it goes back first."""
        if c.state is State.ABSENT:
            self.remove(c)
        elif c.state in (State.LOADING, State.RESIDENT):
            is_lent = c.state is State.RESIDENT
            c.state = State.RECLAIMING
            self.leaving += c.chunks
            self.reclaiming += c.chunks
            self.unwant(c.name)
            self.replan = True
            if is_lent:
                self.reclaim(c)

    def reclaim(self, c: Component) -> None:
        """Have its memory back. Not while it is being lent."""
        self.moves[c.generation] = Move(c, c.uid, c.runs)
        self.out.append(Reclaim(c.name, c.generation, c.runs))

    def came_back(self, c: Component) -> None:
        """The chunks of a workspace are the arena's: taken back, or never given away."""
        self.pool.give(c.runs)
        if c.state is State.RECLAIMING:
            self.leaving -= c.chunks
            self.reclaiming -= c.chunks
        c.state = State.ABSENT
        self.replan = True
        if self.is_current(c) and not c.promised:
            self.remove(c)


def _leave(known: dict[str, dict[str, Component]], name: str | None, c: Component) -> None:
    """`c` is no longer one of those that are known by `name`, if it was."""
    if name and (members := known.get(name)):
        members.pop(c.name, None)
        if not members:
            del known[name]
