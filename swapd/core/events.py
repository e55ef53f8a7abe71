"""What can happen to the core. Data only.

Time is in the event (`now`, seconds of a monotonic clock): the core has no clock.
Requests are named by (session, request); copies by the generation they make or end.
"""

import msgspec

from swapd.shared.protocol import Code, Policy


class Event(msgspec.Struct, frozen=True, tag_field="event"):
    now: float


class SessionOpened(Event, frozen=True, tag="session_opened"):
    session: int
    label: str


class SessionGone(Event, frozen=True, tag="session_gone"):
    """The lifeline ended. `alive`: the process was still there, and may still write."""

    session: int
    alive: bool = False


class SessionEnds(Event, frozen=True, tag="session_ends"):
    """The lifeline ended, and the session has much: at most so much of it ends now.

    Again, until `Residency.has_more` than that says no; then comes `SessionGone`. Others have
    their turn in between.
    """

    session: int
    most: int
    alive: bool = False


class ProcessExited(Event, frozen=True, tag="process_exited"):
    """The process of a session that went `alive` has ended: its mappings are gone."""

    session: int


class LetGo(Event, frozen=True, tag="let_go"):
    """The process of a session that went `alive` has unmapped all it could write to."""

    session: int


class Register(Event, frozen=True, tag="register"):
    session: int
    request: int
    name: str
    nbytes: int
    policy: Policy = "lru"
    group: str | None = None
    mutable: bool = False
    segments: tuple[int, ...] = ()  # not looked at: for who tells the worker what has arrived
    part_of: str = ""  # the family that it is a part of
    content: str = ""  # what its bytes will be: masters of the same content share them
    passing: bool = False  # a part that is kept only once a Resize says so


class MasterMade(Event, frozen=True, tag="master_made"):
    uid: int


class Commit(Event, frozen=True, tag="commit"):
    """The master that was made last for this component is filled; of `also` those too.

    Several are updates, which take place together or not at all.
    """

    session: int
    request: int
    name: str
    also: tuple[str, ...] = ()


class MasterSealed(Event, frozen=True, tag="master_sealed"):
    uid: int


class MasterFailed(Event, frozen=True, tag="master_failed"):
    """A master could not be made or sealed."""

    uid: int
    code: Code
    why: str


class Update(Event, frozen=True, tag="update"):
    """A new master is to be made for a component, beside the one it has."""

    session: int
    request: int
    name: str


class GiveUp(Event, frozen=True, tag="give_up"):
    """The update that this request began will not be committed: the component stays what it is."""

    session: int
    request: int
    name: str
    update: int


class Unregister(Event, frozen=True, tag="unregister"):
    session: int
    request: int
    name: str


class Acquire(Event, frozen=True, tag="acquire"):
    """`deadline` is a point on the clock of `now`. The request's id names the lease.

    `early`: what the session itself registered may still be loading when it is granted.
    """

    session: int
    request: int
    agent: int
    names: tuple[str, ...]
    priority: int = 0
    deadline: float | None = None
    wait: bool = False
    early: bool = False


class AcquireWorkspace(Event, frozen=True, tag="acquire_workspace"):
    """Memory for the session's own allocator. Waits, is granted and released as a lease is."""

    session: int
    request: int
    agent: int
    nbytes: int
    priority: int = 0
    deadline: float | None = None


class Release(Event, frozen=True, tag="release"):
    session: int
    lease: int
    again: int = 0  # uses that were not told, since the lease was kept between them


class Cancel(Event, frozen=True, tag="cancel"):
    """Forget an acquire, waiting or granted."""

    session: int
    acquire: int


class Prefetch(Event, frozen=True, tag="prefetch"):
    session: int
    request: int
    names: tuple[str, ...]


class Resize(Event, frozen=True, tag="resize"):
    """Keep so many bytes of a family; None: as many as there is room for."""

    session: int
    request: int
    name: str
    resident_bytes: int | None = None


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
    """The chunks of a workspace are the arena's again."""

    generation: int


class DeviceDown(Event, frozen=True, tag="device_down"):
    """The device copies, lends and takes back nothing any more, until the daemon is restarted."""

    why: str


class Tick(Event, frozen=True, tag="tick"):
    """Time passed: `Residency.next_deadline` was reached."""


class Stopping(Event, frozen=True, tag="stopping"):
    """Refuse who waits and who comes; leases run on until they are released."""


AnyEvent = (
    SessionOpened
    | SessionEnds
    | SessionGone
    | ProcessExited
    | LetGo
    | Register
    | MasterMade
    | Commit
    | MasterSealed
    | MasterFailed
    | Update
    | GiveUp
    | Unregister
    | Acquire
    | AcquireWorkspace
    | Release
    | Cancel
    | Prefetch
    | Resize
    | Revoked
    | CopiedIn
    | CopiedOut
    | CopyFailed
    | Lent
    | Reclaimed
    | DeviceDown
    | Tick
    | Stopping
)
