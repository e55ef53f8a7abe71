"""The events that the core handles. Data only.

Time is in the event (`now`, seconds of a monotonic clock): the core has no clock. (session,
request) names a request, and a generation names the copy that makes or ends it. The tag of an
event, an action or a request is the `kind` of its record in the swap log.
"""

from typing import Literal

import msgspec

from swapd.shared.protocol import AnyOrder, Code, Runs


class Event(msgspec.Struct, frozen=True, tag_field="op", omit_defaults=True):
    now: float


class SessionOpened(Event, frozen=True, tag="session_opened"):
    session: int
    label: str


class SessionGone(Event, frozen=True, tag="session_gone"):
    """The lifeline ended. `alive`: the process still ran, and may still write. `ending`: it will
    end soon, without being told."""

    session: int
    alive: bool = False
    ending: bool = False


class SessionEnds(Event, frozen=True, tag="session_ends"):
    """The lifeline of a session with much to end has closed: end at most `most` of its things now.

    The caller repeats this event, with other events in between, until `Residency.has_more` is
    false. Then it sends `SessionGone`.
    """

    session: int
    most: int
    alive: bool = False
    ending: bool = False


class ProcessExited(Event, frozen=True, tag="process_exited"):
    """The process of a session that went `alive` has ended: its mappings are gone."""

    session: int


class UnmapAck(Event, frozen=True, tag="let_go"):
    """The process of a session that went `alive` has unmapped all it could write to."""

    session: int


class SessionRequest(Event, frozen=True, tag="asked"):
    """A session makes a request that passed `problem_with`.

    The session and the id of the request name all answers to it.
    """

    session: int
    request: AnyOrder


class HostCopyMade(Event, frozen=True, tag="host_copy_made"):
    uid: int


class HostCopySealed(Event, frozen=True, tag="host_copy_sealed"):
    uid: int


class HostCopyFailed(Event, frozen=True, tag="host_copy_failed"):
    """A host copy could not be made or sealed.

    `short`: host memory or descriptors were missing, and nothing was made.
    """

    uid: int
    code: Code
    why: str
    short: bool = False


class HostCopyFound(Event, frozen=True, tag="host_copy_found"):
    """An earlier daemon kept this host copy for no component. It comes before the first session,
    and once for each content. `uid`: below 0, and no other host copy's."""

    uid: int
    name: str
    nbytes: int
    content: str
    layout: str
    part_of: str = ""


class HostCopiesPinned(Event, frozen=True, tag="host_copies_pinned"):
    """For the record: progress of page-locking host copies, which makes copying them fast.

    `nbytes` of `of` bytes are page-locked; `took_s` is the time since the device began with the
    part that it reports here; `refused` is why it will not lock the rest, or empty.
    """

    nbytes: int
    of: int
    took_s: float
    refused: str = ""


class RevokeAck(Event, frozen=True, tag="revoked"):
    session: int
    name: str
    generation: int


class CopiedIn(Event, frozen=True, tag="copied_in"):
    """`took_s`: how long the copy ran if it stood still for more urgent ones meanwhile, else 0."""

    generation: int
    took_s: float = 0.0


class CopyStopped(Event, frozen=True, tag="copy_stopped"):
    """A load ended early, because of `StopCopy`. The contents of its chunks are undefined."""

    generation: int


class CopiedOut(Event, frozen=True, tag="copied_out"):
    generation: int


class CopyFailed(Event, frozen=True, tag="copy_failed"):
    """A copy or a loan of a workspace failed. The chunks of a workspace belong to the arena
    again."""

    generation: int
    why: str


class Lent(Event, frozen=True, tag="lent"):
    """The driver has the chunks of a workspace: its session may allocate."""

    generation: int


class Reclaimed(Event, frozen=True, tag="reclaimed"):
    """The arena has chunks of a workspace again: `runs`, with another event for the rest; without
    `runs`, all that remained."""

    generation: int
    runs: Runs = ()


class Dropping(Event, frozen=True, tag="dropping"):
    """The daemon told these sessions to let go of the memory that this `Lend` gives away."""

    generation: int
    sessions: tuple[int, ...]


class DropAck(Event, frozen=True, tag="dropped"):
    """A session has let go of that memory."""

    session: int
    generation: int


class Unread(Event, frozen=True, tag="unread"):
    """The daemon keeps `count` messages that a session must hear, and the session has just read as
    much as it reads for now; 0: it has read all.

    `error`: why the daemon cannot send them although the session reads.
    """

    session: int
    channel: Literal["lifeline", "replies"]
    count: int
    error: str = ""


class DeviceDown(Event, frozen=True, tag="device_down"):
    """The device copies, lends and takes back nothing any more, until the daemon is restarted."""

    why: str


class Tick(Event, frozen=True, tag="tick"):
    """Time passed: `Residency.next_deadline` was reached."""


class RulesChanged(Event, frozen=True, tag="rules_changed"):
    """Decisions follow these rules from now on, also for requests that wait and for debts."""

    ack_timeout_s: float
    residency_factor: float
    residency_bound_s: float
    patience_s: float
    overtake: int = 16
    turn_s: float = 600.0
    keep_host: int = 0


class Stopping(Event, frozen=True, tag="stopping"):
    """Refuse all waiting and new requests; leases go on until their release."""


#: Events that end a slow order, named by its generation.
Over = CopiedIn | CopyStopped | CopiedOut | CopyFailed | Lent | Reclaimed

AnyEvent = (
    SessionOpened
    | SessionEnds
    | SessionGone
    | ProcessExited
    | UnmapAck
    | SessionRequest
    | HostCopyMade
    | HostCopySealed
    | HostCopyFailed
    | HostCopyFound
    | HostCopiesPinned
    | RevokeAck
    | CopiedIn
    | CopyStopped
    | CopiedOut
    | CopyFailed
    | Lent
    | Reclaimed
    | Dropping
    | DropAck
    | Unread
    | DeviceDown
    | RulesChanged
    | Tick
    | Stopping
)
