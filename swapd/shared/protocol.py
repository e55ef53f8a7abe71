"""The messages between daemon and client: structs, codes, encoding. No sockets, clocks or state.

`rpc` (ZeroMQ) carries requests and exactly one reply to each; the `lifeline` (a Unix SEQPACKET
socket) the handshake, file descriptors, and the daemon's notices. Decoders ignore unknown fields
and fill in defaults, so fields may be added, but a meaning may never change. Tags are explicit for
the same reason.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from swapd.shared.text import TEXT_MAX_CHARS

VERSION = 12
#: Oldest client version that this daemon serves, so that it can be upgraded under its workers:
#: later changes are additions that such a client does not ask for.
OLDEST = 11

#: An rpc identity is the session token followed by a channel number.
TOKEN_BYTES = 16

#: The daemon closes a connection that sends a longer request.
REQUEST_MAX_BYTES = 1 << 20

#: Most unanswered requests of one session; the daemon refuses more.
UNANSWERED_MAX = 16_384

#: Largest lifeline packet, in either direction.
LIFELINE_MAX_BYTES = 64 * 1024

#: Longest component name; most names in one request.
NAME_MAX_CHARS = TEXT_MAX_CHARS
NAMES_MAX = 1024

#: Most segments of one component: a word of the board counts them.
SEGMENTS_MAX = 0xFFFE

#: Bound of every number on the wire, so that sums of a few stay within an encoder's 64 bits.
NUMBER_MAX = 1 << 62

Number = Annotated[int, msgspec.Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]
#: Identifies a request, a lease or a ticket.
Id = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
#: Bytes as people give them: `swapd.core.requests` refuses values that are not a size.
Size = Number
#: Most uses of one lease that a client has not reported yet; it reports about once a second.
USES_MAX = 1 << 32
Uses = Annotated[int, msgspec.Meta(ge=0, le=USES_MAX)]
#: Seconds between two events in the past.
PAST_MAX_S = 1e6
Past = Annotated[float, msgspec.Meta(ge=0.0, le=PAST_MAX_S)]
LEASES_MAX = 1024

Name = Annotated[str, msgspec.Meta(max_length=NAME_MAX_CHARS)]

Policy = Literal["lru", "permanent", "sequential", "alternating"]

#: Why a request was refused. `swapd_client.errors` has an exception class for each.
Code = Literal[
    "bad_request",
    "version",
    "no_session",
    "unknown_component",
    "duplicate_name",
    "not_owner",
    "in_use",
    "too_large",
    "conflict",
    "host_memory",
    "deadlock",
    "timeout",
    "component_gone",
    "device_failed",
    "stopping",
    "fenced",
    "limit",
    "internal",
]

ComponentKind = Literal["component", "workspace", "scratch"]

#: Scratch is memory that loading fills with zeros. An eviction drops its contents, or saves them
#: for the next load. "": an ordinary component.
Scratch = Literal["", "dropped", "saved"]

#: Parts of a component as (offset, bytes): not empty, ascending, with gaps between them.
Ranges = tuple[tuple[int, int], ...]

#: Most ranges of one component in a message.
RANGES_MAX = 4096

#: The name of the start lease in messages.
THE_START = "the turn to start"

#: The part of a family that is in no block. All blocks need it, so swapd keeps it first.
REST = "rest"


def part_name(family: str, part: str) -> str:
    return f"{family}/{part}"


def rest_of(family: str) -> str:
    return part_name(family, REST)


#: Chunks as runs of neighbours: ((first chunk, count), ...), in the order of the bytes.
Runs = tuple[tuple[int, int], ...]


class Placement(msgspec.Struct, frozen=True):
    """The chunks of a component, valid for this generation only."""

    name: str
    generation: int
    runs: Runs
    transient: bool = False  # it leaves the device with its last lease
    contents: int = 0  # of scratch: the generation that began its contents, as zeros


# --- rpc, client to daemon ---------------------------------------------------------------


class Request(msgspec.Struct, frozen=True, tag_field="op", omit_defaults=True):
    """Base of all requests. `id` is unique within the session, and names the reply."""

    id: Id


class Register(Request, frozen=True, tag="register"):
    """Reserve a name and order a host copy, whose descriptor comes by the lifeline."""

    name: str
    nbytes: Size
    layout: str = ""  # hash of the tensors' places in the host copy, opaque to the daemon
    policy: Policy = "lru"
    group: str | None = None
    mutable: bool = False
    segments: tuple[Size, ...] = ()  # the ascending end of each, in bytes; () is one segment
    part_of: str = ""  # the family, which stands for all its parts
    content: str = ""  # hash of its bytes: equal contents and layouts share one host copy
    transient: bool = False  # a part that leaves when released, until a Resize keeps it
    scratch: Scratch = ""  # always mutable, as its worker writes to it
    filled: bool = False  # the worker fills the host copy of "saved" scratch, too
    certain: bool = False  # no other bytes ever have this content: the host copy may be kept


class Commit(Request, frozen=True, tag="commit"):
    """The host copy is complete, and unmapped in the worker: the component may be acquired. A
    Commit of several updates takes effect in one step, or not at all."""

    name: str
    also: tuple[str, ...] = ()


class Update(Request, frozen=True, tag="update"):
    """Order a new host copy, whose descriptor comes by the lifeline, for a clean component. Commit
    replaces the current one by it in one step."""

    name: str


class GiveUp(Request, frozen=True, tag="give_up"):
    """Drop the new host copy of the Update with this id, which the client will not commit."""

    name: str
    update: Id


class Unregister(Request, frozen=True, tag="unregister"):
    name: str


class Forget(Request, frozen=True, tag="forget"):
    """Drop the kept host copies of these contents, components or families; without names, all. Any
    session may ask."""

    names: tuple[str, ...] = ()


class UsedRanges(msgspec.Struct, frozen=True):
    """The ranges of "saved" scratch that are worth saving from now on, as its owner reports."""

    name: Name
    number: Id  # counts up; the daemon ignores reports that arrive late
    ranges: tuple[tuple[Size, Size], ...]


class Release(Request, frozen=True, tag="release"):
    """Release a lease. Answered only if `ack`; releasing twice does nothing."""

    lease: Id
    ack: bool = False
    again: Uses = 0  # further uses, which the worker did not report
    used: tuple[UsedRanges, ...] = ()
    idle_s: Past = 0.0  # since the end of its last use
    gap_s: Past | None = None  # between its last use and the one before
    unmapped: bool = False  # the worker has unmapped clean components that no other lease holds


Held = Annotated[tuple[Id, ...], msgspec.Meta(max_length=LEASES_MAX)]
Spare = Annotated[tuple[Release, ...], msgspec.Meta(max_length=LEASES_MAX)]


class Acquire(Request, frozen=True, tag="acquire"):
    """Acquire all of `names`, or none. The request's id becomes the lease's id."""

    names: tuple[str, ...]
    agent: Number = 0  # the thread or task that waits; it releases no lease meanwhile
    timeout_s: float | None = None
    priority: Number = 0
    await_registration: bool = False  # wait for names that are not registered yet
    early: bool = False  # grant once the loads are ordered; the board shows the progress
    traced: bool = False  # the reply has an Account
    #: Leases that the agent uses; None: all its own. Its other leases are released when recalled,
    #: whatever the agent waits for.
    holds: Held | None = None
    #: Leases to end if the request needs a load; the reply says whether they were.
    spare: Spare = ()
    #: How many later acquires whose components are all in may be granted before it while it is the
    #: head of the queue; None: the daemon's `--overtake`.
    overtake: Count | None = None
    #: Seconds within which it is wanted; None: not said. It goes before acquires of its priority
    #: that are wanted later or do not say, and none overtakes it for needing no memory.
    due_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


class AcquireWorkspace(Request, frozen=True, tag="acquire_workspace"):
    """Reserve device memory for the worker's own allocator. The budget shrinks by it meanwhile.

    Reply and release are those of an acquire. The daemon rounds up to whole chunks.
    """

    nbytes: Size
    agent: Number = 0
    timeout_s: float | None = None
    priority: Number = 0
    traced: bool = False
    holds: Held | None = None
    spare: Spare = ()


class AcquireStart(Request, frozen=True, tag="acquire_start"):
    """Be the only process that starts on this device, to measure free memory undisturbed.

    Reply and release are those of an acquire. The daemon refuses a session that holds leases.
    """

    timeout_s: float | None = None
    traced: bool = False


class Cancel(Request, frozen=True, tag="cancel"):
    """Forget an acquire, waiting or granted. Not answered."""

    acquire: Id


class Prefetch(Request, frozen=True, tag="prefetch"):
    """Load these if there is room. Answered at once; takes no lease."""

    names: tuple[str, ...]
    #: Idle components and families that may be evicted for them; None: any. If it is given, the
    #: daemon skips unregistered names, here and in `names`.
    over: tuple[Name, ...] | None = None
    #: The prefetch lapses after so many seconds; 0 takes it back.
    timeout_s: float | None = None


class Follows(Request, frozen=True, tag="follows"):
    """Load these while `after` is in use, because they are used next. Answered at once.

    They replace the followers that any session named before, and last as long as this session. ()
    only ends the former ones. Names need not be registered.
    """

    names: tuple[Name, ...]
    after: Name
    #: Observed in calls: it does not replace declared followers.
    seen: bool = False


class ForecastRequest(Request, frozen=True, tag="forecast"):
    """Ask for the effect of acquiring these now; without names, about a waiting acquire of this
    session. Answered at once; changes nothing."""

    names: tuple[str, ...]
    acquire: Id | None = None


class Resize(Request, frozen=True, tag="resize"):
    """Keep this many bytes of a family on the device, evenly spread, and stream the rest: at most
    as much as leaves room for the largest streamed part; None: as much as leaves room for two. Any
    session may ask."""

    name: str
    resident_bytes: Size | None = None


class Pin(Request, frozen=True, tag="pin"):
    """Pin a component, or the kept parts of a family, which then stay once loaded; or unpin them. A
    pin lasts until it is ended or the component unregistered. Any session may ask."""

    name: str
    unpin: bool = False


class EvictNow(Request, frozen=True, tag="evict_now"):
    """Evict a component, or the parts of a family but its permanent ones, at once. Accepted when
    the evictions are ordered; copies back may still run. Any session may ask."""

    name: str


class StatusRequest(Request, frozen=True, tag="status"):
    pass


AnyAcquire = Acquire | AcquireWorkspace | AcquireStart

AnyOrder = (
    Register
    | Commit
    | Update
    | GiveUp
    | Unregister
    | Forget
    | Acquire
    | AcquireWorkspace
    | AcquireStart
    | Release
    | Cancel
    | Prefetch
    | Follows
    | Resize
    | Pin
    | EvictNow
)

AnyRequest = AnyOrder | ForecastRequest | StatusRequest


# --- rpc, daemon to client ---------------------------------------------------------------


class Reply(msgspec.Struct, frozen=True, tag_field="op"):
    id: int


class Done(Reply, frozen=True, tag="done"):
    pass


class Move(msgspec.Struct, frozen=True, omit_defaults=True):
    """One load or eviction. Times in seconds of the daemon's CLOCK_MONOTONIC."""

    kind: Literal["load", "evict"]
    name: str
    nbytes: int  # bytes to copy; of an eviction, bytes to write back
    began_s: float  # the time of its order
    record: int  # number of its order in the swap log
    ended_s: float | None = None  # None: not before the acquire was answered
    why: str = ""  # the reason of an eviction; the failure of a load


MOVES_MAX = 128


class Account(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a traced acquire waited for: loads of its components that ran after it came, whichever
    acquire ordered them, and evictions to make room for it."""

    answered_s: float
    record: int  # number of the answer in the swap log
    waits_for: str = ""  # as in the swap log; "": it waited for no leases
    moves: tuple[Move, ...] = ()
    left_out: int = 0  # moves beyond MOVES_MAX


class Granted(Reply, frozen=True, tag="granted", omit_defaults=True):
    """`placements` lists the components that the asking session itself registered."""

    placements: tuple[Placement, ...]
    waited_s: float = 0.0
    loaded: bool = False  # it waited for a copy
    names: tuple[str, ...] = ()  # all granted components, if a requested name has parts
    account: Account | None = None  # if the acquire was traced
    spent: bool = False  # the leases that the acquire named as `spare` have ended


class Refused(Reply, frozen=True, tag="refused", omit_defaults=True):
    code: Code
    message: str
    account: Account | None = None  # if the acquire was traced


class Victim(msgspec.Struct, frozen=True):
    """A component that would be evicted, after the daemon has written `bytes_back` of it back."""

    name: str
    nbytes: int
    bytes_back: int
    reason: str
    part_of: str = ""


class Blocker(msgspec.Struct, frozen=True):
    """A component or family that the acquire would wait for, and why, for people."""

    name: str
    why: str


class Forecast(Reply, frozen=True, tag="forecast"):
    """The effect of acquiring `names` now, in bytes and seconds.

    The daemon would evict `victims` at once. If `waits_for` is not empty, the victims depend on
    when those holders give way. `seconds`: the time until the grant, if earlier holders, waiters
    and copies take as long as usual; None if that is `unknown`, which says why, for people.
    """

    names: tuple[str, ...]
    bytes_in: int
    bytes_coming: int  # loading already
    bytes_back: int
    victims: tuple[Victim, ...]
    waits_for: tuple[Blocker, ...]
    seconds: float | None
    bytes_per_s: float | None
    unknown: str = ""

    @property
    def at_once(self) -> bool:
        """Whether the acquire would wait for no holder."""
        return not self.waits_for


class ComponentStatus(msgspec.Struct, frozen=True):
    name: str
    session: int
    nbytes: int
    state: str
    policy: Policy
    group: str | None
    mutable: bool
    leases: int
    holders: tuple[str, ...]
    idle_s: float | None  # since the last release; None while leased or never used
    loads: int
    evictions: int
    hits: int
    swap_in_s: float | None
    part_of: str = ""
    copy_s: float | None = None  # of the last swap-in, without its wait for other copies
    kind: ComponentKind = "component"
    pinned: bool = False  # a session pinned it; its policy is "permanent" meanwhile
    wasted: int = 0  # loads at most WASTED_S after it had left for others
    #: Components with the same number here, not 0, have the same bytes: one copy on the device
    #: serves all.
    twins: int = 0

    @property
    def inside(self) -> bool:
        """Whether it occupies device memory."""
        return self.state not in ("filling", "absent", "waiting")


def without_twins(components: Iterable[ComponentStatus]) -> list[ComponentStatus]:
    """Return one component for each set of equal bytes."""
    by_bytes: dict[int | str, ComponentStatus] = {}
    for c in components:
        by_bytes.setdefault(c.twins or c.name, c)
    return list(by_bytes.values())


class SessionStatus(msgspec.Struct, frozen=True):
    session: int
    label: str
    leases: int
    waiting: int
    #: Whether the session does not read, or cannot receive, messages that the daemon keeps for it.
    unread: bool = False
    #: Bytes, in whole chunks, of its permanent components; and most bytes of its others that one
    #: lease held.
    stays_bytes: int = 0
    turn_bytes: int = 0


class ProcessStatus(msgspec.Struct, frozen=True):
    """Device memory of a process, in bytes; swapd is one of the processes."""

    pid: int
    name: str
    nbytes: int


class WaitStatus(msgspec.Struct, frozen=True):
    """An acquire without an answer. `names`: the first NAMES_SHOWN of `count`."""

    session: int
    names: tuple[str, ...]
    count: int
    waited_s: float
    why: str  # what it waits for, for people; "" if only for copies
    #: Until its grant, or None; both fields are as in `Forecast`.
    seconds: float | None = None
    unknown: str = ""


class CopyStatus(msgspec.Struct, frozen=True):
    """A copy between host and device that was ordered and has not ended."""

    name: str
    direction: Literal["in", "out"]
    nbytes: int
    #: Seconds under way; None while it waits for others of its direction.
    since_s: float | None
    #: Speed of the last copy of that direction; None before the first.
    bytes_per_s: float | None


class Tally(msgspec.Struct, omit_defaults=True):
    """Counts of one component or family.

    `wasted`: loads at most WASTED_S after it had left for others. `skips`: acquires with a timeout
    of 0 that did not get it. `refusals`: by code, once for each request that named it. `waits`:
    grants of acquires that named it, in the classes of `Counts.wait_s`.
    """

    loads: int = 0
    wasted: int = 0
    evictions: int = 0
    hits: int = 0
    skips: int = 0
    refusals: dict[str, int] = {}
    waits: list[int] = []


class Histogram(msgspec.Struct):
    """Durations in seconds. The last of `counts` is for durations above all `bounds`."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0


class Counts(msgspec.Struct):
    """Counts since the daemon's start. `of`: by component or family; "" is all others, also those
    that are gone."""

    of: dict[str, Tally]
    wait_s: Histogram  # from an acquire to its grant
    copy_in_s: Histogram  # from the order of a copy to its end
    copy_out_s: Histogram
    hold_s: Histogram  # from a grant to its release


#: A load is wasted if its component left at most so long before, to make room or for a rival of its
#: alternating group.
WASTED_S = 60.0
#: Number of wasted loads that `WastedLoads` summarizes.
WASTED_LAST = 8


class WastedLoads(msgspec.Struct, frozen=True):
    """The last WASTED_LAST wasted loads; parts of a family in a row count as one.

    `copying_s`: seconds of `took_s` in which loads were copied. `hits`: uses in `took_s` that found
    their component on the device.
    """

    ago_s: float  # since the last one
    took_s: float  # from the first one to the last one
    copying_s: float
    hits: int


#: Most waiting acquires, and copies, in a status; most names of one acquire.
WAITS_SHOWN = 50
NAMES_SHOWN = 8


class KeptStatus(msgspec.Struct, frozen=True):
    """A host copy that no component uses. `name`: the last component that did."""

    name: str
    content: str
    nbytes: int


class Status(Reply, frozen=True, tag="status"):
    """Everything `swapd status` shows. Bytes are bytes; `_s` is seconds."""

    version: str
    device: str
    runtime_dir: str
    swap_log: str
    isolation: str
    uptime_s: float
    chunk_bytes: int
    budget_bytes: int
    used_bytes: int
    peak_bytes: int
    quarantined_bytes: int
    host_copy_bytes: int
    waiting: int
    loads: int
    evictions: int
    hits: int
    bytes_in: int
    bytes_out: int
    components: tuple[ComponentStatus, ...]
    sessions: tuple[SessionStatus, ...]
    device_bytes: int = 0
    device_free_bytes: int = 0
    processes: tuple[ProcessStatus, ...] = ()
    notes: tuple[str, ...] = ()  # facts about the device for people
    #: Host copies of unregistered components in which connected processes still have tensors.
    private_bytes: int = 0
    #: Host copies that no component uses, the least recently used first; part of `host_copy_bytes`.
    kept: tuple[KeptStatus, ...] = ()
    keep_host_bytes: int = 0  # `--keep-host`: most bytes of these
    #: Labels of starting processes. The first has the turn, the others wait for it.
    starting: tuple[str, ...] = ()
    #: Bytes of host copies that are page-locked for the device, and of those that could not be.
    pinned_bytes: int = 0
    unpinned_bytes: int = 0
    #: The longest waits and the next copies, at most WAITS_SHOWN of each.
    waits: tuple[WaitStatus, ...] = ()
    copies: tuple[CopyStatus, ...] = ()
    counts: Counts | None = None
    wasted: WastedLoads | None = None  # None before there were WASTED_LAST
    #: Records of the swap log, and those that its file lost because the disk did not take them.
    records: int = 0
    records_lost: int = 0


AnyReply = Done | Granted | Refused | Forecast | Status


# --- lifeline ----------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: Number
    label: Name = ""


class Revoked(msgspec.Struct, frozen=True, tag="revoked"):
    """The worker has unmapped this generation."""

    name: Name
    generation: Number  # the daemon ignores an unknown one


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The worker has unmapped and closed the files of the Drop with this ticket."""

    ticket: Id


class ReleaseKept(msgspec.Struct, frozen=True, tag="given_back"):
    """Releases of leases that nobody uses. Not answered; a repetition does nothing."""

    releases: tuple[Release, ...]


class HandBack(msgspec.Struct, frozen=True, tag="hand_back"):
    """A host copy that an earlier daemon made, sealed against writing; comes with one descriptor
    before the Register of this number. The daemon may take it in place of a new one."""

    request: Id


class SessionUnmapped(msgspec.Struct, frozen=True, tag="let_go"):
    """Sent instead of Hello by a process that has unmapped everything of the ended session with
    this token. The daemon believes only that session's process, and closes the connection
    afterwards."""

    token: bytes


FromClient = Hello | Revoked | Dropped | ReleaseKept | HandBack | SessionUnmapped


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Comes with one descriptor: the session's board (`swapd.shared.board`)."""

    version: int
    session: int
    token: bytes
    rpc: str
    device: str
    chunk_bytes: int
    chunks: int
    strict: bool
    chunks_per_file: int = 1
    uuid: str = ""  # of the GPU, whose number may differ between processes


class Master(msgspec.Struct, frozen=True, tag="master"):
    """The reply to the Register or Update `request`; comes with the host copy's descriptor.

    `slot`: the component's slot on the board. A `filled` host copy already has the requested
    content; it is shared and read-only. A `certain` one need not be compared.
    """

    name: str
    nbytes: int
    slot: int = 0
    request: int = 0
    filled: bool = False
    certain: bool = False


class Files(msgspec.Struct, frozen=True, tag="files"):
    """Comes with one descriptor for each number: the files of the session's chunks.

    File i holds the chunks from i * chunks_per_file. It is sent before the first grant that uses
    it. A descriptor that is not `writable` cannot be mapped for writing (on a GPU, the worker
    itself maps read-only).
    """

    numbers: tuple[int, ...]
    writable: bool = False


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Unmap and close these files, then send Dropped: another allocator gets their memory."""

    numbers: tuple[int, ...]
    ticket: int


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The load of an early grant failed: the lease is void."""

    name: str
    generation: int
    why: str


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    """The component left the device: unmap this generation; answer with Revoked if `ack`."""

    name: str
    generation: int
    ack: bool = False


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A mutable component's bytes are in its host copy, so its chunks may be overwritten.

    `anew`: the bytes of scratch are lost. It begins anew as zeros, whatever its host copy has.
    """

    name: str
    generation: int
    anew: bool = False


class Wanted(msgspec.Struct, frozen=True, tag="wanted"):
    """An acquire waits (or no longer waits) for the memory of a component that you hold."""

    name: str
    wanted: bool


class Hurry(msgspec.Struct, frozen=True, tag="hurry"):
    """An acquire waits (or no longer waits) for leased memory. Release unused leases at once."""

    waits: bool


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    code: Code
    message: str


FromDaemon = Welcome | Master | Files | Drop | Broken | Revoke | Saved | Wanted | Hurry | Goodbye

#: Decoding errors. Invalid UTF-8 and endless nesting do not raise MsgspecError.
NOT_A_MESSAGE = (msgspec.MsgspecError, ValueError, RecursionError)

#: Encoding errors: a number of more than 64 bits, invalid UTF-8.
NOT_ENCODABLE = (msgspec.MsgspecError, OverflowError, TypeError, ValueError, RecursionError)

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(AnyRequest).decode
decode_reply = msgspec.msgpack.Decoder(AnyReply).decode
decode_from_client = msgspec.msgpack.Decoder(FromClient).decode
decode_from_daemon = msgspec.msgpack.Decoder(FromDaemon).decode
