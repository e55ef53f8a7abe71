"""Records of the core: components and their states, waiters, leases, sessions, rules. Data only."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import msgspec

from swapd.core.actions import Reason, Urgency
from swapd.shared.protocol import NUMBER_MAX, Policy, Ranges, Release, Runs, Scratch, Tally

#: (session, request): names a waiter, and after its grant the lease.
Key = tuple[int, int]

#: (session, agent): a thread or task of a session.
Agent = tuple[int, int]

#: The agent of leases that no thread uses. It never waits, and gives back all that is wanted.
NOBODY = -NUMBER_MAX - 1

#: Workspaces are named by their request; no component may be named like one.
WORKSPACE = "workspace "


def workspace_name(session: int, request: int) -> str:
    return f"{WORKSPACE}{session}.{request}"


def is_workspace(name: str) -> bool:
    """Whether this is the name of a workspace, which no component may have."""
    return name.startswith(WORKSPACE)


class Rules(msgspec.Struct, frozen=True):
    """Rules of all decisions: the user may set all but `unread_timeout_s`. Times in seconds."""

    strict: bool = False  # wait for the worker's acknowledgement before chunks are reused
    ack_timeout_s: float = 60.0
    residency_factor: float = 8.0  # minimum residency, in multiples of the swap-in time
    residency_bound_s: float = 2.0  # its upper bound, so that no waiter starves
    patience_s: float = 30.0  # a waiter that waited longer goes first, at any priority
    overtake: int = 16  # so many at most that need no memory go before the head of the queue
    turn_s: float = 600.0  # and for so long at most
    eviction: Literal["next_use", "lru"] = "next_use"  # which idle component goes first
    unread_timeout_s: float = 60.0  # longest time in which a session reads none of these messages
    keep_host: int = 0  # most bytes of host copies that no component uses


class State(StrEnum):
    FILLING = "filling"  # the worker fills the host copy; may not be acquired yet
    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    STOPPING = "stopping"  # its load is ended early
    REVOKING = "revoking"  # waits for the worker's acknowledgement
    WRITING_BACK = "writing back"
    RECLAIMING = "reclaiming"  # a workspace that no request needs any more


_LEAVING = (State.STOPPING, State.REVOKING, State.WRITING_BACK, State.RECLAIMING)

#: The causes of each change: events, and actions that the core orders then.
COMPONENT_CHANGES = {
    (State.FILLING, State.ABSENT): "`Commit`, `HostCopySealed`",
    (State.ABSENT, State.LOADING): "`CopyIn`",
    (State.LOADING, State.RESIDENT): "`CopiedIn`",
    (
        State.LOADING,
        State.REVOKING,
    ): "`CopyFailed`, and its worker has mapped the chunks: `SendRevoke`",
    (State.LOADING, State.ABSENT): "`CopyFailed`",
    (State.LOADING, State.STOPPING): "`Evict`, `StopCopy`",
    (State.STOPPING, State.ABSENT): "`CopyStopped`, or `CopiedIn`, `CopyFailed`",
    (State.RESIDENT, State.REVOKING): "`Evict`, and if its worker has mapped it `SendRevoke`",
    (State.REVOKING, State.ABSENT): "`RevokeAck`, and there is nothing to save",
    (State.REVOKING, State.WRITING_BACK): "`RevokeAck`, `CopyOut`",
    (State.WRITING_BACK, State.ABSENT): "`CopiedOut`; for scratch also `CopyFailed`, `Lost`",
    (State.WRITING_BACK, State.RESIDENT): "`CopyFailed`: it stays, with its worker's writes",
}

#: A workspace has no host copy and no place in a worker, and is there for one lease.
WORKSPACE_CHANGES = {
    (State.ABSENT, State.LOADING): "`Lend`",
    (State.LOADING, State.RESIDENT): "`Lent`",
    (State.LOADING, State.ABSENT): "`CopyFailed`",
    (State.LOADING, State.RECLAIMING): "its request ended; `Reclaim` follows `Lent`",
    (State.RESIDENT, State.RECLAIMING): "its release, `Reclaim`",
    (State.RECLAIMING, State.ABSENT): "`Reclaimed` without `runs`: it is gone",
}


@dataclass(slots=True, eq=False)
class Renewal:
    """A new host copy of a component, beside its current one."""

    uid: int
    #: The request that began it.
    begun_by: int
    #: The update or commit to answer when its current step ends; None while the worker fills it.
    request: int | None
    #: While it is being sealed: all components whose new host copies take effect together with it,
    #: itself included.
    together: "tuple[Component, ...]" = ()
    sealed: bool = False


@dataclass(slots=True, eq=False)
class Component:
    """A unit that swapd loads and evicts. A workspace is one without a host copy, for one lease
    only."""

    uid: int  # of its host copy: never reused, unlike the name; 0 for a workspace
    name: str
    session: int
    nbytes: int
    chunks: int
    policy: Policy
    group: str | None
    mutable: bool
    workspace: bool = False
    #: The family of this part, or "".
    part_of: str = ""
    #: The policy it was registered with. A part that its family does not keep is `sequential`
    #: instead.
    own_policy: Policy = "lru"
    #: The policy to go back to when it is unpinned; while it is pinned, its own is "permanent".
    unpinned_policy: Policy | None = None
    scratch: Scratch = ""

    state: State = State.FILLING
    #: Number of its current or last residency, from a counter of the core; 0 before the first.
    generation: int = 0
    #: Number of its latest first lease, from a counter: orders components that came in at the same
    #: time.
    leased_seq: int = 0
    #: Its chunks if it is on the device and they will not come free, else 0.
    fixed: int = 0
    #: Its chunks; kept after an eviction, to ask for the same ones again.
    runs: Runs = ()
    #: Leases that hold it; how many of them each session has, and how many each agent.
    leases: set[Key] = field(default_factory=set)
    holders: dict[int, int] = field(default_factory=dict)
    agents: dict[Agent, int] = field(default_factory=dict)
    #: Admitted waiters that still wait for other copies, by arrival. It stays for
    #: them.
    promised: dict[Key, None] = field(default_factory=dict)
    #: Queued waiters that name it, in order of arrival.
    waiting: dict[Key, None] = field(default_factory=dict)
    #: The owner knows the chunks of this generation, perhaps since before they were filled.
    mapped: bool = False
    #: The owner may have written since the last write-back (mutable only).
    dirty: bool = False
    #: The ranges that the host copy has, and the ranges to save; None: all. Only scratch may have
    #: less. And the number of the owner's last `Used`.
    kept: Ranges | None = None
    to_save: Ranges | None = None
    used_number: int = 0
    #: For scratch: the generation that came in as zeros and began its current contents.
    contents: int = 0
    #: What its worker called the bytes of its first host copy; "" if it gave no name.
    content: str = ""
    #: Hash of its places in that host copy.
    layout: str = ""
    #: Why it is being evicted, and for which waiter.
    reason: Reason = "room"
    evicting_for: Key | None = None
    #: The register, commit or unregister request to answer when its current step ends.
    answer: int | None = None
    unregistering: bool = False
    #: Its next host copy, until that is committed or given up.
    renewal: Renewal | None = None
    #: The request that began the last update that took effect.
    updated_by: int | None = None
    #: Its bytes on the device, or on their way there, are from a previous host copy.
    superseded: bool = False
    #: Its session is ending: it may not be acquired any more.
    ending: bool = False
    #: Granted at least once in this residency.
    used: bool = False
    #: A prefetch named it while it had no holder, and it was not granted since.
    expected: bool = False
    #: A part that was idle when its family was made smaller.
    kept_no_more: bool = False
    #: The priority of its last lease; and a hash of its agent, which says nothing of a session that
    #: is gone.
    priority: int = 0
    last_agent: int | None = None
    #: The rank of its current or last load.
    urgency: Urgency = (2,)

    #: Seconds on the events' clock; None before the first time.
    load_started: float = 0.0
    resident_since: float = 0.0
    idle_since: float = 0.0
    #: While it is wanted, only the agents that hold it may take it again until then; and the length
    #: of that period.
    closed_until: float = 0.0
    closed_s: float = 0.0
    #: Last release, until the next acquire; None before the first.
    released_at: float | None = None
    #: Last release, even if an acquire came since; None before the first.
    last_used: float | None = None
    #: Measured: the last load, order to completion; and the time from a release to the next
    #: acquire.
    swap_in_s: float | None = None
    #: The same without the time that it waited for earlier loads.
    copy_s: float | None = None
    gap_s: float | None = None
    #: The usual time of a use, seconds; 0 before the first. Of leases that overlap, it is the time
    #: in which all of them ended, divided by their number: they may run one after the other.
    use_s: float = 0.0
    #: When the current or last leases that overlap began, and the number of their uses.
    used_since: float = 0.0
    uses: int = 0
    #: The usual time of a use by itself, whatever runs beside it; 0 before the first. And whether
    #: its last lease was used again before it came back.
    hold_s: float = 0.0
    kept_on: bool = False
    #: When it left for others; None: it left for another reason, or never.
    made_way_at: float | None = None
    loads: int = 0
    wasted: int = 0
    evictions: int = 0
    hits: int = 0
    #: The counts of its name since the start, which outlive it.
    tally: Tally = field(default_factory=Tally)

    def __repr__(self) -> str:
        return f"<{self.name} {self.state} gen={self.generation} leases={len(self.leases)}>"

    def enter(self, state: State) -> None:
        """Change its state: each change is in one of the tables above."""
        changes = WORKSPACE_CHANGES if self.workspace else COMPONENT_CHANGES
        assert (self.state, state) in changes, f"{self} cannot become {state}"
        self.state = state

    def excludes(self, other: "Component") -> bool:
        """Whether the two are never on the device together: members of one alternating group, but
        not parts of the same family."""
        return self.group is not None and self.group == other.group and self.side != other.side

    @property
    def kind(self) -> Literal["component", "workspace", "scratch"]:
        return "workspace" if self.workspace else "scratch" if self.scratch else "component"

    @property
    def side(self) -> str:
        """The members of a group with the same side do not exclude each other."""
        return self.part_of or self.name

    @property
    def pinned(self) -> bool:
        return self.unpinned_policy is not None

    @property
    def only_pinned(self) -> bool:
        """Whether only its pin makes it stay."""
        return self.policy == "permanent" and self.unpinned_policy not in (None, "permanent")

    @property
    def stays(self) -> bool:
        """Whether it stays once it is in, without being pinned."""
        return self.policy == "permanent" and not self.only_pinned

    @property
    def on_device(self) -> bool:
        """Whether it occupies chunks."""
        return self.state not in (State.FILLING, State.ABSENT)

    @property
    def bytes_in(self) -> int:
        """Bytes to copy when it comes in."""
        return self.nbytes if self.kept is None else sum(n for _, n in self.kept)

    @property
    def bytes_back(self) -> int:
        """Bytes to copy when it leaves."""
        if not self.dirty:
            return 0
        return self.nbytes if self.to_save is None else sum(n for _, n in self.to_save)

    @property
    def unsaved(self) -> bool:
        """Whether it has bytes that are only on the device and must be saved."""
        return self.dirty and self.to_save != ()

    @property
    def leaves_for_nothing(self) -> bool:
        """For scratch: whether no bytes are copied if it leaves now, nor when it comes in again."""
        return bool(self.scratch) and (self.to_save if self.dirty else self.kept) == ()

    @property
    def evicting(self) -> bool:
        return self.state in _LEAVING

    @property
    def stoppable(self) -> bool:
        """Whether its load may be ended early: nobody has it, nobody waits for it, and its worker
        has not seen the chunks."""
        held = self.leases or self.promised or self.mapped
        return self.state is State.LOADING and not (held or self.workspace)


@dataclass(slots=True, eq=False)
class Lane:
    """The copies of one direction, which run one after the other."""

    #: Bytes copied so far, and the end of the last copy, on the events' clock.
    nbytes: int = 0
    ended_at: float = 0.0
    #: Seconds in which one of them was under way.
    busy_s: float = 0.0
    #: Speed of the last copy; None before the first.
    bytes_per_s: float | None = None


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy in flight, a loan or a reclaim.

    `component` may be gone by the time it ends; the chunks are not.
    """

    component: Component
    #: The host copy that it reads or writes; 0 for a workspace.
    uid: int
    #: Chunks that are free when it ends, if the component is no longer needed.
    runs: Runs
    #: The time of its order, and for a copy its direction.
    began: float
    lane: Lane | None = None
    #: The session that is gone while its process may still write to the chunks.
    writer: int | None = None


@dataclass(slots=True, eq=False)
class Waiter:
    """An acquire that was not granted yet: parked, queued, or admitted and loading."""

    session: int
    request: int
    agent: int
    #: The requested names, and the same with each family replaced by its parts.
    asked: tuple[str, ...]
    names: tuple[str, ...]
    priority: int
    deadline: float | None
    arrived: float
    seq: int
    await_registration: bool = False
    #: It does not wait for loads of components that its own session registered.
    early: bool = False
    #: How many may overtake it; None: as the rules say.
    overtake: int | None = None
    #: When its holder wants it: see `requests.due`.
    due: int = 0
    #: It may have the old bytes of updated components that its session holds: waiting for the new
    #: ones would be a deadlock.
    takes_old: bool = False
    #: Loads that it still waits for, by name; only once admitted.
    pending: set[str] = field(default_factory=set)
    parked: bool = False
    queued: bool = False
    admitted: bool = False
    #: What it waits for, as its Waiting record says; "" before that record.
    why: str = ""
    loaded: bool = False
    #: How many that came later were admitted while it was the head; and since when it is the head,
    #: and has to wait.
    overtaken: int = 0
    head_since: float | None = None
    #: How many may overtake it now; None: it was not the head yet.
    bound: int | None = None
    #: Leases that end if it needs memory, and whether they did.
    spare: tuple[Release, ...] = ()
    spent: bool = False

    key: Key = field(init=False)
    owner: Agent = field(init=False)
    #: Sorts the queue: higher priority first, then who wants it first, then first come.
    order: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.session, self.request)
        self.owner = (self.session, self.agent)
        self.order = (-self.priority, self.due, self.seq)


@dataclass(slots=True, eq=False)
class Follower:
    """A component or family that is used after another one, as a session said."""

    name: str
    after: str
    session: int
    #: Not declared, but seen in calls.
    seen: bool = False
    #: From 1 down to 0: how often lately it was loaded in vain.
    trust: float = 1.0
    #: When it was predicted last; and whether it was to be loaded for that, and has not been asked
    #: for since.
    since: float = 0.0
    acted: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    session: int
    agent: int
    #: Names that it holds, in the order of the request.
    names: dict[str, None]
    #: The time of its grant.
    since: float = 0.0

    @property
    def owner(self) -> Agent:
        return (self.session, self.agent)


@dataclass(slots=True, eq=False)
class Session:
    label: str
    #: Names that it registered.
    owns: dict[str, None] = field(default_factory=dict)
    leases: set[int] = field(default_factory=set)
    waiters: set[int] = field(default_factory=set)
    #: Components being evicted for its waiters, by generation; and names that it was told are
    #: wanted.
    makes_way: dict[int, Component] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    fenced: bool = False  # a Fence was ordered; SessionGone will follow
    #: The largest lease that it had of its own components, without those that are gone; and the
    #: chunks of it.
    turn: dict[str, None] = field(default_factory=dict)
    turn_chunks: int = 0
