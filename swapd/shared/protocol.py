"""The messages between daemon and client: structs, codes, encoding.

Lives here: every struct that crosses a process border, and the one protocol version.
May not live here: sockets, clocks, state. msgspec only.

Two channels carry these. `rpc` (ZeroMQ) carries requests and exactly one reply to each.
The `lifeline` (a Unix SEQPACKET socket) carries the handshake, file descriptors, and the
daemon's notices. Decoders ignore unknown fields and fill in defaults, so fields may be
added; a meaning may never change. Tags are explicit for the same reason.
"""

from typing import Annotated, Literal

import msgspec

from swapd.shared.text import TEXT_MAX_CHARS

VERSION = 12
#: Oldest version of a client that a daemon of `VERSION` serves: what has changed since is additions
#: that such a client never asks for. So a daemon can be upgraded under its workers.
OLDEST = 11

#: Bytes of the session token. An rpc identity is the token followed by a channel number.
TOKEN_BYTES = 16

#: Largest request. A longer one closes its connection, so no client sends one.
REQUEST_MAX_BYTES = 1 << 20

#: Most unanswered requests of one session. The daemon refuses one more.
UNANSWERED_MAX = 16_384

#: Largest lifeline packet, in either direction.
LIFELINE_MAX_BYTES = 64 * 1024

#: Longest component name, and most names in one acquire.
NAME_MAX_CHARS = TEXT_MAX_CHARS
NAMES_MAX = 1024

#: Most segments of one component: a word of the board counts the segments that have arrived.
SEGMENTS_MAX = 0xFFFE

#: Bound of the absolute value of each number on the wire: sums and differences of a few stay within
#: the 64 bits that an encoder takes.
NUMBER_MAX = 1 << 62

Number = Annotated[int, msgspec.Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]
#: Identifies a request, a lease or a ticket.
Id = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
#: Bytes as people give them: `swapd.core.requests` refuses values that are not a size.
Size = Number
#: Most uses of one lease that a client has not reported yet: it reports about once a second.
USES_MAX = 1 << 32
Uses = Annotated[int, msgspec.Meta(ge=0, le=USES_MAX)]
#: Seconds between two events in the past.
PAST_MAX_S = 1e6
Past = Annotated[float, msgspec.Meta(ge=0.0, le=PAST_MAX_S)]
#: Most leases that one request names.
LEASES_MAX = 1024

Name = Annotated[str, msgspec.Meta(max_length=NAME_MAX_CHARS)]

Policy = Literal["lru", "permanent", "sequential", "alternating"]

#: Why a request was refused. One exception class in `swapd_client.errors` for each.
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

#: The kinds of residents: components, and workspaces, each of which has one lease.
ComponentKind = Literal["component", "workspace", "scratch"]

#: Memory that loading fills with zeros. Evicting drops its contents, or saves them, and loading
#: restores them. "": an ordinary component.
Scratch = Literal["", "dropped", "saved"]

#: Parts of a component as (offset, bytes): none is empty, ascending, with gaps between them.
Ranges = tuple[tuple[int, int], ...]

#: Most ranges that a message lists for one component.
RANGES_MAX = 4096

#: The name in messages of the lease that a starting process acquires.
THE_START = "the turn to start"

#: The part of a family that is in no block: all blocks need it, so swapd keeps it first.
REST = "rest"


def part_name(family: str, part: str) -> str:
    """The name of a part of a family."""
    return f"{family}/{part}"


def rest_of(family: str) -> str:
    """The name of a family's part that is in no block."""
    return part_name(family, REST)


#: Chunks as runs of neighbours: ((first chunk, count), ...), in the order of the bytes.
Runs = tuple[tuple[int, int], ...]


class Placement(msgspec.Struct, frozen=True):
    """Where one residency of a component is: valid for this generation only."""

    name: str
    generation: int
    runs: Runs
    transient: bool = False  # it leaves the device with its last lease
    contents: int = 0  # of scratch: the generation that last began as zeros; its contents remain


# --- rpc, client to daemon ---------------------------------------------------------------


class Request(msgspec.Struct, frozen=True, tag_field="op", omit_defaults=True):
    """Base of all requests. `id` is unique within the session, and names the reply."""

    id: Id


class Register(Request, frozen=True, tag="register"):
    """Reserve a name and order a host copy; its descriptor comes by the lifeline."""

    name: str
    nbytes: Size
    layout: str = ""  # hash of the tensors' places in the host copy, opaque to the daemon
    policy: Policy = "lru"
    group: str | None = None
    mutable: bool = False
    segments: tuple[Size, ...] = ()  # where each ends, bytes, ascending; () is one segment
    part_of: str = ""  # the family's name: it stands for all parts; no component has this name
    content: str = ""  # hash of its bytes: equal contents and layouts share one host copy
    transient: bool = False  # a part: it leaves when released, until a Resize keeps it
    scratch: Scratch = ""  # always mutable, as its worker writes to it
    filled: bool = False  # "saved" scratch: its host copy has contents, as that of a component has
    certain: bool = False  # no other bytes ever have this content: its host copy may be kept


class Commit(Request, frozen=True, tag="commit"):
    """The new host copy is complete and unmapped in the worker: from now on it may be acquired.

    One Commit may name updates of several components: the daemon commits all in one step, or none.
    """

    name: str
    also: tuple[str, ...] = ()


class Update(Request, frozen=True, tag="update"):
    """Order a new host copy for a clean component, beside its current one.

    The descriptor comes by the lifeline. Commit replaces the old host copy in one step.
    """

    name: str


class GiveUp(Request, frozen=True, tag="give_up"):
    """The client will not commit the Update of this id: drop the new host copy."""

    name: str
    update: Id


class Unregister(Request, frozen=True, tag="unregister"):
    name: str


class Forget(Request, frozen=True, tag="forget"):
    """Drop the kept host copies of these contents, components or families; of all, if it names
    none. Any session may ask."""

    names: tuple[str, ...] = ()


class Used(msgspec.Struct, frozen=True):
    """The ranges of "saved" scratch that are worth saving from now on, as its owner reports."""

    name: Name
    number: Id  # counts up: the daemon ignores a report that is older than the last
    ranges: tuple[tuple[Size, Size], ...]


class Release(Request, frozen=True, tag="release"):
    """Release a lease. Answered only if `ack`; releasing twice does nothing."""

    lease: Id
    ack: bool = False
    again: Uses = 0  # uses that its worker began without a message
    used: tuple[Used, ...] = ()
    idle_s: Past = 0.0  # since the end of its last use
    gap_s: Past | None = None  # before its last use, since the end of the use before
    unmapped: bool = False  # its worker has unmapped the clean components that no other lease has


#: Leases of one agent: those in use, and those to release if the request needs a load.
Held = Annotated[tuple[Id, ...], msgspec.Meta(max_length=LEASES_MAX)]
Spare = Annotated[tuple[Release, ...], msgspec.Meta(max_length=LEASES_MAX)]


class Acquire(Request, frozen=True, tag="acquire"):
    """Acquire all of `names`, or none. The request's id becomes the lease's id.

    A family's name stands for all its parts.
    """

    names: tuple[str, ...]
    agent: Number = 0  # the waiting thread or task: it releases none of its leases meanwhile
    timeout_s: float | None = None
    priority: Number = 0
    await_registration: bool = False  # wait for names that are not registered yet
    early: bool = False  # granted when the copies are ordered; the board shows the progress
    traced: bool = False  # the reply has an Account
    #: The leases that the agent has in use. All its others come back when they are recalled,
    #: whatever the agent waits for. None: it has all of them in use.
    holds: Held | None = None
    #: Leases that end if the request needs a load; the reply says whether they did.
    spare: Spare = ()
    #: How many that come later, and find all in, may be granted before it while it is the first to
    #: wait; None: as the daemon's `--overtake` says.
    overtake: Count | None = None
    #: Within how many seconds its holder wants it. It goes before others of its priority that say
    #: nothing, or a later time, and nobody overtakes it for having all in. None: it says nothing.
    due_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


class AcquireWorkspace(Request, frozen=True, tag="acquire_workspace"):
    """Reserve device memory for the worker's own allocator: the budget shrinks by it meanwhile.

    The reply and the release are those of an acquire. The daemon rounds up to whole chunks.
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

    The reply and the release are those of an acquire. The daemon refuses it to a lease holder.
    """

    timeout_s: float | None = None
    traced: bool = False


class Cancel(Request, frozen=True, tag="cancel"):
    """Forget an acquire, whether it still waits or is granted already. Not answered."""

    acquire: Id


class Prefetch(Request, frozen=True, tag="prefetch"):
    """Load these if there is room. Answered at once; takes no lease."""

    names: tuple[str, ...]
    #: The components and families that may be evicted for them, if idle. None: any. If it is given,
    #: the daemon skips unregistered names, here and in `names`.
    over: tuple[Name, ...] | None = None
    #: After so many seconds nobody expects them any more; 0: from now on, whatever was said before.
    timeout_s: float | None = None


class Follows(Request, frozen=True, tag="follows"):
    """These are used after that one: load them while it is in use. Answered at once.

    They replace what was said to follow it before, by any session; none: nothing follows it. It
    lasts as long as the session. Names need not be registered.
    """

    names: tuple[Name, ...]
    after: Name
    #: Seen in calls, and not declared: it replaces nothing that was declared.
    seen: bool = False


class ForecastRequest(Request, frozen=True, tag="forecast"):
    """Ask for the effect of acquiring these now; or, without names, for what is before an acquire
    of this session that waits. Answered at once; changes nothing."""

    names: tuple[str, ...]
    acquire: Id | None = None


class Resize(Request, frozen=True, tag="resize"):
    """Keep so many bytes of a family on the device, spread evenly; stream the rest.

    The daemon keeps at most as much as leaves room for the largest streamed part. None: as much as
    leaves room for two of them. Any session may ask.
    """

    name: str
    resident_bytes: Size | None = None


class Pin(Request, frozen=True, tag="pin"):
    """Pin a component, or the kept parts of a family: they stay once loaded. Or unpin them.

    It holds until unpinned or unregistered. Any session may ask.
    """

    name: str
    unpin: bool = False


class EvictNow(Request, frozen=True, tag="evict_now"):
    """Evict a component, or the parts of a family, at once, though no acquire needs the room.

    Accepted when the eviction is ordered: copies back have begun then. Permanent parts of a family
    stay. Any session may ask.
    """

    name: str


class StatusRequest(Request, frozen=True, tag="status"):
    pass


#: Requests that are answered with a lease.
AnyAcquire = Acquire | AcquireWorkspace | AcquireStart

#: Requests that may change the state.
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
    """Base of all replies. `id` is that of the request."""

    id: int


class Done(Reply, frozen=True, tag="done"):
    pass


class Move(msgspec.Struct, frozen=True, omit_defaults=True):
    """One load or one eviction. `_s`: the daemon's CLOCK_MONOTONIC."""

    kind: Literal["load", "evict"]
    name: str
    nbytes: int  # bytes to copy: of an eviction, bytes to write back
    began_s: float  # the time of its order
    record: int  # number of its order in the swap log
    ended_s: float | None = None  # None: it had not ended when the acquire was answered
    why: str = ""  # of an eviction, its reason; of a load, its failure


#: Most moves in one account.
MOVES_MAX = 128


class Account(msgspec.Struct, frozen=True, omit_defaults=True):
    """The moves that a traced acquire waited for.

    These are loads of its components that were under way or ended after it came, for any acquire;
    and evictions that made room for it.
    """

    answered_s: float
    record: int  # number of the answer in the swap log
    waits_for: str = ""  # in the swap log's words; "": it did not wait for other leases
    moves: tuple[Move, ...] = ()
    left_out: int = 0  # moves beyond MOVES_MAX


class Granted(Reply, frozen=True, tag="granted", omit_defaults=True):
    """`placements` lists the components that the asking session itself registered."""

    placements: tuple[Placement, ...]
    waited_s: float = 0.0
    loaded: bool = False  # it waited for a copy
    names: tuple[str, ...] = ()  # all granted components, if a name asked for has parts
    account: Account | None = None  # if the acquire was traced
    spent: bool = False  # the leases that the acquire named as `spare` have ended


class Refused(Reply, frozen=True, tag="refused", omit_defaults=True):
    code: Code
    message: str
    account: Account | None = None  # if the acquire was traced


class Victim(msgspec.Struct, frozen=True):
    """A component that would be evicted. The daemon writes `bytes_back` of it back first."""

    name: str
    nbytes: int
    bytes_back: int
    reason: str
    part_of: str = ""


class InTheWay(msgspec.Struct, frozen=True):
    """A component or family that the acquire would wait for, and the reason, for people."""

    name: str
    why: str


class Forecast(Reply, frozen=True, tag="forecast"):
    """The effect of acquiring `names` now, in bytes and seconds.

    The daemon would evict `victims` at once; if `waits_for` is not empty, the victims depend on the
    time at which its holders give way. `seconds`: until the grant, if holders, waiters and copies
    before it take as long as they usually do; None if that is `unknown`, and why, for people.
    """

    names: tuple[str, ...]
    bytes_in: int
    bytes_coming: int  # loading already
    bytes_back: int
    victims: tuple[Victim, ...]
    waits_for: tuple[InTheWay, ...]
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

    @property
    def inside(self) -> bool:
        """Whether it occupies device memory."""
        return self.state not in ("filling", "absent", "waiting")


class SessionStatus(msgspec.Struct, frozen=True):
    session: int
    label: str
    leases: int
    waiting: int
    #: Whether the daemon keeps messages that the session does not read, or cannot receive.
    unread: bool = False
    #: In whole chunks: its permanent components; and the most of its others that one of its leases
    #: held at once.
    stays_bytes: int = 0
    turn_bytes: int = 0


class ProcessStatus(msgspec.Struct, frozen=True):
    """Device memory of a process, in bytes. swapd itself is one of the processes."""

    pid: int
    name: str
    nbytes: int


class WaitStatus(msgspec.Struct, frozen=True):
    """An acquire that has no answer yet. `names`: the first NAMES_SHOWN of `count`."""

    session: int
    names: tuple[str, ...]
    count: int
    waited_s: float
    why: str  # what it waits for, for people; "" if only for copies
    #: Until its grant; None: see `unknown`, both as in `Forecast`.
    seconds: float | None = None
    unknown: str = ""


class CopyStatus(msgspec.Struct, frozen=True):
    """A copy between host and device that was ordered and has not ended."""

    name: str
    direction: Literal["in", "out"]
    nbytes: int
    #: Since it is under way, as far as known; None: it waits for the others of its direction.
    since_s: float | None
    #: Speed of the last copy of that direction; None before the first.
    bytes_per_s: float | None


class Tally(msgspec.Struct, omit_defaults=True):
    """Counts of one component, or of a family. `wasted`: those of its loads at most WASTED_S after
    it had left for others; `skips`: acquires with a timeout of 0 that did not get it; `refusals` by
    code, once for each request that named it; `waits`: grants of acquires that named it, in the
    classes of `Counts.wait_s`."""

    loads: int = 0
    wasted: int = 0
    evictions: int = 0
    hits: int = 0
    skips: int = 0
    refusals: dict[str, int] = {}
    waits: list[int] = []


class Histogram(msgspec.Struct):
    """Durations in seconds. `counts` has one number more than `bounds`: the last class is open."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0


class Counts(msgspec.Struct):
    """Counts since the daemon's start. `of` has them by component or family; under "" those of all
    others, and of all that are gone."""

    of: dict[str, Tally]
    wait_s: Histogram  # from an acquire to its grant
    copy_in_s: Histogram  # from the order of a copy to its end
    copy_out_s: Histogram
    hold_s: Histogram  # from a grant to its release


#: A load is wasted if its component left at most so long before it, to make room or for a member
#: of its alternating group.
WASTED_S = 60.0
#: So many wasted loads, the last ones, say how it goes now.
WASTED_LAST = 8


class Wasted(msgspec.Struct, frozen=True):
    """The last WASTED_LAST wasted loads; parts of a family in a row count as one.

    `copying_s`: seconds of `took_s` in which loads were copied. `hits`: uses, in `took_s`, that
    found their component on the device.
    """

    ago_s: float  # since the last one
    took_s: float  # from the first one to the last one
    copying_s: float
    hits: int


#: Most waiting acquires, and copies, that a status lists; and most names of one acquire.
WAITS_SHOWN = 50
NAMES_SHOWN = 8


class KeptStatus(msgspec.Struct, frozen=True):
    """A host copy that no component uses: the last one that did, and the content."""

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
    #: Host copies that no component uses, the least recently used first: a part of
    #: `host_copy_bytes`.
    kept: tuple[KeptStatus, ...] = ()
    keep_host_bytes: int = 0  # most of them, bytes: `--keep-host`
    #: The labels of starting processes: the first one starts, the others wait for it.
    starting: tuple[str, ...] = ()
    #: Host copies that are page-locked for the device, and those whose page-locking failed.
    pinned_bytes: int = 0
    unpinned_bytes: int = 0
    #: The longest waits and the next copies, WAITS_SHOWN at most of each.
    waits: tuple[WaitStatus, ...] = ()
    copies: tuple[CopyStatus, ...] = ()
    counts: Counts | None = None
    wasted: Wasted | None = None  # None before there were WASTED_LAST
    #: Records of the swap log so far, and those that its file lost because the disk did not take
    #: them.
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


class GivenBack(msgspec.Struct, frozen=True, tag="given_back"):
    """Releases of leases that nobody uses. They cost no answer, and may come twice."""

    releases: tuple[Release, ...]


class HandBack(msgspec.Struct, frozen=True, tag="hand_back"):
    """Comes with one descriptor, before the Register of this number: a host copy that an earlier
    daemon made, sealed against writing. The daemon may take it in place of a new one."""

    request: Id


class LetGo(msgspec.Struct, frozen=True, tag="let_go"):
    """Sent instead of Hello: this process has unmapped everything of the ended session with this
    token. The daemon closes the connection when it has noted that. It believes only the process
    whose session it was."""

    token: bytes


FromClient = Hello | Revoked | Dropped | GivenBack | HandBack | LetGo


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
    uuid: str = ""  # the same GPU may have another number in another process


class Master(msgspec.Struct, frozen=True, tag="master"):
    """Comes with the host copy's descriptor. `slot` is the component's word on the board.

    `request` is the Register or Update that it answers. A `filled` host copy already has the
    requested content: it is shared and read-only. A `certain` one need not be compared.
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
    the file. A descriptor that is not `writable` cannot be mapped for writing (on a GPU the
    worker itself maps read-only).
    """

    numbers: tuple[int, ...]
    writable: bool = False


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Another allocator gets the memory of these files: unmap and close them, then send Dropped."""

    numbers: tuple[int, ...]
    ticket: int


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """An early grant's residency will never be complete: the lease is void."""

    name: str
    generation: int
    why: str


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    """The component left the device: unmap this generation; answer with Revoked if `ack`."""

    name: str
    generation: int
    ack: bool = False


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A mutable component's bytes are in its host copy; its chunks may be overwritten from now on.

    `anew`: its bytes are lost (scratch). It begins anew as zeros, and ignores its host copy.
    """

    name: str
    generation: int
    anew: bool = False


class Wanted(msgspec.Struct, frozen=True, tag="wanted"):
    """An acquire waits (or no longer waits) for the memory of a component that you hold."""

    name: str
    wanted: bool


class Hurry(msgspec.Struct, frozen=True, tag="hurry"):
    """An acquire waits (or no longer waits) for leased memory. Release at once the leases that no
    thread of your process uses, and that you keep for later uses."""

    waits: bool


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The last message before the daemon closes the lifeline."""

    code: Code
    message: str


FromDaemon = Welcome | Master | Files | Drop | Broken | Revoke | Saved | Wanted | Hurry | Goodbye

#: Errors of the decoders for bytes that are no message: invalid UTF-8 and endless nesting do not
#: raise MsgspecError.
NOT_A_MESSAGE = (msgspec.MsgspecError, ValueError, RecursionError)

#: Errors of the encoder for values that no message can hold: a number of more than 64 bits,
#: invalid UTF-8.
NOT_ENCODABLE = (msgspec.MsgspecError, OverflowError, TypeError, ValueError, RecursionError)

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(AnyRequest).decode
decode_reply = msgspec.msgpack.Decoder(AnyReply).decode
decode_from_client = msgspec.msgpack.Decoder(FromClient).decode
decode_from_daemon = msgspec.msgpack.Decoder(FromDaemon).decode
