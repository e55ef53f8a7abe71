"""The events that the core handles. Data only.

`now` is in seconds of a monotonic clock, as the core has none. A generation names the copy that
begins or ends it. The tag of an event, action or request is the `kind` of its record in the swap
log.
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
    """The lifeline ended. `alive`: the process still runs and may write. `ending`: it will exit
    soon."""

    session: int
    alive: bool = False
    ending: bool = False


class SessionEnds(Event, frozen=True, tag="session_ends"):
    """The lifeline of a large session ended: end at most `most` of its waiters, components and
    leases. The caller repeats this, with other events in between, until `Residency.has_more` is
    false, and then sends `SessionGone`."""

    session: int
    most: int
    alive: bool = False
    ending: bool = False


class ProcessExited(Event, frozen=True, tag="process_exited"):
    """The process of a session that went `alive` has exited: its mappings are gone."""

    session: int


class UnmapAck(Event, frozen=True, tag="let_go"):
    """The process of a session that went `alive` has unmapped all that it could write to."""

    session: int


class SessionRequest(Event, frozen=True, tag="asked"):
    """A request that passed `problem_with`. All answers name its session and id."""

    session: int
    request: AnyOrder


class HostCopyMade(Event, frozen=True, tag="host_copy_made"):
    uid: int


class HostCopySealed(Event, frozen=True, tag="host_copy_sealed"):
    uid: int


class HostCopyFailed(Event, frozen=True, tag="host_copy_failed"):
    """A host copy could not be made or sealed. `short`: for want of memory or descriptors."""

    uid: int
    code: Code
    why: str
    short: bool = False


class HostCopyFound(Event, frozen=True, tag="host_copy_found"):
    """An earlier daemon kept this host copy. Comes before the first session, once for each content;
    `uid` is negative."""

    uid: int
    name: str
    nbytes: int
    content: str
    layout: str
    part_of: str = ""


class MemoryMissing(Event, frozen=True, tag="memory_missing"):
    """Workers of the daemon before use the memory of these chunks until their leases end. Comes
    before the first session."""

    runs: Runs


class HostCopiesPinned(Event, frozen=True, tag="host_copies_pinned"):
    """For the record: `nbytes` of `of` bytes of host copies are page-locked, which makes copies
    fast. `took_s`: seconds since the device began this part. `refused`: why it will not lock the
    rest."""

    nbytes: int
    of: int
    took_s: float
    refused: str = ""


class RevokeAck(Event, frozen=True, tag="revoked"):
    session: int
    name: str
    generation: int


class CopiedIn(Event, frozen=True, tag="copied_in"):
    """`took_s`: seconds of copying, if the copy stood still for more urgent ones; else 0."""

    generation: int
    took_s: float = 0.0


class CopyStopped(Event, frozen=True, tag="copy_stopped"):
    """A load ended early, after `StopCopy`. Its chunks have undefined contents."""

    generation: int


class CopiedOut(Event, frozen=True, tag="copied_out"):
    generation: int


class CopyFailed(Event, frozen=True, tag="copy_failed"):
    """A copy or a loan failed. The chunks of a workspace belong to the arena again."""

    generation: int
    why: str


class Lent(Event, frozen=True, tag="lent"):
    """The driver has the chunks of a workspace, so the session may allocate."""

    generation: int


class Reclaimed(Event, frozen=True, tag="reclaimed"):
    """The arena has the chunks `runs` of a workspace again; without `runs`, all remaining ones."""

    generation: int
    runs: Runs = ()


class Dropping(Event, frozen=True, tag="dropping"):
    """The daemon told these sessions to let go of the memory of a `Lend`."""

    generation: int
    sessions: tuple[int, ...]


class DropAck(Event, frozen=True, tag="dropped"):
    """A session has let go of the memory of a `Lend`."""

    session: int
    generation: int


class Unread(Event, frozen=True, tag="unread"):
    """A session has not read `count` messages; 0: it has read all. Comes when the first must wait,
    and whenever the session has read some. `error`: why the daemon cannot send them although it
    reads."""

    session: int
    channel: Literal["lifeline", "replies"]
    count: int
    error: str = ""


class DeviceDown(Event, frozen=True, tag="device_down"):
    """The device copies, lends and reclaims nothing until a restart of the daemon."""

    why: str


class Tick(Event, frozen=True, tag="tick"):
    """`Residency.next_deadline` was reached."""


class RulesChanged(Event, frozen=True, tag="rules_changed"):
    """New rules, by the names of `Rules`. They apply to waiting requests and debts, too."""

    ack_timeout_s: float
    residency_factor: float
    residency_bound_s: float
    patience_s: float
    overtake: int = 16
    turn_s: float = 600.0
    keep_host: int = 0
    overtake_of: tuple[tuple[str, int], ...] = ()


class Stopping(Event, frozen=True, tag="stopping"):
    """Refuse all waiting and new requests. Leases go on until their release."""


#: The events that end a slow action, named by its generation.
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
    | MemoryMissing
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
