"""The state of the device, its components and its waiters, with sums and orders of it.

Decides nothing, and asks the device nothing. The other modules have the steps in which the state
changes, each with the actions that it orders.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable

from swapd.core.actions import Accept, AnyAction, MakeHostCopy, Refuse, SendHurry, SendWanted
from swapd.core.chunks import ChunkPool
from swapd.core.contents import Contents
from swapd.core.foresight import Foresight
from swapd.core.lru import Holders, IdleOrder
from swapd.core.queue import Deadlines, WaitQueue
from swapd.core.records import (
    Component,
    Follower,
    Key,
    Lane,
    Lease,
    Rules,
    Session,
    State,
    Transfer,
)
from swapd.core.requests import names_of
from swapd.shared.protocol import (
    WASTED_LAST,
    WASTED_S,
    AnyOrder,
    Code,
    Counts,
    Histogram,
    Runs,
    Tally,
)

#: Number of names with counts of their own: the components and families beyond them share one.
NAMES_MAX = 500
#: The name for the counts of all others, and of all that are gone. No component has it.
OTHERS = ""
#: Upper bound of counted uses, which clients report: as many again still fit into 64 bits.
HITS_MAX = (1 << 63) - 1

#: Upper bounds of the classes for waits and copies, and for leases, which last longer.
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LONG_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)


class HostCopyIndex:
    """The host copies of components, by uid."""

    def __init__(self) -> None:
        #: The component of each host copy; kept until DropHostCopy is ordered.
        self.owners: dict[int, Component] = {}
        #: Those that are being made or sealed, each with the order.
        self.making: dict[int, AnyAction] = {}
        #: Host copies with equal bytes; and the orders of those that wait for another one's bytes.
        self.contents = Contents()
        self.unordered: dict[int, MakeHostCopy] = {}
        #: Those that no component uses, kept for the next with their content, the least recently
        #: used first; and the sum of their bytes.
        self.kept: dict[int, None] = {}
        self.kept_bytes = 0


class Notices:
    """Messages to holders: components that are wanted, and that acquires wait for leases."""

    def __init__(self) -> None:
        #: Components kept for waiters, each with the holders that were told so.
        self.wanted: dict[str, set[int]] = {}
        #: Wanted components that were leased after their holders were told.
        self.joined: dict[str, None] = {}
        #: Sessions that were told that an acquire waits for leases; and sessions with leases that
        #: were not told.
        self.hurried: set[int] = set()
        self.unhurried: dict[int, None] = {}


class Ledger:
    """The state of one device of `chunks` chunks."""

    def __init__(self, chunks: int, chunk_bytes: int, rules: Rules) -> None:
        self.rules = rules
        self.chunk_bytes = chunk_bytes
        #: The daemon is stopping: no request is granted any more.
        self.stopping = False
        #: Why the device is down; "" if it works. While it is down, nothing is loaded, nor evicted
        #: to make room, since it could not come back.
        self.down = ""

        # Components, by name: a name is free again as soon as its component is gone.
        self.components: dict[str, Component] = {}
        #: Names of families and of components that are not workspaces, sorted.
        self.names: list[str] = []
        #: The parts of each family, in order of registration. No component has the name of a
        #: family.
        self.families: dict[str, dict[str, Component]] = {}
        #: Families that keep as much as fits beside components that never leave.
        self.automatic: dict[str, None] = {}
        #: Members of alternating groups that are on the device, by group.
        self.groups_in: dict[str, dict[str, Component]] = {}
        #: Components on the device that were updated meanwhile.
        self.superseded: dict[str, Component] = {}
        self.host = HostCopyIndex()
        self._uid = self._generation = 0

        # Chunks.
        self.pool = ChunkPool(chunks)
        #: Chunks that will soon be free: of components being evicted, of workspaces given back and
        #: of processes that are about to end. And those of workspaces among them.
        self.leaving = 0
        self.reclaiming = 0
        #: Chunks that a process which may still be alive can write to, by session; and those of
        #: these sessions whose process is about to end.
        self.quarantined: dict[int, list[Runs]] = {}
        self.dying: set[int] = set()
        #: Chunks that will not come free: of quarantines, except those in `dying`, and of
        #: `permanent` components that are in.
        self.fixed = 0
        #: Chunks of all components that will not leave once they are in.
        self.staying = 0

        # Copies, loans and reclaims in flight, by generation.
        self.moves: dict[int, Transfer] = {}
        #: Copies to the device, and from it.
        self.lane_in = Lane()
        self.lane_out = Lane()
        #: Names to load when no acquire waits for memory, each with the names that may go for it;
        #: None: all. And the generation of the last load for a prefetch that names what may go.
        self.prefetches: dict[str, tuple[str, ...] | None] = {}
        self.ahead = 0
        #: When nobody expects a prefetched component any more.
        self.expiries: Deadlines[str] = Deadlines()

        #: What follows each; and what is predicted because something was used that it follows.
        self.followers: dict[str, dict[str, Follower]] = {}
        self.predicted: dict[str, Follower] = {}

        # Sessions, their leases and waiters.
        self.sessions: dict[int, Session] = {}
        self.leases: dict[Key, Lease] = {}
        self.queue = WaitQueue(rules.patience_s)
        self.arrivals = 0
        #: Candidates for eviction: not leased, not promised, not `permanent`, and resident, or
        #: loading with nobody that waits for the load (`Component.stoppable`).
        self.idle = IdleOrder()
        self.foresight = Foresight()
        self.holders = Holders(self.idle)
        #: No idle component is within its minimum residency after this time.
        self.busy_until = 0.0
        #: What must go for those that wait, and components that were updated: these take new
        #: holders by `sharing.may_join`. And those in or coming that queued waiters may perhaps
        #: share after the next decision.
        self.in_the_way: set[str] = set()
        #: Once the head was overtaken by as many as may: of so many chunks, components could go
        #: instead of one that is in the way, and take new holders as those do. Else None.
        self.closed_from: int | None = None
        self.held_back: dict[str, None] = {}
        self.notices = Notices()
        #: Missing acknowledgements by generation, in order of time, each with the time of the
        #: request.
        self.acks: dict[int, tuple[float, Component]] = {}
        #: Other debts of sessions: when each is due; since when it is owed, and the message if it
        #: is late.
        self.debts: Deadlines[tuple[int, int]] = Deadlines()
        self.debt_causes: dict[tuple[int, int], tuple[float, str]] = {}
        #: Sessions that start, in order of arrival, with its time: the first has the turn. And the
        #: deadlines of the others.
        self.starts: dict[Key, float] = {}
        self.start_deadlines: Deadlines[Key] = Deadlines()

        # Totals since the start, for status.
        self.loads = self.evictions = self.hits = 0
        self.peak_chunks = 0
        self.counts = _new_counts()
        #: The last wasted loads: when each ended, its component or family, and until then the hits
        #: and the seconds of loads.
        self.wasted: deque[tuple[float, str, int, float]] = deque(maxlen=WASTED_LAST)

        # The current event: its time, its request if it has one, and its actions so far.
        self.now = 0.0
        self.request: AnyOrder | None = None
        self.out: list[AnyAction] = []
        #: There is something to decide anew; waiters may no longer fit beside the components that
        #: never leave; the room beside these has changed.
        self.replan = False
        self.room_shrank = False
        self.room_differs = False

    # --- replies -------------------------------------------------------------------------

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

    # --- counts: O(1) for each event -----------------------------------------------------

    def tally(self, name: str) -> Tally:
        """The counts to which those of a component or family belong, whether it is there or not."""
        c = self.components.get(name)
        if c is not None:
            return c.tally
        return self.counts.of.get(name) or self.counts.of[OTHERS]

    def know(self, name: str) -> Tally:
        """The tally of a component or family from now on: one of its own if there is room."""
        if len(self.counts.of) <= NAMES_MAX:
            return self.counts.of.setdefault(name, _tally())
        return self.counts.of.get(name) or self.counts.of[OTHERS]

    def forget(self, name: str) -> None:
        """The component or family is gone: its name is free, and its counts are those of the
        others. So sums over all names never fall."""
        del self.names[bisect_left(self.names, name)]
        self.foresight.forget(name)
        if any(of == name for _, of, *_ in self.wasted):
            self.wasted = deque((w for w in self.wasted if w[1] != name), WASTED_LAST)
        tally, others = self.counts.of.pop(name, None), self.counts.of[OTHERS]
        if tally is None:
            return
        others.loads += tally.loads
        others.wasted += tally.wasted
        others.evictions += tally.evictions
        others.hits = min(others.hits + tally.hits, HITS_MAX)
        others.skips += tally.skips
        for code, count in tally.refusals.items():
            others.refusals[code] = others.refusals.get(code, 0) + count
        for place, count in enumerate(tally.waits):
            others.waits[place] += count

    def count_wait(self, names: Iterable[str], waited_s: float) -> None:
        """An acquire of these was granted."""
        place = observe(self.counts.wait_s, waited_s)
        for name in names:
            self.tally(name).waits[place] += 1

    def count_hits(self, c: Component, uses: int) -> None:
        c.hits = min(c.hits + uses, HITS_MAX)
        c.tally.hits = min(c.tally.hits + uses, HITS_MAX)
        self.hits = min(self.hits + uses, HITS_MAX)

    def count_load(self, c: Component) -> None:
        c.loads += 1
        c.tally.loads += 1
        self.loads += 1
        if c.made_way_at is None or c.load_started - c.made_way_at > WASTED_S:
            return
        c.wasted += 1
        c.tally.wasted += 1
        if not (c.part_of and self.wasted and self.wasted[-1][1] == c.part_of):
            self.wasted.append((self.now, c.side, self.hits, self.lane_in.busy_s))

    # --- what is there -------------------------------------------------------------------

    @property
    def somebody_waits(self) -> bool:
        """Whether a waiter or a prefetch waits for memory."""
        return bool(self.queue.queued or self.prefetches)

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
        if not self.groups_in:
            return []
        rivals: dict[str, Component] = {}  # parts of one family have the same rivals
        for c in asked:
            if c.group is not None:
                mates = self.groups_in.get(c.group, {}).values()
                rivals.update((m.name, m) for m in mates if c.excludes(m))
        return list(rivals.values())

    def never_leaving(self, but: Collection[Component] = ()) -> int:
        """Chunks of all components that will not leave once they are in."""
        return self.staying - sum(c.chunks for c in but if c.policy == "permanent")

    def fixed_chunks(self, but: Iterable[Component]) -> int:
        """Chunks that will not come free: of `permanent` components that are in, and of
        quarantines."""
        return self.fixed - sum(c.fixed for c in but)

    def recount(self, c: Component) -> None:
        """Update sums and groups after `c` came to the device, left it, or changed its policy."""
        there = c.on_device and self.is_current(c)
        fixed = c.chunks if there and c.policy == "permanent" and not c.unregistering else 0
        self.fixed += fixed - c.fixed
        c.fixed = fixed
        if c.group is not None and there:
            self.groups_in.setdefault(c.group, {})[c.name] = c
        elif c.group is not None:
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

    # --- notices to holders: each hears one once, and again when it is over -------------------

    def want(self, name: str) -> None:
        """An acquire waits for `name`: tell the holders that were not told."""
        told = self.notices.wanted.setdefault(name, set())
        self.notices.joined.pop(name, None)
        for session in sorted(self.components[name].holders.keys() - told):
            self.out.append(SendWanted(session, name, True))
            self.sessions[session].told.add(name)
            told.add(session)

    def unwant(self, name: str) -> None:
        """No acquire waits for `name` any more: tell the holders that were told."""
        self.notices.joined.pop(name, None)
        for session in sorted(self.notices.wanted.pop(name, ())):
            self.out.append(SendWanted(session, name, False))
            self.sessions[session].told.discard(name)

    def hurry(self) -> None:
        """An acquire waits for leases to end: tell all sessions with leases, once."""
        for number in self.notices.unhurried:
            self.notices.hurried.add(number)
            self.out.append(SendHurry(number, True))
        self.notices.unhurried.clear()

    def take_time(self) -> None:
        """No acquire waits for leases any more: tell the sessions that were told."""
        for number in sorted(self.notices.hurried):
            self.out.append(SendHurry(number, False))
            if self.sessions[number].leases:
                self.notices.unhurried[number] = None
        self.notices.hurried.clear()


def drop_member(known: dict[str, dict[str, Component]], name: str | None, c: Component) -> None:
    if name and (members := known.get(name)):
        members.pop(c.name, None)
        if not members:
            del known[name]


def observe(histogram: Histogram, seconds: float) -> int:
    """Count it; return in which class."""
    place = bisect_left(histogram.bounds, seconds)
    histogram.counts[place] += 1
    histogram.sum += seconds
    return place


def _new_counts() -> Counts:
    return Counts(
        of={OTHERS: _tally()},
        wait_s=_histogram(SHORT_S),
        copy_in_s=_histogram(SHORT_S),
        copy_out_s=_histogram(SHORT_S),
        hold_s=_histogram(LONG_S),
    )


def _tally() -> Tally:
    return Tally(waits=[0] * (len(SHORT_S) + 1))


def _histogram(bounds: tuple[float, ...]) -> Histogram:
    return Histogram(bounds, [0] * (len(bounds) + 1))
