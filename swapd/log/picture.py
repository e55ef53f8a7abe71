"""The state of a device, with its holders and waiters, as the records of one run give it.

Pure: records go in, in their order, and the state can be read; the only clock is theirs. It asks
the daemon nothing, and the core does not know it. Lives here: the effect of each record. May not
live here: how to show the state.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swapd.core import actions, events
from swapd.core.records import workspace_name
from swapd.log.counts import OTHERS, Counts
from swapd.log.history import Seen, copied_bytes
from swapd.log.records import Record
from swapd.shared import protocol
from swapd.shared.protocol import ComponentKind, ComponentStatus, StatusReply

Key = tuple[int, int]

#: States in which a component occupies no device memory.
OUT = frozenset(("filling", "absent", "waiting"))


@dataclass(slots=True)
class Item:
    """A component, or a workspace while it is lent."""

    name: str
    session: int
    nbytes: int
    policy: protocol.Policy = "lru"
    group: str | None = None
    mutable: bool = False
    kind: ComponentKind = "component"
    part_of: str = ""
    #: Whether it is pinned.
    pinned: bool = False
    state: str = "filling"
    #: Its host copies, by uid: the current one, and during an update the next.
    masters: set[int] = field(default_factory=set)
    #: Number of leases by the label of the holder.
    holders: dict[str, int] = field(default_factory=dict)
    loads: int = 0
    evictions: int = 0
    hits: int = 0
    #: Duration of the last swap-in, from its order on.
    swap_in_s: float | None = None
    #: Unix time of the last release.
    used_at: float | None = None

    @property
    def leases(self) -> int:
        return sum(self.holders.values())

    @property
    def inside(self) -> bool:
        """Whether it occupies device memory."""
        return self.state not in OUT

    @property
    def label(self) -> str:
        """The name in counts: the parts of a family, which may be many, count as one."""
        return OTHERS if self.kind == "workspace" else self.part_of or self.name


class Wait(NamedTuple):
    """An acquire that has no answer yet."""

    session: int
    names: tuple[str, ...]
    #: Unix time.
    since: float
    timeout_s: float | None
    #: Why it waits, for people; "" if only for copies.
    why: str = ""


class _Lease(NamedTuple):
    who: str
    names: tuple[str, ...]
    since: float


class Picture:
    """The state so far: `note` each record of a run from the first one on, then read it."""

    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        self.waits: dict[Key, Wait] = {}
        self.counts = Counts()
        self.seen = Seen()
        #: The start record of the run; None before it.
        self.start: Any = None
        #: Number of the last record.
        self.seq = 0
        self.time = 0.0
        #: Names of items that changed; the reader clears it.
        self.changed: set[str] = set()
        #: Records were missed: until `correct`, all state that was not reported anew may be wrong.
        self.uncertain = False
        self._registering: dict[Key, protocol.Register] = {}
        self._unregistering: dict[Key, str] = {}
        self._pinning: dict[Key, protocol.Pin] = {}
        self._leases: dict[Key, _Lease] = {}
        #: Number of items under each label.
        self._labels: dict[str, int] = {}

    def note(self, record: Record) -> None:
        """Apply the next record."""
        self.counts.records += 1
        self.seq, self.time = record.seq, record.time
        said = record.event or record.action
        if said is not None:
            if handler := _HANDLERS.get(type(said)):
                handler(self, said)
        elif record.start is not None:
            self.start = record.start
        self.seen.note(record)

    def missed(self, count: int) -> None:
        """So many records before the next one are lost."""
        self.counts.missed += count
        self.uncertain = True
        self.waits.clear()
        self._leases.clear()
        self._registering.clear()
        self._unregistering.clear()
        self._pinning.clear()
        self.changed.update(self.items)

    def correct(self, status: StatusReply) -> None:
        """Take over the daemon's status, if records were missed."""
        if not self.uncertain:
            return
        told = {c.name: c for c in status.components}
        for name in self.items.keys() - told.keys():
            self._remove(name)
        for c in told.values():
            self._correct(c)

    def _correct(self, c: ComponentStatus) -> None:
        item = self.items.get(c.name)
        if item is None:
            item = Item(c.name, c.session, c.nbytes, c.policy, c.group, c.mutable, c.kind)
            item.part_of = c.part_of
            self._add(item)
        item.pinned = c.pinned
        item.state = "resident" if c.state in ("idle", "leased") else c.state
        labels = [_label_in(who) for who in c.holders]
        if item.holders.keys() != set(labels):  # else the number of leases of each is known
            item.holders = dict.fromkeys(labels, 1)
        item.loads, item.evictions, item.hits = c.loads, c.evictions, c.hits
        item.swap_in_s = c.swap_in_s
        self.changed.add(c.name)

    # --- items come, change and go -------------------------------------------------------

    def _add(self, item: Item) -> None:
        self.items[item.name] = item
        self.changed.add(item.name)
        self._labels[item.label] = self._labels.get(item.label, 0) + 1
        if item.label != OTHERS:
            self.counts.know(item.label)

    def _remove(self, name: str) -> None:
        item = self.items.pop(name, None)
        if item is None:
            return
        self.changed.add(name)
        for said_of in (self.seen.sizes, self.seen.scratch, self.seen.used, self.seen.part_of):
            said_of.pop(name, None)  # the name may never come back
        self._labels[item.label] -= 1
        if not self._labels[item.label]:
            del self._labels[item.label]
            self.counts.forget(item.label)

    def _set(self, name: str, state: str) -> Item | None:
        item = self.items.get(name)
        if item is not None:
            item.state = state
            self.changed.add(name)
        return item

    def _label(self, name: str) -> str:
        """The label under which `name` is counted."""
        item = self.items.get(name)
        if item is not None:
            return item.label
        return name if name in self._labels else OTHERS  # a family, or an unknown name

    # --- what is asked -------------------------------------------------------------------

    def _asked(self, e: events.Asked) -> None:
        request = e.request
        key = (e.session, request.id)
        match request:
            case protocol.Acquire():
                self.waits[key] = Wait(e.session, request.names, self.time, request.timeout_s)
            case protocol.Release():
                self._release((e.session, request.lease), request.again)
            case protocol.AcquireWorkspace():
                name = workspace_name(*key)
                self.waits[key] = Wait(e.session, (name,), self.time, request.timeout_s)
                self._registering[key] = protocol.Register(request.id, name, request.nbytes)
            case protocol.AcquireStart():
                names = (protocol.THE_START,)
                self.waits[key] = Wait(e.session, names, self.time, request.timeout_s)
            case protocol.Cancel():
                key = (e.session, request.acquire)
                self.waits.pop(key, None)
                self._registering.pop(key, None)
                self._release(key, 0)
            case protocol.Register():
                self._registering[key] = request
            case protocol.Unregister():
                self._unregistering[key] = request.name
            case protocol.Pin():
                self._pinning[key] = request
            case _:
                pass

    def _granted(self, a: actions.Grant) -> None:
        key = (a.session, a.request)
        wait = self.waits.pop(key, None)
        names = a.names or (wait.names if wait is not None else self.seen.asked.get(key, ()))
        who = self.seen.labels.get(a.session) or f"session {a.session}"
        self._leases[key] = _Lease(who, names, self.time)
        self.counts.wait.observe(a.waited_s)
        began = self.time - a.waited_s
        for name in names:
            item = self.items.get(name)
            if item is None:
                continue  # the turn to start is no component
            item.holders[who] = item.holders.get(who, 0) + 1
            self.changed.add(name)
            if not (a.loaded and self._came_for(item, began)) and item.kind != "workspace":
                item.hits += 1
                self.counts.tally(item.label).hits += 1

    def _came_for(self, item: Item, began: float) -> bool:
        """Whether it was not there at the time of the request."""
        came = self.seen.came.get(item.name)
        return item.state == "loading" or came is None or came[1] >= began

    def _release(self, key: Key, again: int) -> None:
        lease = self._leases.pop(key, None)
        if lease is None:
            return
        self.counts.hold.observe(self.time - lease.since)
        for name in lease.names:
            item = self.items.get(name)
            if item is None:
                continue
            self._lay_down(item, lease.who)
            item.used_at = self.time
            if again:
                item.hits += again
                self.counts.tally(item.label).hits += again

    def _lay_down(self, item: Item, who: str) -> None:
        left = item.holders.get(who, 0) - 1
        if left > 0:
            item.holders[who] = left
        else:
            item.holders.pop(who, None)
        self.changed.add(item.name)

    def _refused(self, a: actions.Refuse) -> None:
        key = (a.session, a.request)
        self._registering.pop(key, None)
        self._unregistering.pop(key, None)
        self._pinning.pop(key, None)
        wait = self.waits.pop(key, None)
        only_tried = wait is not None and wait.timeout_s == 0 and a.code == "timeout"
        for name in self.seen.asked.get(key) or (OTHERS,):
            tally = self.counts.tally(self._label(name))
            if only_tried:
                tally.skips += 1
            else:
                tally.refusals[a.code] = tally.refusals.get(a.code, 0) + 1

    def _accepted(self, a: actions.Accept) -> None:
        key = (a.session, a.request)
        self._registering.pop(key, None)
        if (name := self._unregistering.pop(key, None)) is not None:
            self._remove(name)
        if asked := self._pinning.pop(key, None):
            for item in self.items.values():
                if asked.name in (item.name, item.part_of):
                    item.pinned = not asked.unpin
                    self.changed.add(item.name)

    def _waiting(self, a: actions.Waiting) -> None:
        key = (a.session, a.request)
        if wait := self.waits.get(key):
            self.waits[key] = wait._replace(why=a.why)

    def _session_gone(self, e: events.SessionGone) -> None:
        session = e.session
        for of in (self.waits, self._registering, self._unregistering, self._pinning):
            for key in [key for key in of if key[0] == session]:
                del of[key]
        for key in [key for key in self._leases if key[0] == session]:
            self._release(key, 0)
        for name in [item.name for item in self.items.values() if item.session == session]:
            self._remove(name)

    def _broken(self, a: actions.Broken) -> None:
        """Leases that were granted early lose the component."""
        for key, lease in self._leases.items():
            if a.name in lease.names:
                names = tuple(name for name in lease.names if name != a.name)
                self._leases[key] = lease._replace(names=names)
        if item := self.items.get(a.name):
            item.holders.clear()

    # --- what moves ----------------------------------------------------------------------

    def _made(self, a: actions.MakeHostCopy) -> None:
        item = self.items.get(a.name)
        if item is None:
            asked = self._registering.get((a.session, a.request))
            if asked is None:
                return  # its registration was missed
            policy = "sequential" if asked.transient else asked.policy
            kind: ComponentKind = "scratch" if asked.scratch else "component"
            item = Item(a.name, a.session, a.nbytes, policy, asked.group, a.mutable, kind)
            item.part_of = asked.part_of
            self._add(item)
        item.masters.add(a.uid)

    def _sealed(self, e: events.HostCopySealed) -> None:
        item = self.items.get(self.seen.masters.get(e.uid, ""))
        if item is not None and e.uid in item.masters and item.state == "filling":
            self._set(item.name, "absent")

    def _dropped(self, a: actions.DropHostCopy) -> None:
        item = self.items.get(a.name)
        if item is not None and a.uid in item.masters:  # else of an earlier component
            item.masters.discard(a.uid)
            if not item.masters:
                self._remove(a.name)

    def _lent(self, e: events.Lent) -> None:
        if order := self.seen.order(e.generation):
            self._set(order.name, "lent")

    def _lend(self, a: actions.Lend) -> None:
        request = next((k for k in self._registering if workspace_name(*k) == a.name), None)
        nbytes = self._registering.pop(request).nbytes if request else 0
        self._add(Item(a.name, a.session, nbytes, kind="workspace", state="lending"))

    def _reclaimed(self, e: events.Reclaimed) -> None:
        if order := self.seen.order(e.generation):
            self._remove(order.name)

    def _copied_in(self, e: events.CopiedIn) -> None:
        order, began = self.seen.copies.get(e.generation, (None, 0.0))
        if not isinstance(order, actions.CopyIn):
            return
        self.counts.bytes_in += copied_bytes(order)
        self.counts.copy_in.observe(self.time - began)
        if self._is_its(order) and (item := self._set(order.name, "resident")):
            item.swap_in_s = self.time - began
            item.loads += 1
            self.counts.tally(item.label).loads += 1

    def _copied_out(self, e: events.CopiedOut) -> None:
        order, began = self.seen.copies.get(e.generation, (None, 0.0))
        if isinstance(order, actions.CopyOut):
            self.counts.bytes_out += copied_bytes(order)
            self.counts.copy_out.observe(self.time - began)

    def _copy_failed(self, e: events.CopyFailed) -> None:
        order = self.seen.order(e.generation)
        if isinstance(order, actions.CopyIn | actions.CopyOut):
            if self._is_its(order):
                self._set(order.name, "absent" if isinstance(order, actions.CopyIn) else "resident")
        elif order is not None:
            self._remove(order.name)

    def _is_its(self, order: actions.CopyIn | actions.CopyOut) -> bool:
        """Whether a copy belongs to the current component of this name, not to an earlier one."""
        item = self.items.get(order.name)
        return item is not None and order.uid in item.masters

    def _evicted(self, a: actions.Evicted) -> None:
        if item := self._set(a.name, "absent"):
            item.evictions += 1
            self.counts.tally(item.label).evictions += 1

    def _unpinned(self, a: actions.Unpinned) -> None:
        if item := self.items.get(a.name):
            item.pinned = False


def _label_in(who: str) -> str:
    """The label of a holder, as in records: the daemon adds the session to it."""
    return who.rpartition(" (session ")[0] or who


def waiting(waits: Iterable[Wait], now: float) -> float:
    """Seconds of the longest wait so far."""
    return max((now - wait.since for wait in waits), default=0.0)


_HANDLERS: dict[type, Callable[[Picture, Any], Any]] = {
    events.Asked: Picture._asked,
    events.SessionGone: Picture._session_gone,
    events.HostCopySealed: Picture._sealed,
    events.CopiedIn: Picture._copied_in,
    events.CopiedOut: Picture._copied_out,
    events.CopyFailed: Picture._copy_failed,
    events.Lent: Picture._lent,
    events.Reclaimed: Picture._reclaimed,
    actions.Grant: Picture._granted,
    actions.Refuse: Picture._refused,
    actions.Accept: Picture._accepted,
    actions.Waiting: Picture._waiting,
    actions.Broken: Picture._broken,
    actions.MakeHostCopy: Picture._made,
    actions.DropHostCopy: Picture._dropped,
    actions.CopyIn: lambda picture, a: picture._set(a.name, "loading"),
    actions.CopyOut: lambda picture, a: picture._set(a.name, "writing back"),
    actions.Lend: Picture._lend,
    actions.Reclaim: lambda picture, a: picture._set(a.name, "reclaiming"),
    actions.Evict: lambda picture, a: picture._set(a.name, "revoking"),
    actions.Evicted: Picture._evicted,
    actions.Unpinned: Picture._unpinned,
}
