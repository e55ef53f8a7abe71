"""The data records of the core."""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from swapd.core.actions import Reason, Urgency
from swapd.core.states import COMPONENT_CHANGES, LEAVING, WORKSPACE_CHANGES, State
from swapd.shared.protocol import NUMBER_MAX, Policy, Ranges, Release, Runs, Scratch, Tally

#: (session, request): names a waiter, and later its lease.
Key = tuple[int, int]

#: (session, agent). An agent is a thread or task.
Agent = tuple[int, int]

#: Agent number of leases that no thread uses. This agent never waits.
NOBODY = -NUMBER_MAX - 1

#: Session number of the followers that the rules name.
OPERATOR = 0

#: Prefix of the names of workspaces. No component may have it.
WORKSPACE = "workspace "
#: Workspace of the chunks that workers of the daemon before still use.
MISSING = f"{WORKSPACE}of workers of the daemon before"


def workspace_name(session: int, request: int) -> str:
    return f"{WORKSPACE}{session}.{request}"


def is_workspace(name: str) -> bool:
    return name.startswith(WORKSPACE)


class Rules(msgspec.Struct, frozen=True):
    """Times are in seconds. Users may set all rules but `unread_timeout_s`."""

    strict: bool = False  # wait for the worker's acknowledgement before chunks are reused
    ack_timeout_s: float = 60.0
    residency_factor: float = 8.0  # minimum residency, in multiples of the swap-in time
    residency_bound_s: float = 2.0  # its upper bound, so that no waiter starves
    patience_s: float = 30.0  # a waiter that waited longer goes first, at any priority
    overtake: int = 16  # most waiters that may go before the head of the queue
    overtake_of: tuple[tuple[str, int], ...] = ()  # the same, by component, family or group
    turn_s: float = 600.0  # and for how long; also bounds the minimum residency
    eviction: Literal["next_use", "lru"] = "next_use"  # which idle component goes first
    order: tuple[tuple[str, ...], ...] = ()  # what follows what, whatever sessions say
    unread_timeout_s: float = 60.0  # longest time in which a session reads none of its messages
    keep_host: int = 0  # most bytes of host copies that are kept without a component


@dataclass(slots=True, eq=False)
class Renewal:
    """A new host copy of a component, beside the current one. Its worker fills it while the
    component has no request to answer."""

    of: "Component"
    uid: int
    #: The Update that began it.
    begun_by: int
    #: While it is sealed: all of the same Commit. They take effect together.
    together: "tuple[Renewal, ...]" = ()
    sealed: bool = False


@dataclass(slots=True, eq=False)
class Component:
    """A unit that swapd loads and evicts; or a workspace, which has no host copy."""

    uid: int  # of its current host copy; never reused, unlike the name; 0 for a workspace
    name: str
    session: int
    nbytes: int
    chunks: int
    policy: Policy
    group: str | None
    mutable: bool
    workspace: bool = False
    part_of: str = ""
    #: As registered, or "permanent" while pinned. A part that its family does not keep is
    #: `sequential` instead.
    own_policy: Policy = "lru"
    #: The `own_policy` from before its pin; None if it is not pinned.
    unpinned_policy: Policy | None = None
    scratch: Scratch = ""

    state: State = State.FILLING
    #: Number of its current or last residency; 0 before the first.
    generation: int = 0
    #: Its place among leased components that came to the device at the same time.
    leased_seq: int = 0
    #: Its chunks, while they will not come free for others; else 0.
    fixed: int = 0
    #: Kept after an eviction, to ask for the same chunks again.
    runs: Runs = ()
    #: Its load copied nothing: another component with the same bytes was on these chunks.
    joined: bool = False
    #: While it is on the device: the host copy that was filled with its bytes; 0 if no other
    #: component can have these. `frees`: while it leaves, the chunks that come free with it.
    origin: int = 0
    frees: int = 0
    #: Leases that hold it. `holders` and `agents`: their number by session, and by agent.
    leases: set[Key] = field(default_factory=set)
    holders: dict[int, int] = field(default_factory=dict)
    agents: dict[Agent, int] = field(default_factory=dict)
    #: Admitted waiters that still wait for other loads, by arrival.
    promised: dict[Key, None] = field(default_factory=dict)
    #: Queued waiters that name it, by arrival.
    waiting: dict[Key, None] = field(default_factory=dict)
    #: The owner knows the chunks of this generation.
    mapped: bool = False
    #: The owner may have written since the last write-back.
    dirty: bool = False
    #: Of scratch (None: all of it): `kept`, the ranges in the host copy; `to_save`, those to save.
    #: `used_number`: number of the last `UsedRanges`.
    kept: Ranges | None = None
    to_save: Ranges | None = None
    used_number: int = 0
    #: Of scratch: the generation that began the current contents as zeros.
    contents: int = 0
    #: The client's name for the bytes, and a hash of their layout in the host copy.
    content: str = ""
    layout: str = ""
    reason: Reason = "room"
    evicting_for: Key | None = None
    #: The request to answer after the current step.
    answer: int | None = None
    unregistering: bool = False
    renewal: Renewal | None = None
    #: The last Update that took effect.
    updated_by: int | None = None
    #: Its bytes on the device, or on their way there, are from a previous host copy.
    superseded: bool = False
    ending: bool = False
    #: Granted in this residency.
    used: bool = False
    #: Whether it was or is to be loaded ahead of its next acquire.
    expected: bool = False
    #: Whether it was idle when its family stopped keeping it.
    kept_no_more: bool = False
    #: Priority of its last lease, and a hash of the agent.
    priority: int = 0
    last_agent: int | None = None
    urgency: Urgency = (2,)

    #: Times are on the events' clock, in seconds.
    load_started: float = 0.0
    resident_since: float = 0.0
    idle_since: float = 0.0
    #: While it is in the way, other agents of its holders' sessions may not share it before this
    #: time. `closed_s`: length of that period.
    closed_until: float = 0.0
    closed_s: float = 0.0
    #: Last release; None once an acquire came after it.
    released_at: float | None = None
    last_used: float | None = None
    #: Time of the last load, including the wait for earlier loads.
    swap_in_s: float | None = None
    #: `copy_s`: the same without that wait. `gap_s`: from a release to the next acquire.
    copy_s: float | None = None
    gap_s: float | None = None
    #: Usual time of a use. Of overlapping leases, their common time divided by the number of uses:
    #: they may run one after the other.
    use_s: float = 0.0
    #: Start of the current or last overlapping leases, and the number of their uses.
    used_since: float = 0.0
    uses: int = 0
    #: Usual time of one use, whatever runs beside it. `kept_on`: its last lease had several uses.
    hold_s: float = 0.0
    kept_on: bool = False
    #: When it last left to make room; None if it last left for another reason.
    made_way_at: float | None = None
    loads: int = 0
    wasted: int = 0
    evictions: int = 0
    hits: int = 0
    #: Counts of its name, which outlive it.
    tally: Tally = field(default_factory=Tally)

    def __repr__(self) -> str:
        return f"<{self.name} {self.state} gen={self.generation} leases={len(self.leases)}>"

    def enter(self, state: State) -> None:
        changes = WORKSPACE_CHANGES if self.workspace else COMPONENT_CHANGES
        assert (self.state, state) in changes, f"{self} cannot become {state}"
        self.state = state

    def excludes(self, other: "Component") -> bool:
        """Return whether both may never be on the device together."""
        return self.group is not None and self.group == other.group and self.side != other.side

    @property
    def kind(self) -> Literal["component", "workspace", "scratch"]:
        return "workspace" if self.workspace else "scratch" if self.scratch else "component"

    @property
    def side(self) -> str:
        """Members of one group exclude each other unless they have the same side."""
        return self.part_of or self.name

    @property
    def pinned(self) -> bool:
        return self.unpinned_policy is not None

    @property
    def only_pinned(self) -> bool:
        """Whether it stays because of its pin alone."""
        return self.policy == "permanent" and self.unpinned_policy not in (None, "permanent")

    @property
    def stays(self) -> bool:
        """Whether it stays once it is in, even without a pin."""
        return self.policy == "permanent" and not self.only_pinned

    @property
    def on_device(self) -> bool:
        return self.state not in (State.FILLING, State.ABSENT)

    @property
    def bytes_in(self) -> int:
        return self.nbytes if self.kept is None else sum(n for _, n in self.kept)

    @property
    def bytes_back(self) -> int:
        """Bytes to save at an eviction."""
        if not self.dirty:
            return 0
        return self.nbytes if self.to_save is None else sum(n for _, n in self.to_save)

    @property
    def unsaved(self) -> bool:
        return self.dirty and self.to_save != ()

    @property
    def leaves_for_nothing(self) -> bool:
        """Whether it is scratch of which neither an eviction nor the next load copies bytes."""
        return bool(self.scratch) and (self.to_save if self.dirty else self.kept) == ()

    @property
    def evicting(self) -> bool:
        return self.state in LEAVING

    @property
    def stoppable(self) -> bool:
        """Whether its load may be ended early: nobody leases it, waits for it or has mapped it."""
        held = self.leases or self.promised or self.mapped
        return self.state is State.LOADING and not (held or self.workspace or self.joined)


@dataclass(slots=True, eq=False)
class Lane:
    """The copies of one direction, one after the other. `ended_at`: when the last one ended."""

    nbytes: int = 0
    ended_at: float = 0.0
    busy_s: float = 0.0
    bytes_per_s: float | None = None


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy, loan or reclaim in flight. Its component may be gone before it ends."""

    component: Component
    #: The host copy; 0 for a workspace.
    uid: int
    began: float
    #: None if nothing is copied.
    lane: Lane | None = None
    #: The component's session, if it is gone and its process can still write to the chunks.
    writer: int | None = None


@dataclass(slots=True, eq=False)
class Waiter:
    """An acquire that is not granted yet: parked, queued, or admitted and loading."""

    session: int
    request: int
    agent: int
    #: `names`: `asked`, with parts in place of each family.
    asked: tuple[str, ...]
    names: tuple[str, ...]
    priority: int
    deadline: float | None
    arrived: float
    seq: int
    await_registration: bool = False
    #: It does not wait for loads of its own session's components.
    early: bool = False
    #: Most waiters that may overtake it; None: as the rules say.
    overtake: int | None = None
    #: Rank by the wanted time, see `requests.due`.
    due: int = 0
    #: To avoid a deadlock, it takes the old bytes of updated components that its session holds.
    takes_old: bool = False
    #: Loads that it waits for, once admitted.
    pending: set[str] = field(default_factory=set)
    parked: bool = False
    queued: bool = False
    admitted: bool = False
    #: What it waits for; "" before its Waiting action.
    why: str = ""
    loaded: bool = False
    #: How many waiters overtook it as the head of the queue. `head_since`: when it became a head
    #: that must wait.
    overtaken: int = 0
    head_since: float | None = None
    #: Most waiters that may overtake it now; None before it must wait as the head.
    bound: int | None = None
    #: Leases to end if it needs memory. `spent`: they were ended.
    spare: tuple[Release, ...] = ()
    spent: bool = False

    key: Key = field(init=False)
    owner: Agent = field(init=False)
    order: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.session, self.request)
        self.owner = (self.session, self.agent)
        self.order = (-self.priority, self.due, self.seq)


@dataclass(slots=True, eq=False)
class Follower:
    """A component or family that a session says is used after another."""

    name: str
    after: str
    session: int
    #: Observed in calls, not declared.
    seen: bool = False
    #: From 1 down to 0; falls when it is loaded ahead in vain.
    trust: float = 1.0
    #: Time of its last prediction. `acted`: it was to be loaded for that, and is not asked for yet.
    #: `failed`: that was in vain.
    since: float = 0.0
    #: Start of the use that it follows, and of the use before that. A use begins with what the last
    #: one had already: a family may be used part by part.
    began: float = 0.0
    began_before: float = 0.0
    acted: bool = False
    failed: bool = False
    #: Uses of `after` since it was last asked for; and whether there were several before that.
    uses: int = 0
    looped: bool = False

    @property
    def ends_a_loop(self) -> bool:
        """Whether `after` is used several times before it, and nobody says which is the last."""
        return self.looped or self.uses > 1


@dataclass(slots=True, eq=False)
class Lease:
    session: int
    agent: int
    names: dict[str, None]
    since: float = 0.0

    @property
    def owner(self) -> Agent:
        return (self.session, self.agent)


@dataclass(slots=True, eq=False)
class Session:
    label: str
    owns: dict[str, None] = field(default_factory=dict)
    leases: set[int] = field(default_factory=set)
    waiters: set[int] = field(default_factory=set)
    #: Evictions for its waiters, by generation. `told`: names that it was told are wanted.
    makes_way: dict[int, Component] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    fenced: bool = False  # a Fence was ordered; SessionGone will follow
    #: Its own components in its largest lease, and their chunks.
    turn: dict[str, None] = field(default_factory=dict)
    turn_chunks: int = 0
