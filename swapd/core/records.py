"""What the core remembers: components, waiters, leases, sessions. Data, no decisions."""

from dataclasses import dataclass, field
from enum import StrEnum

from swapd.core.actions import Reason
from swapd.shared.protocol import Policy, Ranges, Runs, Scratch

#: (session, request): names a waiter, and after its grant the lease.
Key = tuple[int, int]

#: (session, agent): a thread or task of a session.
Agent = tuple[int, int]

#: Workspaces are named by their request; no component may be named like one.
WORKSPACE = "workspace "


def workspace_name(session: int, request: int) -> str:
    return f"{WORKSPACE}{session}.{request}"


def is_workspace(name: str) -> bool:
    """Whether a workspace is called so, and no component may be."""
    return name.startswith(WORKSPACE)


class State(StrEnum):
    FILLING = "filling"  # the worker writes the master; may not be acquired yet
    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    REVOKING = "revoking"  # waits for the worker's acknowledgement
    WRITING_BACK = "writing back"
    RECLAIMING = "reclaiming"  # a workspace that nobody needs any more


@dataclass(slots=True, eq=False)
class Renewal:
    """A new master of a component, made beside the one it has."""

    uid: int
    #: The request that began it.
    begun_by: int
    #: The update or commit to answer when the step it began ends; None while it is filled.
    request: int | None
    #: While it is being sealed: all that are to take place with it, and itself.
    together: "tuple[Component, ...]" = ()
    sealed: bool = False


@dataclass(slots=True, eq=False)
class Component:
    """What may be on the device. A workspace is one without a master, for one lease only."""

    uid: int  # of its master: never reused, unlike the name; 0 for a workspace
    name: str
    session: int
    nbytes: int
    chunks: int
    policy: Policy
    group: str | None
    mutable: bool
    workspace: bool = False
    #: The family that it is a part of, or "".
    part_of: str = ""
    #: The policy it was registered with. A part that is not kept is `sequential` instead.
    own_policy: Policy = "lru"
    #: While it is pinned its own policy is "permanent"; this is the one it has after that.
    unpinned_policy: Policy | None = None
    scratch: Scratch = ""

    state: State = State.FILLING
    #: Counts residencies over the life of the core; 0 before the first.
    generation: int = 0
    #: Counts up with each first lease: of those that came in at once, which was leased first.
    leased_seq: int = 0
    #: Its chunks if they are on the device and will not come free, else 0.
    fixed: int = 0
    #: Chunks it is on; kept after an eviction, to ask for the same ones again.
    runs: Runs = ()
    #: Leases that hold it; how many each session has of it; and how many each agent.
    leases: set[Key] = field(default_factory=set)
    holders: dict[int, int] = field(default_factory=dict)
    agents: dict[Agent, int] = field(default_factory=dict)
    #: Waiters it was loaded or kept for, and that have not been granted yet, by arrival.
    promised: dict[Key, None] = field(default_factory=dict)
    #: Queued waiters that name it, in order of arrival.
    waiting: dict[Key, None] = field(default_factory=dict)
    #: The owner was told this generation's chunks; perhaps before they were filled.
    mapped: bool = False
    #: The owner may have written since the last write-back (mutable only).
    dirty: bool = False
    #: What of it the master has, and what of it is to be saved; None: all. Of scratch it may be
    #: less. And the number of what its owner said last of that.
    kept: Ranges | None = None
    to_save: Ranges | None = None
    used_number: int = 0
    #: Of scratch: the generation that came in as zeros, and has its contents since.
    contents: int = 0
    #: Why it is being evicted, and for whom.
    reason: Reason = "room"
    evicting_for: Key | None = None
    #: The register, commit or unregister request to answer when the step it began ends.
    answer: int | None = None
    unregistering: bool = False
    #: Its next master, until that is committed or given up.
    renewal: Renewal | None = None
    #: The request that began the last update that took place.
    updated_by: int | None = None
    #: What is on the device, or coming in, is from a master that it has no more.
    superseded: bool = False
    #: Why its bytes are lost for good though it is registered; None if they are not.
    damaged: str | None = None
    #: Its session is ending: nobody may acquire it any more.
    ending: bool = False
    #: Granted at least once in this residency.
    used: bool = False
    #: A prefetch named it when nobody held it, and it was not granted since.
    expected: bool = False
    #: A part that was idle when its family was made smaller.
    kept_no_more: bool = False

    #: Seconds on the events' clock; None before the first time.
    load_started: float = 0.0
    resident_since: float = 0.0
    idle_since: float = 0.0
    #: While it is wanted: until when only the agents that hold it may take it again, and how long
    #: that is in all.
    closed_until: float = 0.0
    closed_s: float = 0.0
    #: Last release, until the next acquire; None before the first.
    released_at: float | None = None
    #: Last release, whatever was asked since; None before the first.
    last_used: float | None = None
    #: Measured: the last copy in, order to completion; and release to next acquire.
    swap_in_s: float | None = None
    #: The same less what it waited for copies that were ordered before.
    copy_s: float | None = None
    gap_s: float | None = None
    loads: int = 0
    evictions: int = 0
    hits: int = 0

    def __repr__(self) -> str:
        return f"<{self.name} {self.state} gen={self.generation} leases={len(self.leases)}>"

    def excludes(self, other: "Component") -> bool:
        """Whether the two are never on the device together: of one alternating group, but parts
        of one family belong together."""
        if other is self or self.group is None or self.group != other.group:
            return False
        return not self.part_of or self.part_of != other.part_of

    @property
    def pinned(self) -> bool:
        """Whether somebody asked that it stays."""
        return self.unpinned_policy is not None

    @property
    def only_pinned(self) -> bool:
        """Whether it stays for its pin alone."""
        return self.policy == "permanent" and self.unpinned_policy not in (None, "permanent")

    @property
    def stays(self) -> bool:
        """Whether it does not leave once it is in, whoever wants its room."""
        return self.policy == "permanent" and not self.only_pinned

    @property
    def on_device(self) -> bool:
        """Whether it occupies chunks."""
        return self.state not in (State.FILLING, State.ABSENT)

    @property
    def bytes_in(self) -> int:
        """What is copied when it comes in."""
        return self.nbytes if self.kept is None else sum(n for _, n in self.kept)

    @property
    def bytes_back(self) -> int:
        """What is copied when it leaves."""
        if not self.dirty:
            return 0
        return self.nbytes if self.to_save is None else sum(n for _, n in self.to_save)

    @property
    def unsaved(self) -> bool:
        """Whether it has something that is nowhere else, and is to be saved."""
        return self.dirty and self.to_save != ()

    @property
    def leaves_for_nothing(self) -> bool:
        """Of scratch: whether nothing is copied if it leaves now, nor when it comes in again."""
        return bool(self.scratch) and (self.to_save if self.dirty else self.kept) == ()

    @property
    def evicting(self) -> bool:
        return self.state in (State.REVOKING, State.WRITING_BACK, State.RECLAIMING)


@dataclass(slots=True, eq=False)
class Move:
    """A copy in flight, or memory that is being lent or reclaimed.

    `component` may be gone by the time it ends; the chunks are not.
    """

    component: Component
    #: The master it reads or writes; 0 of a workspace.
    uid: int
    #: The chunks that are free when it ends and nobody needs the component: of a load, those
    #: it did not inherit; of a write-back, those that nobody inherited, first saved first.
    runs: Runs
    #: Of a load: chunks that are saved before they are overwritten, by generation of the
    #: write-back, which is still in flight.
    inherited: dict[int, Runs] = field(default_factory=dict)
    #: Of a write-back: a load may inherit what it saves; and those that have, by generation.
    heritable: bool = False
    heirs: list[int] = field(default_factory=list)
    #: The session that is gone and whose process may still write to the chunks.
    writer: int | None = None


@dataclass(slots=True, eq=False)
class Waiter:
    """An acquire that was not granted yet: parked, queued, or admitted and loading."""

    session: int
    request: int
    agent: int
    #: What it asked for, and that with each family's name replaced by the names of its parts.
    asked: tuple[str, ...]
    names: tuple[str, ...]
    priority: int
    deadline: float | None
    await_registration: bool
    arrived: float
    seq: int
    #: It does not wait for copies of what its own session registered.
    early: bool = False
    #: It may have the old bytes of what was updated, where its session holds them: to wait for the
    #: new ones would be a deadlock.
    takes_old: bool = False
    #: Names still being copied in that it waits for; only once admitted.
    pending: set[str] = field(default_factory=set)
    queued: bool = False
    admitted: bool = False
    #: Chunks of all its names, while it is queued; and whether one of them is of a group.
    chunks: int = 0
    grouped: bool = False
    told: bool = False  # a Waiting record was made
    loaded: bool = False

    @property
    def key(self) -> Key:
        return (self.session, self.request)

    @property
    def owner(self) -> Agent:
        return (self.session, self.agent)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts the queue: higher priority first, then first come, first served."""
        return (-self.priority, self.seq)


@dataclass(slots=True, eq=False)
class Lease:
    session: int
    agent: int
    #: What it holds, in the order in which it was asked for.
    names: dict[str, None]

    @property
    def owner(self) -> Agent:
        return (self.session, self.agent)


@dataclass(slots=True, eq=False)
class Session:
    label: str
    #: Names it registered.
    owns: dict[str, None] = field(default_factory=dict)
    leases: set[int] = field(default_factory=set)
    waiters: set[int] = field(default_factory=set)
    #: What is being evicted for its waiters, by generation; and the names of what it was told
    #: is wanted.
    makes_way: dict[int, Component] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    fenced: bool = False  # a Fence was ordered; SessionGone will follow
    #: Of what it registered, the most that one of its leases held, as far as it is still there; and
    #: its chunks.
    turn: dict[str, None] = field(default_factory=dict)
    turn_chunks: int = 0
