"""What can happen to the core. Data only.

Time is in the event (`now`, seconds of a monotonic clock): the core has no clock.
Requests are named by (session, request); copies by the generation they make or end. The tag of an
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
    """The lifeline ended. `alive`: the process was still there, and may still write; `ending`: not
    for long, and nobody need tell it to end."""

    session: int
    alive: bool = False
    ending: bool = False


class SessionEnds(Event, frozen=True, tag="session_ends"):
    """The lifeline ended, and the session has much: at most so much of it ends now.

    Again, until `Residency.has_more` than that says no; then comes `SessionGone`. Others have
    their turn in between.
    """

    session: int
    most: int
    alive: bool = False
    ending: bool = False


class ProcessExited(Event, frozen=True, tag="process_exited"):
    """The process of a session that went `alive` has ended: its mappings are gone."""

    session: int


class LetGo(Event, frozen=True, tag="let_go"):
    """The process of a session that went `alive` has unmapped all it could write to."""

    session: int


class Asked(Event, frozen=True, tag="asked"):
    """A session asks for something: `request`, which nothing is wrong with by itself.

    Its id, and the session, name whatever comes of it.
    """

    session: int
    request: AnyOrder


class HostCopyMade(Event, frozen=True, tag="host_copy_made"):
    uid: int


class HostCopySealed(Event, frozen=True, tag="host_copy_sealed"):
    uid: int


class HostCopyFailed(Event, frozen=True, tag="host_copy_failed"):
    """A master could not be made or sealed."""

    uid: int
    code: Code
    why: str


class HostCopiesPinned(Event, frozen=True, tag="host_copies_pinned"):
    """For the record: how far the device has pinned host copies, which makes their copies fast.

    `nbytes` of the `of` bytes that are to be; `took_s` since it began to pin those that it has not
    told of; `refused` why the rest will not be, if so.
    """

    nbytes: int
    of: int
    took_s: float
    refused: str = ""


class Revoked(Event, frozen=True, tag="revoked"):
    session: int
    name: str
    generation: int


class CopiedIn(Event, frozen=True, tag="copied_in"):
    generation: int


class CopiedOut(Event, frozen=True, tag="copied_out"):
    generation: int


class CopyFailed(Event, frozen=True, tag="copy_failed"):
    """A copy failed, or the lending of a workspace, whose chunks are the arena's again.

    `damaged`: of a copy out whose bytes are now in part in the master only, and in part on
    the device only.
    """

    generation: int
    why: str
    damaged: bool = False


class Lent(Event, frozen=True, tag="lent"):
    """The chunks of a workspace were given back to the driver: its session may allocate."""

    generation: int


class Reclaimed(Event, frozen=True, tag="reclaimed"):
    """The chunks of a workspace are the arena's again: `runs` of them, and the rest is asked for
    again; or what was left to come, if there are none.
    """

    generation: int
    runs: Runs = ()


class Dropping(Event, frozen=True, tag="dropping"):
    """These sessions were told to let go of the memory that this `Lend` gives away."""

    generation: int
    sessions: tuple[int, ...]


class Dropped(Event, frozen=True, tag="dropped"):
    """A session has let go of it."""

    session: int
    generation: int


class Unread(Event, frozen=True, tag="unread"):
    """So many messages that a session must hear are kept for it, and it took the last one it takes
    for now; or it takes all, if `count` is 0.

    `error`: it would read, but this is why they cannot be sent.
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
    """Decisions go by these from now on, also for who waits, or owes something, already."""

    ack_timeout_s: float
    residency_factor: float
    residency_bound_s: float
    patience_s: float


class Stopping(Event, frozen=True, tag="stopping"):
    """Refuse who waits and who comes; leases run on until they are released."""


#: What says of an order that takes a while how it ended, by its generation.
Over = CopiedIn | CopiedOut | CopyFailed | Lent | Reclaimed

AnyEvent = (
    SessionOpened
    | SessionEnds
    | SessionGone
    | ProcessExited
    | LetGo
    | Asked
    | HostCopyMade
    | HostCopySealed
    | HostCopyFailed
    | HostCopiesPinned
    | Revoked
    | CopiedIn
    | CopiedOut
    | CopyFailed
    | Lent
    | Reclaimed
    | Dropping
    | Dropped
    | Unread
    | DeviceDown
    | RulesChanged
    | Tick
    | Stopping
)
