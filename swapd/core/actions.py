"""The actions that the core orders or records. Data only.

MakeHostCopy, SealHostCopy, CopyIn, CopyOut, Lend and Reclaim are slow: each comes back as exactly
one event. SendRevoke with `ack` comes back as RevokeAck, or ends in Fence; Fence comes back as
SessionGone.

Foresee, Foreseen, Lost and Waiting order nothing: they are for readers of the swap log. Evicted
orders nothing either, but the daemon tells a worker when its bytes are in the host copy.
"""

from typing import Literal

import msgspec

from swapd.shared.protocol import Code, Placement, Ranges, Runs

#: Why a component leaves the device.
Reason = Literal[
    "room", "sequential", "alternating", "resized", "unregister", "failed", "update", "asked"
]


#: What came of a component that was loaded ahead. When it was asked for, it was in, or coming, or
#: there had been no room for it. Or before that it left, in vain, or nobody said any more that it
#: follows.
Outcome = Literal["in", "coming", "no_room", "in_vain", "taken_back"]


#: The rank of a load, the most urgent first: 0 if an acquire waits for it, 1 if a prefetch does, 2
#: if nobody does any more; then the `order` of the waiter, or that of generations.
Urgency = tuple[int, ...]


class Action(msgspec.Struct, frozen=True, tag_field="op", omit_defaults=True):
    pass


class MakeHostCopy(Action, frozen=True, tag="make_host_copy"):
    session: int
    uid: int
    name: str
    nbytes: int
    mutable: bool
    segments: tuple[int, ...] = ()
    request: int = 0  # the request whose answer waits for it
    #: The uid of a host copy whose bytes this one shares: a sealed one, or one that shares a sealed
    #: one. 0: the worker fills this one.
    original: int = 0
    replaces: int = 0  # uid of the component's current host copy, if this one will replace it
    empty: bool = False  # it takes no memory: no bytes are ever copied from it or to it
    certain: bool = False  # `original` has the bytes of the content, and nobody need compare


class SealHostCopy(Action, frozen=True, tag="seal_host_copy"):
    uid: int
    name: str


class KeepHostCopy(Action, frozen=True, tag="keep_host_copy"):
    """No component uses this host copy any more. It stays for the next with its content, until
    DropHostCopy."""

    uid: int
    name: str


class DropHostCopy(Action, frozen=True, tag="drop_host_copy"):
    """No component uses this host copy any more, and neither does a copy."""

    uid: int
    name: str


class CopyIn(Action, frozen=True, tag="copy_in"):
    """`only`: for scratch, the ranges to copy; the rest becomes zeros. `in_use`: chunks of the
    device in use from now on, for the record."""

    uid: int
    name: str
    generation: int
    nbytes: int
    runs: Runs
    only: Ranges | None = None  # None: all of it
    in_use: int = 0
    urgency: Urgency = (0,)


class Hasten(Action, frozen=True, tag="hasten"):
    """The load has another rank from now on."""

    name: str
    generation: int
    urgency: Urgency


class StopCopy(Action, frozen=True, tag="stop_copy"):
    """End a load that nobody waits for: its chunks are needed, or its component is gone.

    `CopyStopped` is the event of its end, unless it has ended by then.
    """

    name: str
    generation: int


class CopyOut(Action, frozen=True, tag="copy_out"):
    uid: int
    name: str
    generation: int
    nbytes: int
    runs: Runs
    only: Ranges | None = None  # None: all of it


class Lend(Action, frozen=True, tag="lend"):
    """Give the memory of these chunks back to the driver, for the session to allocate. `in_use` as
    in `CopyIn`."""

    session: int
    name: str
    generation: int
    runs: Runs
    in_use: int = 0


class Reclaim(Action, frozen=True, tag="reclaim"):
    """Take the memory of these chunks back, however long its user takes to let go of it."""

    name: str
    generation: int
    runs: Runs


class SendRevoke(Action, frozen=True, tag="revoke"):
    session: int
    name: str
    generation: int
    ack: bool


class SendWanted(Action, frozen=True, tag="want"):
    """Tell a holder that a waiter needs its memory, or no longer does."""

    session: int
    name: str
    wanted: bool


class SendHurry(Action, frozen=True, tag="hurry"):
    """Tell a session with leases that an acquire waits, or no longer does: while one waits, the
    client gives leases that it no longer uses back at once."""

    session: int
    waits: bool


class Accept(Action, frozen=True, tag="accept"):
    """Answer a register, commit, unregister, prefetch or resize."""

    session: int
    request: int


class Grant(Action, frozen=True, tag="grant"):
    session: int
    request: int
    placements: tuple[Placement, ...]
    waited_s: float
    loaded: bool
    names: tuple[str, ...] = ()  # all granted names, if a requested name has parts
    spent: bool = False  # the leases that the acquire named as `spare` have ended
    overtaken: int = 0  # so many that came later went before it, when it was the first to wait


class Refuse(Action, frozen=True, tag="refuse"):
    """`tried`: nothing is wrong; the request took only components that it could have at once."""

    session: int
    request: int
    code: Code
    message: str
    tried: bool = False


class SendBroken(Action, frozen=True, tag="broken"):
    """Tell a holder that its early component will not arrive: the load failed.

    Its leases hold the component no longer, and end with their release. Its writes are lost.
    """

    session: int
    name: str
    generation: int
    why: str


class Fence(Action, frozen=True, tag="fence"):
    """End this session: it did not answer in time, or broke the protocol."""

    session: int
    why: str


class Waiting(Action, frozen=True, tag="waiting"):
    """The core could not grant an acquire at once."""

    session: int
    request: int
    names: tuple[str, ...]
    why: str


class Evict(Action, frozen=True, tag="evict"):
    """The core decided that this component leaves the device. Evicted follows when it has left."""

    name: str
    generation: int
    reason: Reason
    waiter: tuple[int, int] | None = None  # (session, request) that needs the room


class Evicted(Action, frozen=True, tag="evicted"):
    name: str
    generation: int
    nbytes: int
    bytes_back: int


class Lost(Action, frozen=True, tag="lost"):
    """Bytes written since the last write-back are gone with their worker."""

    name: str
    generation: int
    why: str


class Foresee(Action, frozen=True, tag="foresee"):
    """A component or family is to be loaded ahead, since one that it follows is used."""

    name: str
    after: str


class Foreseen(Action, frozen=True, tag="foreseen"):
    """What came of it."""

    name: str
    after: str
    outcome: Outcome
    #: Seconds of its load that were over when it was asked for.
    saved_s: float = 0.0


AnyAction = (
    MakeHostCopy
    | SealHostCopy
    | KeepHostCopy
    | DropHostCopy
    | CopyIn
    | Hasten
    | StopCopy
    | CopyOut
    | Lend
    | Reclaim
    | SendRevoke
    | SendWanted
    | SendHurry
    | Accept
    | Grant
    | Refuse
    | SendBroken
    | Fence
    | Waiting
    | Evict
    | Evicted
    | Lost
    | Foresee
    | Foreseen
)
