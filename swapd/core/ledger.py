"""The state of the device and its components, with sums and orders of it. Decides nothing.

Lives here: every fact about components, leases, copies in flight and chunks. These modules have the
steps in which the state changes, each with the actions that it orders:

- `registry`: registered, sealed, gone; host copies
- `coming`: loaded
- `leaving`: evicted, saved
- `leases`: granted, released
- `updates`: a second host copy replaces the first
- `workspaces`: lent, reclaimed
- `telling`: messages to holders
- `gone`: cleaning up after a session

May not live here, nor there: queueing and admission (`admission.py`), choosing victims
(`planner.py`), messages for people (`explain.py`).

`ChunkPool` counts the free chunks here; nothing ever asks the device.
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
from swapd.core.counts import OTHERS, new_counts
from swapd.core.fences import Debts
from swapd.core.holdings import Holders
from swapd.core.orders import EvictionOrder
from swapd.core.policy import Rules
from swapd.core.records import Component, Key, Lane, Lease, Move, Session
from swapd.core.requests import names_of
from swapd.core.starts import Starts
from swapd.core.states import State
from swapd.shared.protocol import AnyOrder, Code, Runs, Tally


class Ledger:
    """The state of one device of `chunks` chunks."""

    def __init__(self, chunks: int, chunk_bytes: int, rules: Rules) -> None:
        self.rules = rules
        self.chunk_bytes = chunk_bytes
        self.pool = ChunkPool(chunks)
        self.sessions: dict[int, Session] = {}
        #: By name; the name is free again as soon as the component is gone.
        self.components: dict[str, Component] = {}
        #: Names of families and of components that are not workspaces, sorted.
        self.names: list[str] = []
        self.leases: dict[Key, Lease] = {}
        #: Candidates for eviction, in order: resident, not leased, not promised, not `permanent`.
        #: First components that were loaded ahead and leave after use anyway, then the least
        #: recently used.
        self.idle = EvictionOrder()
        #: The holders of each component.
        self.holders = Holders(self.idle)
        #: Copies in flight, loans and reclaims, by generation.
        self.moves: dict[int, Move] = {}
        #: Missing acknowledgements by generation, in order of time, each with the time of the
        #: request.
        self.acks: dict[int, tuple[float, Component]] = {}
        #: Other duties of sessions.
        self.debts = Debts()
        #: Sessions that start, and that wait to start.
        self.starts = Starts()
        #: Chunks that will soon be free: of components being evicted, of workspaces given back and
        #: of processes that are about to end.
        self.leaving = 0
        #: Chunks of workspaces that are given back.
        self.reclaiming = 0
        #: Chunks that a process which may still be alive can write to, by session.
        self.quarantined: dict[int, list[Runs]] = {}
        #: Those of these sessions whose process is about to end.
        self.dying: set[int] = set()
        #: Chunks that will not come free: of quarantines, except those in `dying`, and of
        #: `permanent` components that are in.
        self.fixed = 0
        #: Chunks of all components that will not leave once they are in.
        self.staying = 0
        #: Pinned components.
        self.pinned: dict[str, Component] = {}
        #: The component of each host copy, by uid; kept until DropHostCopy is ordered.
        self.masters: dict[int, Component] = {}
        #: Those of them that are being made or sealed.
        self.making: set[int] = set()
        #: Host copies with equal bytes; and the orders of those that wait for another one's bytes.
        self.contents = Contents()
        self.unordered: dict[int, MakeHostCopy] = {}
        #: The parts of each family, in order of registration. No component has the name of a
        #: family.
        self.families: dict[str, dict[str, Component]] = {}
        #: Families that keep as much as fits beside components that never leave.
        self.automatic: dict[str, None] = {}
        #: Components on the device that were updated meanwhile.
        self.superseded: dict[str, Component] = {}
        #: Alternating components by group.
        self.groups: dict[str, dict[str, Component]] = {}
        #: The same, of those that are on the device.
        self.groups_in: dict[str, dict[str, Component]] = {}
        #: Components kept for waiters, each with the holders that were told so.
        self.wanted: dict[str, set[int]] = {}
        #: Those of them that were leased after these messages.
        self.joined: dict[str, None] = {}
        #: Sessions that were told that an acquire waits for leases; and sessions with leases that
        #: were not told.
        self.hurried: set[int] = set()
        self.unhurried: dict[int, None] = {}
        #: Names to load when no acquire waits for memory, each with the names that may go for it;
        #: None: all.
        self.prefetches: dict[str, tuple[str, ...] | None] = {}
        #: Generation of the last load for a prefetch that names what may go.
        self.ahead = 0
        #: The daemon is stopping: no request is granted any more.
        self.stopping = False
        #: Why the device is down; "" if it works. While it is down, nothing is loaded, nor evicted
        #: to make room, since it could not come back.
        self.down = ""
        #: Copies to the device, and from it.
        self.lane_in = Lane()
        self.lane_out = Lane()
        #: Totals since the start, and the same by component, with durations: for status.
        self.loads = self.evictions = self.hits = 0
        self.counts = new_counts()
        self.peak_chunks = 0

        #: The time of the current event, and its request if it has one; its actions so far, and
        #: whether there is anything to decide anew.
        self.now = 0.0
        self.request: AnyOrder | None = None
        self.out: list[AnyAction] = []
        self.replan = False
        #: Waiters may no longer fit beside the components that never leave.
        self.room_shrank = False
        #: The room beside the components that never leave has changed.
        self.room_differs = False

        self._uid = self._generation = 0

    def accept(self, key: Key) -> None:
        self.out.append(Accept(*key))

    def refuse(
        self,
        key: Key,
        code: Code,
        message: str,
        *,
        tried: bool = False,
        names: tuple[str, ...] | None = None,
    ) -> None:
        """`names`: those of the refused request; None: it is the current event's."""
        if names is None:
            names = names_of(self.request)
        for name in names or (OTHERS,):
            tally = self.tally(name)
            if tried and code == "timeout":
                tally.skips += 1
            else:
                tally.refusals[code] = tally.refusals.get(code, 0) + 1
        self.out.append(Refuse(*key, code, message, tried))

    def tally(self, name: str) -> Tally:
        """The counts to which those of a component or family belong, whether it is there or not."""
        c = self.components.get(name)
        if c is not None:
            return c.tally
        return self.counts.of.get(name) or self.counts.of[OTHERS]

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
        """`names` without repeats, with the parts of a family instead of its name."""
        families = self.families
        if not families or families.keys().isdisjoint(names):
            return tuple(dict.fromkeys(names))
        return tuple(dict.fromkeys(part for n in names for part in families.get(n, (n,))))

    def rivals(self, asked: list[Component]) -> list[Component]:
        """The members of their alternating groups that are on the device and exclude one of
        `asked`."""
        rivals: dict[str, Component] = {}  # parts of one family have the same rivals
        for c in asked:
            if c.group is not None:
                mates = self.groups_in.get(c.group, {}).values()
                rivals.update((m.name, m) for m in mates if c.excludes(m))
        return list(rivals.values())

    def never_leaving(self, but: Collection[Component] = (), *, pins: bool = True) -> int:
        """Chunks of all components that will not leave once they are in; with `pins`, also of those
        that stay only because they are pinned."""
        staying = self.staying - sum(c.chunks for c in but if c.policy == "permanent")
        if pins:
            return staying
        return staying - sum(
            c.chunks for c in self.pinned.values() if c.only_pinned and c not in but
        )

    def fixed_chunks(self, but: Iterable[Component]) -> int:
        """Chunks that will not come free: of `permanent` components that are in, and of
        quarantines."""
        return self.fixed - sum(c.fixed for c in but)

    def recount(self, c: Component) -> None:
        """Update sums and groups after `c` came to the device, left it, or changed its policy."""
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
    """Remove `c` from the members of `name`, if it is one."""
    if name and (members := known.get(name)):
        members.pop(c.name, None)
        if not members:
            del known[name]
