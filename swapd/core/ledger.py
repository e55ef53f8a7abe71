"""What is where, who holds it, and the sums and orders that are kept of it. Decides nothing.

Lives here: every fact about components, leases, copies in flight and chunks. The steps in which
that changes, each with the actions that it orders, are functions of the modules beside it:

    registry    registered, sealed, gone; masters          leases      granted, released
    coming      copied in                                   leaving     evicted, saved
    inheriting  chunks that are overwritten once saved      workspaces  lent, reclaimed
    updates     a second master in the place of the first   telling     what holders are told
    gone        what a session leaves behind

May not live here, nor there: who waits and who is let in (`admission.py`), what is evicted for whom
(`planner.py`), messages for people (`explain.py`).

Free chunks are those counted here (`ChunkPool`), never asked of the device.
"""

from collections.abc import Collection, Iterable

from swapd.core.actions import (
    Accept,
    AnyAction,
    MakeHostCopy,
    Refuse,
)
from swapd.core.chunks import ChunkPool
from swapd.core.contents import Contents
from swapd.core.fences import Debts
from swapd.core.holdings import Holders
from swapd.core.orders import EvictionOrder
from swapd.core.policy import Rules
from swapd.core.records import (
    Component,
    Key,
    Lease,
    Move,
    Session,
    State,
)
from swapd.core.starts import Starts
from swapd.shared.protocol import Code, Runs

#: So far uses are counted that clients tell of: as many again, one by one, fit into 64 bits.
HITS_MAX = (1 << 63) - 1


class Ledger:
    """All that is true of one device of `chunks` chunks."""

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
        #: Resident, leased by nobody, promised to nobody, not `permanent`: what may be evicted,
        #: in this order. First what was brought in ahead and leaves after its use in any case,
        #: then the least recently used.
        self.idle = EvictionOrder()
        #: Who holds what.
        self.holders = Holders(self.idle)
        #: Copies in flight, and what is being lent or reclaimed, by generation.
        self.moves: dict[int, Move] = {}
        #: Acknowledgements waited for, by generation, in order of time, with since when.
        self.acks: dict[int, tuple[float, Component]] = {}
        #: What else sessions are waited for.
        self.debts = Debts()
        #: Who starts, and who waits to.
        self.starts = Starts()
        #: Chunks of components being evicted, of workspaces given back and of processes that are
        #: about to have ended: soon to be free.
        self.leaving = 0
        #: Those of them that are being saved: a load may follow; and the copies that save them.
        self.inheritable = 0
        self.saves: dict[int, Move] = {}
        #: Chunks of workspaces that are given back.
        self.reclaiming = 0
        #: Chunks that a process which may still be alive can write to, by session.
        self.quarantined: dict[int, list[Runs]] = {}
        #: Of these sessions, those whose process is about to have ended.
        self.dying: set[int] = set()
        #: Chunks that will not come free: quarantine, but for theirs, and those of `permanent`
        #: components that are in.
        self.fixed = 0
        #: Chunks of all components that will not leave once they are in.
        self.staying = 0
        #: Components that somebody asked to stay.
        self.pinned: dict[str, Component] = {}
        #: Whose master it is, by uid; kept until DropHostCopy is ordered.
        self.masters: dict[int, Component] = {}
        #: Those of them that are being made or sealed.
        self.making: set[int] = set()
        #: Those that have their bytes in common; and the orders of those that wait for others'.
        self.contents = Contents()
        self.unordered: dict[int, MakeHostCopy] = {}
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
        #: Names to bring in when nobody waits for memory, and what may go for each; None: all.
        self.prefetches: dict[str, tuple[str, ...] | None] = {}
        #: The last that was brought in for a prefetch that said what may go; its generation.
        self.ahead = 0
        #: The daemon ends: nothing is granted any more.
        self.stopping = False
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

        self._uid = self._generation = 0

    def accept(self, key: Key) -> None:
        self.out.append(Accept(*key))

    def refuse(self, key: Key, code: Code, message: str, *, tried: bool = False) -> None:
        self.out.append(Refuse(*key, code, message, tried))

    # --- what is there -------------------------------------------------------------------

    def chunks_for(self, nbytes: int) -> int:
        return -(-nbytes // self.chunk_bytes)

    def is_current(self, c: Component) -> bool:
        return self.components.get(c.name) is c

    def named(self, names: Iterable[str]) -> list[Component]:
        return [self.components[name] for name in names]

    def may_be_acquired(self, name: str) -> bool:
        """Whether it is registered, committed, and not going away."""
        c = self.components.get(name)
        if c is None or c.workspace:
            return False
        return c.state is not State.FILLING and not c.unregistering and not c.ending

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

    def never_leaving(self, but: Collection[Component] = (), *, pins: bool = True) -> int:
        """Chunks of all components that will not leave once they are in; of those that are only
        pinned if `pins`."""
        staying = self.staying - sum(c.chunks for c in but if c.policy == "permanent")
        if pins:
            return staying
        return staying - sum(
            c.chunks for c in self.pinned.values() if c.only_pinned and c not in but
        )

    def fixed_chunks(self, but: Iterable[Component]) -> int:
        """Chunks that will not come free: `permanent` components that are in, quarantine."""
        return self.fixed - sum(c.fixed for c in but)

    def recount(self, c: Component) -> None:
        """It came to the device or left it, or its policy changed: keep sums and groups."""
        there = c.on_device and self.is_current(c)
        fixed = c.chunks if there and c.policy == "permanent" and not c.unregistering else 0
        if fixed != c.fixed:
            with self.holders.reclassified(c):
                self.fixed += fixed - c.fixed
                c.fixed = fixed
        if c.group is not None and there:
            self.groups_in.setdefault(c.group, {})[c.name] = c
        elif c.group is not None and c.name in self.groups_in.get(c.group, ()):
            drop_member(self.groups_in, c.group, c)

    def next_uid(self) -> int:
        self._uid += 1
        return self._uid

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def drop_superseded(self, c: Component) -> None:
        c.superseded = False
        self.superseded.pop(c.name, None)


def drop_member(known: dict[str, dict[str, Component]], name: str | None, c: Component) -> None:
    """`c` is no longer one of those that are known by `name`, if it was."""
    if name and (members := known.get(name)):
        members.pop(c.name, None)
        if not members:
            del known[name]
