"""What the core orders, and what it puts on record. Data only.

MakeHostCopy, SealHostCopy, CopyIn, CopyOut, Lend and Reclaim are slow: each comes back as exactly
one event.
Revoke with `ack` comes back as Revoked, or ends in Fence; Fence comes back as SessionGone.
Lost, Waiting and Unpinned order nothing: they are there to be read in the swap log. Nor does
Evicted, except that a worker is told when its bytes are in the master.
"""

from typing import Literal

import msgspec

from swapd.shared.protocol import Code, Placement, Ranges, Runs

#: Why a component leaves the device.
Reason = Literal[
    "room", "sequential", "alternating", "resized", "unregister", "failed", "update", "asked"
]


class Action(msgspec.Struct, frozen=True, tag_field="op", omit_defaults=True):
    pass


class MakeHostCopy(Action, frozen=True, tag="make_host_copy"):
    session: int
    uid: int
    name: str
    nbytes: int
    mutable: bool
    segments: tuple[int, ...] = ()
    request: int = 0  # whose answer waits for it
    #: The uid of the master whose bytes it has once this is carried out: one that is sealed, or
    #: that shares one that was. 0: it is to be filled.
    original: int = 0
    replaces: int = 0  # uid of the master that this one is made beside
    empty: bool = False  # it takes no memory: nothing is ever copied from it or to it


class SealHostCopy(Action, frozen=True, tag="seal_host_copy"):
    uid: int
    name: str


class DropHostCopy(Action, frozen=True, tag="drop_host_copy"):
    """Nothing names this master any more, and no copy uses it."""

    uid: int
    name: str


class CopyIn(Action, frozen=True, tag="copy_in"):
    """`behind`: copies out, by generation, that still save some of these chunks; none of them
    may be overwritten before it is saved. `only`: of scratch, what is copied; the rest is zeroed.
    """

    uid: int
    name: str
    generation: int
    nbytes: int
    runs: Runs
    behind: tuple[int, ...] = ()
    only: Ranges | None = None  # None: all of it


class CopyOut(Action, frozen=True, tag="copy_out"):
    uid: int
    name: str
    generation: int
    nbytes: int
    runs: Runs
    only: Ranges | None = None  # None: all of it


class Lend(Action, frozen=True, tag="lend"):
    """Give the memory of these chunks back to the driver, for the session to allocate."""

    session: int
    name: str
    generation: int
    runs: Runs


class Reclaim(Action, frozen=True, tag="reclaim"):
    """Take the memory of these chunks back, however long its user takes to let go of it."""

    name: str
    generation: int
    runs: Runs


class Revoke(Action, frozen=True, tag="revoke"):
    session: int
    name: str
    generation: int
    ack: bool


class Want(Action, frozen=True, tag="want"):
    """Tell a holder that its memory is, or is no longer, waited for."""

    session: int
    name: str
    wanted: bool


class Hurry(Action, frozen=True, tag="hurry"):
    """Tell who holds anything that somebody waits, or no longer does: what it is not using, and
    holds for a moment all the same, it should give back at once."""

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
    names: tuple[str, ...] = ()  # all that was granted, if a name asked for has parts


class Refuse(Action, frozen=True, tag="refuse"):
    """`tried`: it asked for no more than what could be had at once, and nothing is wrong."""

    session: int
    request: int
    code: Code
    message: str
    tried: bool = False


class Broken(Action, frozen=True, tag="broken"):
    """Tell a holder that what it was granted early will not arrive: the load failed.

    Its leases hold it no longer, and end by their release. What it wrote is gone.
    """

    session: int
    name: str
    generation: int
    why: str


class Fence(Action, frozen=True, tag="fence"):
    """This session did not answer in time, or lied: end it."""

    session: int
    why: str


class Waiting(Action, frozen=True, tag="waiting"):
    """An acquire could not be granted at once."""

    session: int
    request: int
    names: tuple[str, ...]
    why: str


class Evict(Action, frozen=True, tag="evict"):
    """Decided: this component leaves the device. Evicted follows when it has left."""

    name: str
    generation: int
    reason: Reason
    waiter: tuple[int, int] | None = None  # (session, request) it makes room for


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


class Unpinned(Action, frozen=True, tag="unpinned"):
    """It may be evicted again: beside it this request could never have been granted."""

    name: str
    session: int
    request: int


AnyAction = (
    MakeHostCopy
    | SealHostCopy
    | DropHostCopy
    | CopyIn
    | CopyOut
    | Lend
    | Reclaim
    | Revoke
    | Want
    | Hurry
    | Accept
    | Grant
    | Refuse
    | Broken
    | Fence
    | Waiting
    | Evict
    | Evicted
    | Lost
    | Unpinned
)
