"""The state of the device, its components and its waiters. The ledger decides nothing."""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

from swapd.core.actions import Accept, AnyAction, MakeHostCopy, Refuse, SendHurry, SendWanted
from swapd.core.chunks import ChunkPool
from swapd.core.contents import Contents
from swapd.core.foresight import Foresight
from swapd.core.lru import Holders, IdleOrder
from swapd.core.queue import Deadlines, WaitQueue
from swapd.core.records import Component, Follower, Key, Lane, Lease, Rules, Session, Transfer
from swapd.core.requests import names_of
from swapd.core.states import State
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

#: Most names with counts of their own. The others share one tally.
NAMES_MAX = 500
#: Name of the shared tally, which no component has.
OTHERS = ""
#: Upper bound of counted uses, which clients report: twice as many fit into 64 bits.
HITS_MAX = (1 << 63) - 1

#: Class bounds of histograms: for waits and copies, and for leases, which last longer.
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LONG_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)


class HostCopyIndex:
    def __init__(self) -> None:
        #: The component of each host copy, until DropHostCopy is ordered.
        self.owners: dict[int, Component] = {}
        #: Host copies being made or sealed, with their orders.
        self.making: dict[int, AnyAction] = {}
        #: `unordered`: orders that wait for the bytes of another host copy.
        self.contents = Contents()
        self.unordered: dict[int, MakeHostCopy] = {}
        #: Host copies without a component, the least recently used first.
        self.kept: dict[int, None] = {}
        self.kept_bytes = 0


class Notices:
    """What holders were told."""

    def __init__(self) -> None:
        #: Wanted components, each with the sessions that were told so.
        self.wanted: dict[str, set[int]] = {}
        #: Wanted components that were leased after their holders were told.
        self.joined: dict[str, None] = {}
        #: Sessions that were told that an acquire waits. `unhurried`: other sessions with leases.
        self.hurried: set[int] = set()
        self.unhurried: dict[int, None] = {}


class Ledger:
    def __init__(self, chunks: int, chunk_bytes: int, rules: Rules) -> None:
        self.rules = rules
        self.chunk_bytes = chunk_bytes
        self.stopping = False
        #: Why the device is down, or "". Nothing is loaded then, nor evicted to make room, as it
        #: could not come back.
        self.down = ""

        self.components: dict[str, Component] = {}
        #: Sorted names of families and components, without workspaces.
        self.names: list[str] = []
        #: Parts of each family, by registration.
        self.families: dict[str, dict[str, Component]] = {}
        #: Families that keep as much as fits beside components that never leave.
        self.automatic: dict[str, None] = {}
        #: Members on the device, by alternating group.
        self.groups_in: dict[str, dict[str, Component]] = {}
        #: Components on the device that were updated meanwhile.
        self.superseded: dict[str, Component] = {}
        self.host = HostCopyIndex()
        self._uid = self._generation = 0

        self.pool = ChunkPool(chunks)
        #: Components on the device, by the host copy that was filled with their bytes.
        self.alike: dict[int, dict[str, Component]] = {}
        #: Chunks that will soon be free: of evictions, reclaims and processes about to end.
        #: `reclaiming`: those of reclaims.
        self.leaving = 0
        self.reclaiming = 0
        #: Chunks that processes of ended sessions may write to, by session. `dying`: the sessions
        #: whose process is about to end.
        self.quarantined: dict[int, list[Runs]] = {}
        self.dying: set[int] = set()
        #: Chunks that stay taken: of `permanent` components on the device, and in quarantine but
        #: for `dying` sessions.
        self.fixed = 0
        #: Chunks of all `permanent` components, on the device or not.
        self.staying = 0

        # Copies, loans and reclaims in flight, by generation.
        self.moves: dict[int, Transfer] = {}
        self.lane_in = Lane()
        self.lane_out = Lane()
        #: Prefetches that wait for memory, with what may be evicted for each (None: all). `ahead`:
        #: generation of the last load for which that was given.
        self.prefetches: dict[str, tuple[str, ...] | None] = {}
        self.ahead = 0
        self.expiries: Deadlines[str] = Deadlines()

        #: Followers, by the name that they follow. `predicted`: those that are expected now.
        self.followers: dict[str, dict[str, Follower]] = {}
        self.predicted: dict[str, Follower] = {}

        self.sessions: dict[int, Session] = {}
        self.leases: dict[Key, Lease] = {}
        self.queue = WaitQueue(rules.patience_s)
        self.arrivals = 0
        #: Candidates for eviction: resident or stoppable, and not leased, promised or `permanent`.
        self.idle = IdleOrder()
        self.foresight = Foresight()
        self.holders = Holders(self.idle)
        #: After this time, no idle component is within its minimum residency.
        self.busy_until = 0.0
        #: Updated components, and those that must leave for the head of the queue. New holders take
        #: them only if `sharing.may_join` allows.
        self.in_the_way: set[str] = set()
        #: Set once nobody may overtake the head: components of at least so many chunks are closed
        #: too, as they could leave instead.
        self.closed_from: int | None = None
        #: Components that a queued waiter may perhaps share after the next decision.
        self.held_back: dict[str, None] = {}
        self.notices = Notices()
        #: Missing acknowledgements by generation, oldest first, with the time of the revoke.
        self.acks: dict[int, tuple[float, Component]] = {}
        #: Other debts of sessions. `debt_causes`: since when each is owed, and what a fence for it
        #: says.
        self.debts: Deadlines[tuple[int, int]] = Deadlines()
        self.debt_causes: dict[tuple[int, int], tuple[float, str]] = {}
        #: Requests for the turn to start, with the times of their arrival. The first has the turn.
        self.starts: dict[Key, float] = {}
        self.start_deadlines: Deadlines[Key] = Deadlines()

        self.loads = self.evictions = self.hits = 0
        self.peak_chunks = 0
        self.counts = _new_counts()
        #: The last wasted loads: time, component or family, total hits, total seconds of loads.
        self.wasted: deque[tuple[float, str, int, float]] = deque(maxlen=WASTED_LAST)

        self.now = 0.0
        self.request: AnyOrder | None = None
        self.out: list[AnyAction] = []
        #: `replan`: decide again. `room_differs`: the room beside components that never leave has
        #: changed. `room_shrank`: waiters may no longer fit into it.
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
        """Count the refusal, too. `names`: None for those of the current event."""
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
        """The name need not be registered."""
        c = self.components.get(name)
        if c is not None:
            return c.tally
        return self.counts.of.get(name) or self.counts.of[OTHERS]

    def know(self, name: str) -> Tally:
        """Give a new name its own tally, if there is room."""
        if len(self.counts.of) <= NAMES_MAX:
            return self.counts.of.setdefault(name, _tally())
        return self.counts.of.get(name) or self.counts.of[OTHERS]

    def forget(self, name: str) -> None:
        """Add the counts of the name to the shared tally, so that no sum ever falls."""
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

    def count_eviction(self, c: Component) -> None:
        c.evictions += 1
        c.tally.evictions += 1
        self.evictions += 1

    # --- what is there -------------------------------------------------------------------

    @property
    def somebody_waits(self) -> bool:
        return bool(self.queue.queued or self.prefetches)

    @property
    def room(self) -> int:
        """The chunks that all components that may leave have together."""
        return self.pool.total - self.fixed

    def chunks_for(self, nbytes: int) -> int:
        return -(-nbytes // self.chunk_bytes)

    def is_current(self, c: Component) -> bool:
        return self.components.get(c.name) is c

    def named(self, names: Iterable[str]) -> list[Component]:
        return [self.components[name] for name in names]

    def may_be_acquired(self, name: str) -> bool:
        """The name must be registered and committed, and not be going away."""
        c = self.components.get(name)
        if c is None or c.workspace:
            return False
        return c.state is not State.FILLING and not c.unregistering and not c.ending

    def expand(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return `names` without repeats, with parts in place of each family."""
        families = self.families
        if not families or families.keys().isdisjoint(names):
            return tuple(dict.fromkeys(names))
        return tuple(dict.fromkeys(part for n in names for part in families.get(n, (n,))))

    def rivals(self, asked: list[Component]) -> list[Component]:
        """Return the components on the device that must leave for `asked`, by their group."""
        if not self.groups_in:
            return []
        rivals: dict[str, Component] = {}  # parts of one family have the same rivals
        for c in asked:
            if c.group is not None:
                mates = self.groups_in.get(c.group, {}).values()
                rivals.update((m.name, m) for m in mates if c.excludes(m))
        return list(rivals.values())

    def never_leaving(self, but: Collection[Component] = ()) -> int:
        return self.staying - sum(c.chunks for c in but if c.policy == "permanent")

    def fixed_chunks(self, but: Iterable[Component]) -> int:
        return self.fixed - sum(c.fixed for c in but)

    def recount(self, c: Component) -> None:
        """Update sums and groups after `c` came in, left, or changed its policy."""
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
        """Tell holders, once each, that an acquire waits for `name`."""
        told = self.notices.wanted.setdefault(name, set())
        self.notices.joined.pop(name, None)
        for session in sorted(self.components[name].holders.keys() - told):
            self.out.append(SendWanted(session, name, True))
            self.sessions[session].told.add(name)
            told.add(session)

    def unwant(self, name: str) -> None:
        self.notices.joined.pop(name, None)
        for session in sorted(self.notices.wanted.pop(name, ())):
            self.out.append(SendWanted(session, name, False))
            self.sessions[session].told.discard(name)

    def hurry(self) -> None:
        """Tell all sessions with leases, once, that an acquire waits."""
        for number in self.notices.unhurried:
            self.notices.hurried.add(number)
            self.out.append(SendHurry(number, True))
        self.notices.unhurried.clear()

    def take_time(self) -> None:
        """Tell the same sessions that no acquire waits any more."""
        for number in sorted(self.notices.hurried):
            self.out.append(SendHurry(number, False))
            if self.sessions[number].leases:
                self.notices.unhurried[number] = None
        self.notices.hurried.clear()


def drop_member(known: dict[Any, dict[str, Component]], name: Any, c: Component) -> None:
    if name and (members := known.get(name)):
        members.pop(c.name, None)
        if not members:
            del known[name]


def observe(histogram: Histogram, seconds: float) -> int:
    """Return the index of the value's class."""
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
