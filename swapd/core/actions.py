"""The actions that the core orders or records. Data only.

The caller answers each slow one (MakeHostCopy, SealHostCopy, CopyIn, CopyOut, Lend, Reclaim) with
exactly one event. SendRevoke with `ack` ends in RevokeAck or Fence, and Fence in SessionGone.
Foresee, Foreseen, Lost, Waiting and Evicted are for the swap log; on Evicted, the daemon also tells
a worker that its bytes are in the host copy.
"""

from typing import Literal

import msgspec

from swapd.shared.protocol import Code, Placement, Ranges, Runs

Reason = Literal[
    "room",
    "sequential",
    "alternating",
    "resized",
    "joined",
    "unregister",
    "failed",
    "update",
    "asked",
]


#: At the acquire, a component loaded ahead was in, or coming, or had found no room. Or before any
#: acquire, it left (in vain), or its session took the prediction back.
Outcome = Literal["in", "coming", "no_room", "in_vain", "taken_back"]


#: Rank of a load, the smallest first: (0, *order of the waiter) for an acquire, (1, 0, generation)
#: for a prefetch, (2, 0, generation) if nobody waits.
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
    request: int = 0  # to answer when it is made
    #: Uid of the host copy, sealed or itself a sharer, whose bytes it shares. 0: the worker fills
    #: it.
    original: int = 0
    replaces: int = 0  # uid of the host copy that this one will replace
    empty: bool = False  # it takes no memory: nothing is ever copied from it or to it
    certain: bool = False  # `original` certainly has the bytes: clients need not compare


class SealHostCopy(Action, frozen=True, tag="seal_host_copy"):
    uid: int
    name: str


class KeepHostCopy(Action, frozen=True, tag="keep_host_copy"):
    """Keep a host copy that no component uses for the next with its content, until DropHostCopy."""

    uid: int
    name: str


class DropHostCopy(Action, frozen=True, tag="drop_host_copy"):
    """No component and no copy uses the host copy any more."""

    uid: int
    name: str


class CopyIn(Action, frozen=True, tag="copy_in"):
    """`in_use`: chunks of the device in use from now on, for the record."""

    uid: int
    name: str
    generation: int
    nbytes: int
    runs: Runs
    only: Ranges | None = None  # the ranges of scratch to copy, the rest becomes zeros; None: all
    in_use: int = 0
    urgency: Urgency = (0,)
    #: A component on the same chunks with the same bytes, or "". Then nothing is copied.
    joins: str = ""


class Hasten(Action, frozen=True, tag="hasten"):
    name: str
    generation: int
    urgency: Urgency


class StopCopy(Action, frozen=True, tag="stop_copy"):
    """End a load that nobody waits for. CopyStopped answers, unless the load ends before."""

    name: str
    generation: int


class CopyOut(Action, frozen=True, tag="copy_out"):
    uid: int
    name: str
    generation: int
    nbytes: int
    runs: Runs
    only: Ranges | None = None  # the ranges of scratch to copy; None: all


class Lend(Action, frozen=True, tag="lend"):
    """Give the memory of these chunks to the driver, for the session to allocate."""

    session: int
    name: str
    generation: int
    runs: Runs
    in_use: int = 0


class Reclaim(Action, frozen=True, tag="reclaim"):
    """Take the memory of these chunks back, however long its user keeps it."""

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
    """Tell a session with leases whether an acquire waits: then the client releases unused leases
    at once."""

    session: int
    waits: bool


class Accept(Action, frozen=True, tag="accept"):
    """A request other than an acquire succeeded."""

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
    overtaken: int = 0  # number of later waiters that overtook it as the head of the queue


class Refuse(Action, frozen=True, tag="refuse"):
    """`tried`: nothing is wrong, but the request could not be granted at once and would not
    wait."""

    session: int
    request: int
    code: Code
    message: str
    tried: bool = False


class SendBroken(Action, frozen=True, tag="broken"):
    """Tell a holder that the load of its early component failed.

    Its leases hold the component no longer, and still end with their release. Its writes are lost.
    """

    session: int
    name: str
    generation: int
    why: str


class Fence(Action, frozen=True, tag="fence"):
    """End this session: it is late with an answer, or broke the protocol."""

    session: int
    why: str


class Waiting(Action, frozen=True, tag="waiting"):
    session: int
    request: int
    names: tuple[str, ...]
    why: str


class Evict(Action, frozen=True, tag="evict"):
    """Begin an eviction. Evicted follows when the component has left the device."""

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
    """Record that bytes written since the last write-back are lost."""

    name: str
    generation: int
    why: str


class Foresee(Action, frozen=True, tag="foresee"):
    """Record that this component or family is loaded ahead, since the one before it is used."""

    name: str
    after: str


class Foreseen(Action, frozen=True, tag="foreseen"):
    name: str
    after: str
    outcome: Outcome
    #: Seconds of the load that were over when the component was asked for.
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
