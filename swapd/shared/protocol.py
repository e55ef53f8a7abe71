"""What daemon and client say to each other: messages, codes, encoding.

Lives here: every struct that crosses a process border, and the one protocol version.
May not live here: sockets, clocks, state. msgspec only.

Two channels carry these. `rpc` (ZeroMQ) carries requests and exactly one reply to each.
The `lifeline` (a Unix SEQPACKET socket) carries the handshake, file descriptors, and what
the daemon says unasked. Unknown fields are ignored and missing ones take their default,
so fields may be added; a meaning may never change. Tags are explicit for the same reason.
"""

from typing import Annotated, Literal

import msgspec

from swapd.shared.text import TEXT_MAX_CHARS

VERSION = 7

#: Bytes of the session token. A rpc identity is the token followed by a channel number.
TOKEN_BYTES = 16

#: Largest request. A longer one ends the connection it came by, so no client sends it.
REQUEST_MAX_BYTES = 1 << 20

#: Most requests of one session that wait for their reply. One more is refused.
UNANSWERED_MAX = 16_384

#: Largest lifeline packet, either direction.
LIFELINE_MAX_BYTES = 64 * 1024

#: Longest component name, and most names in one acquire.
NAME_MAX_CHARS = TEXT_MAX_CHARS
NAMES_MAX = 1024

#: Most segments of one component: a word of the board counts those that have arrived.
SEGMENTS_MAX = 0xFFFE

#: No number on the wire is larger, or less than its negative: sums and differences of a few stay
#: within the 64 bits that an encoder takes.
NUMBER_MAX = 1 << 62

Number = Annotated[int, msgspec.Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]
#: Names a request, a lease, a ticket.
Id = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
#: Bytes as people give them: what is no size is refused in words (`swapd.core.requests`).
Size = Number
#: Uses of one lease that were not told: a client tells of them about once a second.
USES_MAX = 1 << 32
Uses = Annotated[int, msgspec.Meta(ge=0, le=USES_MAX)]

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

#: What may be on the device: components, and workspaces, each for one lease.
ComponentKind = Literal["component", "workspace", "scratch"]

#: Memory that comes in as zeros, and what becomes of its contents when it leaves the device:
#: nothing, or they are saved and restored. "": a component as any other.
Scratch = Literal["", "dropped", "saved"]

#: Parts of a component as (offset, bytes): none empty, ascending, apart from each other.
Ranges = tuple[tuple[int, int], ...]

#: Most ranges that are told of one component.
RANGES_MAX = 4096

#: What one acquires that starts, in messages.
THE_START = "the turn to start"

#: Of a family, the part that is in no block: it is needed from first to last, so it is kept first.
REST = "rest"


def part_name(family: str, part: str) -> str:
    """What a part of a family is called."""
    return f"{family}/{part}"


def rest_of(family: str) -> str:
    """What the part of a family is called that is in no block."""
    return part_name(family, REST)


#: Chunks as runs of neighbours: ((first chunk, count), ...), in the order of the bytes.
Runs = tuple[tuple[int, int], ...]


class Placement(msgspec.Struct, frozen=True):
    """Where one residency of a component is: valid for this generation only."""

    name: str
    generation: int
    runs: Runs
    transient: bool = False  # it leaves the device when nobody holds it
    contents: int = 0  # of scratch: the generation that came in as zeros, and has them since


# --- rpc, client to daemon ---------------------------------------------------------------


class Request(msgspec.Struct, frozen=True, tag_field="op", omit_defaults=True):
    """Base of all requests. `id` is unique within the session, and names the reply."""

    id: Id


class Register(Request, frozen=True, tag="register"):
    """Reserve a name and have a host copy made; its descriptor comes by the lifeline."""

    name: str
    nbytes: Size
    layout: str = ""  # hash of what lies where in the host copy, opaque to the daemon
    policy: Policy = "lru"
    group: str | None = None
    mutable: bool = False
    segments: tuple[Size, ...] = ()  # where each ends, bytes, ascending; () is one segment
    part_of: str = ""  # a name that stands for all its parts; no component has it
    content: str = ""  # what its bytes are: equal contents and layouts share one host copy
    transient: bool = False  # a part: it leaves when released, until a Resize keeps it
    scratch: Scratch = ""  # mutable, as its worker writes to it
    filled: bool = False  # scratch that is "saved": its host copy has its contents, as others' have


class Commit(Request, frozen=True, tag="commit"):
    """The new host copy is filled and unmapped in the worker: from now on it may be acquired.

    Updates of several components may be committed together: all of them in one step, or none.
    """

    name: str
    also: tuple[str, ...] = ()


class Update(Request, frozen=True, tag="update"):
    """Have a new host copy made for a clean component, beside the one it has.

    Its descriptor comes by the lifeline. Commit puts it in the place of the old one, in one step.
    """

    name: str


class GiveUp(Request, frozen=True, tag="give_up"):
    """The Update of this id will not be committed: drop the new host copy."""

    name: str
    update: Id


class Unregister(Request, frozen=True, tag="unregister"):
    name: str


class Acquire(Request, frozen=True, tag="acquire"):
    """All of `names`, or none. The request's id becomes the lease's id.

    A family's name stands for all its parts.
    """

    names: tuple[str, ...]
    agent: Number = 0  # the thread or task that waits: what it holds is not released meanwhile
    timeout_s: float | None = None
    priority: Number = 0
    await_registration: bool = False  # wait for names that nobody has registered yet
    early: bool = False  # granted when the copies are ordered; the board says what has arrived
    traced: bool = False  # the reply has an Account


class AcquireWorkspace(Request, frozen=True, tag="acquire_workspace"):
    """Device memory for the worker's own allocator: that much less is swapd's meanwhile.

    Answered and given back as an acquire. The daemon rounds up to whole chunks.
    """

    nbytes: Size
    agent: Number = 0
    timeout_s: float | None = None
    priority: Number = 0
    traced: bool = False


class AcquireStart(Request, frozen=True, tag="acquire_start"):
    """Be the only process that starts on this device: what is free is measured undisturbed.

    Answered and given back as an acquire. One that holds any lease is refused.
    """

    timeout_s: float | None = None
    traced: bool = False


class Used(msgspec.Struct, frozen=True):
    """What of scratch that is "saved" is worth it, from now on: its owner says so."""

    name: Name
    number: Id  # counts up: what was said earlier and comes later is ignored
    ranges: tuple[tuple[Size, Size], ...]


class Release(Request, frozen=True, tag="release"):
    """Give a lease back. Answered only if `ack`; releasing twice does nothing."""

    lease: Id
    ack: bool = False
    again: Uses = 0  # how often its worker took it again without a message
    used: tuple[Used, ...] = ()


class Cancel(Request, frozen=True, tag="cancel"):
    """Forget an acquire, whether it still waits or was granted meanwhile. Not answered."""

    acquire: Id


class Prefetch(Request, frozen=True, tag="prefetch"):
    """Bring these in when there is room. Answered at once; takes no lease."""

    names: tuple[str, ...]
    #: What may be evicted for them, if it is idle: components, families. None: whatever is idle. If
    #: it is given, names that are not registered are left out, here and in `names`.
    over: tuple[Name, ...] | None = None


class Forecast(Request, frozen=True, tag="forecast"):
    """What would acquiring these do now? Answered at once; changes nothing."""

    names: tuple[str, ...]


class Resize(Request, frozen=True, tag="resize"):
    """Keep so many bytes of a family on the device, spread evenly; the rest passes through.

    At most as many as leave room for the largest part that passes through. None: as many as leave
    room for two of them. Anybody may ask.
    """

    name: str
    resident_bytes: Size | None = None


class Pin(Request, frozen=True, tag="pin"):
    """Have a component, or the parts of a family that are kept, stay once they are in; or no more.

    Until it is unregistered, or unpinned. Anybody may ask.
    """

    name: str
    unpin: bool = False


class EvictNow(Request, frozen=True, tag="evict_now"):
    """Have a component, or the parts of a family, leave at once, though nobody needs the room.

    Accepted when the eviction is ordered: what is to be saved is on its way then. Of a family what
    never leaves stays. Anybody may ask.
    """

    name: str


class Status(Request, frozen=True, tag="status"):
    pass


#: Requests that are answered with a lease.
AnyAcquire = Acquire | AcquireWorkspace | AcquireStart

#: Requests that may change something.
AnyOrder = (
    Register
    | Commit
    | Update
    | GiveUp
    | Unregister
    | Acquire
    | AcquireWorkspace
    | AcquireStart
    | Release
    | Cancel
    | Prefetch
    | Resize
    | Pin
    | EvictNow
)

AnyRequest = AnyOrder | Forecast | Status


# --- rpc, daemon to client ---------------------------------------------------------------


class Reply(msgspec.Struct, frozen=True, tag_field="op"):
    """Base of all replies. `id` is that of the request."""

    id: int


class Done(Reply, frozen=True, tag="done"):
    pass


class Move(msgspec.Struct, frozen=True, omit_defaults=True):
    """One load, or one eviction. `_s`: the daemon's CLOCK_MONOTONIC."""

    kind: Literal["load", "evict"]
    name: str
    nbytes: int  # what is copied: of an eviction, what is written back
    began_s: float  # when it was ordered
    record: int  # of the swap log: its order
    ended_s: float | None = None  # None: it had not, when the acquire was answered
    why: str = ""  # of an eviction the reason; of a load how it failed


#: Most moves in one account.
MOVES_MAX = 128


class Account(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an acquire that is traced waited for.

    Loads of what it named that ended since it came, or had not ended, whoever they began for; and
    evictions that made room for it.
    """

    answered_s: float
    record: int  # of the swap log: the answer
    waits_for: str = ""  # as the swap log says it; "": it did not wait for others
    moves: tuple[Move, ...] = ()
    left_out: int = 0  # moves beyond MOVES_MAX


class Granted(Reply, frozen=True, tag="granted", omit_defaults=True):
    """`placements` lists the components that the asking session itself registered."""

    placements: tuple[Placement, ...]
    waited_s: float = 0.0
    loaded: bool = False  # a copy had to be made, or waited for
    names: tuple[str, ...] = ()  # of all that was granted, if a name asked for has parts
    account: Account | None = None  # of one that was traced


class Refused(Reply, frozen=True, tag="refused", omit_defaults=True):
    code: Code
    message: str
    account: Account | None = None  # of one that was traced


class Victim(msgspec.Struct, frozen=True):
    """What would be evicted. `bytes_back` of it are written back first."""

    name: str
    nbytes: int
    bytes_back: int
    reason: str
    part_of: str = ""


class InTheWay(msgspec.Struct, frozen=True):
    """What would have to be waited for, and why, for people. Of a family its name."""

    name: str
    why: str


class ForecastReply(Reply, frozen=True, tag="forecast"):
    """What acquiring `names` would do now. Bytes are bytes.

    `victims` are evicted at once, unless somebody must be waited for: then it depends on when
    they give way. `seconds` is what the copies alone would take, by what was measured; None if
    nothing was.
    """

    names: tuple[str, ...]
    bytes_in: int
    bytes_coming: int  # on their way already
    bytes_back: int
    victims: tuple[Victim, ...]
    waits_for: tuple[InTheWay, ...]
    seconds: float | None
    bytes_per_s: float | None

    @property
    def at_once(self) -> bool:
        """Whether nobody has to be waited for."""
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
    pinned: bool = False  # somebody asked that it stays; its policy is "permanent" meanwhile


class SessionStatus(msgspec.Struct, frozen=True):
    session: int
    label: str
    leases: int
    waiting: int
    #: Whether messages are kept for it that it does not read, or that cannot be sent.
    unread: bool = False
    #: In chunks, as they are taken: what it registered to stay, and the most of all else that it
    #: registered and one of its leases held at once.
    stays_bytes: int = 0
    turn_bytes: int = 0


class ProcessStatus(msgspec.Struct, frozen=True):
    """What a process holds of the device, in bytes; swapd itself included."""

    pid: int
    name: str
    nbytes: int


class StatusReply(Reply, frozen=True, tag="status"):
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
    notes: tuple[str, ...] = ()  # what people should know about the device
    #: Host copies of what was unregistered, in which tensors of connected processes still lie.
    private_bytes: int = 0
    #: The labels of those that start: the first does, the others wait for it.
    starting: tuple[str, ...] = ()
    #: Of host copies: what the device reads and writes by itself, and what was refused to be so.
    pinned_bytes: int = 0
    unpinned_bytes: int = 0


AnyReply = Done | Granted | Refused | ForecastReply | StatusReply


# --- lifeline ----------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: Number
    label: Name = ""


class Revoked(msgspec.Struct, frozen=True, tag="revoked"):
    """This generation is no longer mapped in the worker."""

    name: Name
    generation: Number  # one that there never was is ignored


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The files of the Drop with this ticket are neither mapped nor imported any more."""

    ticket: Id


class LetGo(msgspec.Struct, frozen=True, tag="let_go"):
    """Instead of a hello: of the session with this token, which is over, nothing is mapped in this
    process any more. The daemon closes the connection when it knows, and believes nobody but the
    process whose session it was."""

    token: bytes


FromClient = Hello | Revoked | Dropped | LetGo


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

    `request` is the Register or Update it was made for. If it is `filled`, it has the content
    that was asked for already, is shared, and cannot be written.
    """

    name: str
    nbytes: int
    slot: int = 0
    request: int = 0
    filled: bool = False


class Files(msgspec.Struct, frozen=True, tag="files"):
    """Comes with one descriptor for each number: where the session's chunks are.

    File i holds chunks i * chunks_per_file and on. Sent before the first grant that lies on
    it; through one that is not `writable` nothing can be mapped for writing (on a GPU it is
    the worker that maps for reading only).
    """

    numbers: tuple[int, ...]
    writable: bool = False


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Their memory goes to somebody else's allocator: let go of it, then say Dropped."""

    numbers: tuple[int, ...]
    ticket: int


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """A residency that was granted early will never be complete: the lease is void."""

    name: str
    generation: int
    why: str


class Revoke(msgspec.Struct, frozen=True, tag="revoke"):
    """The component left the device: unmap this generation; answer with Revoked if `ack`."""

    name: str
    generation: int
    ack: bool = False


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A mutable component's bytes are in its host copy; its chunks may hold others' from now on.

    `anew`: of scratch, they are nowhere: it begins anew as zeros, whatever its host copy has.
    """

    name: str
    generation: int
    anew: bool = False


class Wanted(msgspec.Struct, frozen=True, tag="wanted"):
    """Somebody waits (or no longer waits) for the memory of a component you hold."""

    name: str
    wanted: bool


class Hurry(msgspec.Struct, frozen=True, tag="hurry"):
    """Somebody waits (or no longer waits) for memory that leases hold: those that nobody in your
    process uses, and that you keep for who may come back, you give back at once."""

    waits: bool


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """Last words before the daemon closes the lifeline."""

    code: Code
    message: str


FromDaemon = Welcome | Master | Files | Drop | Broken | Revoke | Saved | Wanted | Hurry | Goodbye

#: What the decoders raise for bytes that are no message: text that is no UTF-8 and nesting
#: without end are not MsgspecErrors.
NOT_A_MESSAGE = (msgspec.MsgspecError, ValueError, RecursionError)

#: What the encoder raises for what no message can hold: a number of more than 64 bits, text that
#: is no UTF-8.
NOT_ENCODABLE = (msgspec.MsgspecError, OverflowError, TypeError, ValueError, RecursionError)

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(AnyRequest).decode
decode_reply = msgspec.msgpack.Decoder(AnyReply).decode
decode_from_client = msgspec.msgpack.Decoder(FromClient).decode
decode_from_daemon = msgspec.msgpack.Decoder(FromDaemon).decode
