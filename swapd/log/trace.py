"""Turns a run of the swap log into a trace for Perfetto or chrome://tracing, in the Trace Event
Format (JSON). Pure.

Components are one process, with a track of states each. Copies are another, by direction, with a
counter of bytes. Each session is a process with its waits and leases. Times are microseconds since
the first record.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from swapd.core import actions, events
from swapd.log.history import RecordContext, Slow, copied_bytes
from swapd.log.records import Record
from swapd.shared.protocol import Runs
from swapd.shared.text import counted, plain

Event = dict[str, Any]

#: Process numbers in the trace; sessions follow.
COMPONENTS, COPIES, SESSIONS = 1, 2, 10
_IN, _OUT = 1, 2


class _TraceSpan(NamedTuple):
    name: str
    since: float
    args: dict[str, Any]


class TraceBuilder:
    """Call `add` with records in order, then `end`."""

    def __init__(self) -> None:
        self._seen = RecordContext()
        self._zero: float | None = None
        self._now = 0.0
        #: Track and current state of each component.
        self._tracks: dict[str, int] = {}
        self._doing: dict[str, _TraceSpan] = {}
        self._leases: dict[tuple[int, int], _TraceSpan] = {}
        self._waits: dict[tuple[int, int], _TraceSpan] = {}
        #: Chunks and bytes of each component on the device. Those with the same bytes share chunks.
        self._resident: dict[str, tuple[Runs, int]] = {}

    def add(self, record: Record) -> Iterator[Event]:
        if self._zero is None:
            self._zero = record.time
            yield from _heads(record)
        self._now = self._at(record.time)
        if record.event is not None:
            yield from self._event(record.event)
        elif record.action is not None:
            yield from self._action(record.action)
        elif record.dropped:
            yield self._mark(f"{counted(record.dropped, 'record')} missing", COMPONENTS, 0, "p")
        self._seen.note(record)

    def end(self) -> Iterator[Event]:
        """End what still goes on, at the time of the last record."""
        for name in list(self._doing):
            yield from self._ends(name)
        for generation in self._seen.copies:
            yield from self._copied(generation)
        for key in [*self._waits, *self._leases]:
            yield from self._over(key)

    def _at(self, time: float) -> float:
        return (time - (self._zero or 0.0)) * 1e6

    # --- records -------------------------------------------------------------------------

    def _event(self, e: events.AnyEvent) -> Iterator[Event]:
        match e:
            case events.SessionOpened():
                pid = SESSIONS + e.session
                yield _named("process_name", pid, 0, f"{plain(e.label)} (session {e.session})")
            case events.SessionGone():
                yield from self._gone(e.session)
            case events.SessionRequest():
                yield from self._asked(e)
            case events.CopiedIn():
                yield from self._copied(e.generation)
                yield from self._came_in(self._seen.order(e.generation))
            case events.Lent() | events.Reclaimed():
                yield from self._lent(e, self._seen.order(e.generation))
            case events.CopyFailed():
                yield from self._copied(e.generation)
                yield from self._failed(self._seen.order(e.generation))
            case events.CopiedOut() | events.CopyStopped():
                yield from self._copied(e.generation)
            case events.DeviceDown():
                yield self._mark(f"device down: {plain(e.why)}", COMPONENTS, 0, "g")

    def _gone(self, session: int) -> Iterator[Event]:
        for key in [key for key in (*self._waits, *self._leases) if key[0] == session]:
            yield from self._over(key)

    def _came_in(self, order: Slow | None) -> Iterator[Event]:
        if order is not None:
            yield from self._begins(order.name, "on the device", {})
            self._note_there(order)
            yield self._count()

    def _note_there(self, order: Slow) -> None:
        self._resident[order.name] = order.runs, self._seen.sizes.get(order.name, 0)

    def _failed(self, order: Slow | None) -> Iterator[Event]:
        """After a failed save, the component is still there; after a failed load or loan,
        nowhere."""
        if isinstance(order, actions.CopyOut):
            yield from self._begins(order.name, "on the device", {})
        elif order is not None:
            yield from self._ends(order.name)

    def _lent(self, e: events.Lent | events.Reclaimed, order: Slow | None) -> Iterator[Event]:
        if order is None:
            return
        if isinstance(e, events.Lent):
            yield from self._begins(order.name, "lent", {})
        elif not e.runs:
            yield from self._ends(order.name)

    def _asked(self, e: events.SessionRequest) -> Iterator[Event]:
        request = e.request
        lease = getattr(request, "lease", None) or getattr(request, "acquire", None)
        if isinstance(lease, int):
            yield from self._over((e.session, lease))

    def _action(self, a: actions.AnyAction) -> Iterator[Event]:
        match a:
            case actions.CopyIn():
                yield from self._begins(a.name, "coming in", {"bytes": a.nbytes})
                if a.joins:  # its bytes are there already
                    self._note_there(a)
            case actions.Lend():
                yield from self._begins(a.name, "being lent", {})
            case actions.Reclaim():
                yield from self._begins(a.name, "being taken back", {})
            case actions.Evict():
                yield from self._begins(a.name, "leaving", self._why(a))
            case actions.Evicted() | actions.Lost():
                yield from self._leaves(a.name)
            case actions.KeepHostCopy() | actions.DropHostCopy():
                if [*self._seen.masters.values()].count(a.name) <= 1:  # an update has two
                    yield from self._leaves(a.name)
            case _:
                yield from self._of_session(a)

    def _of_session(self, a: actions.AnyAction) -> Iterator[Event]:
        match a:
            case actions.Waiting():
                what = " + ".join(map(plain, a.names))
                why = {"why": plain(a.why)}
                self._waits[a.session, a.request] = _TraceSpan(f"wait: {what}", self._now, why)
            case actions.Grant():
                yield from self._granted(a)
            case actions.Refuse():
                key = a.session, a.request
                verb = "skipped" if a.tried else "refused"
                said = f"{verb}, {a.code}: {plain(a.message)}"
                yield from self._span(self._waits, key, "wait")
                yield self._mark(said, SESSIONS + a.session, 0, "p")
            case actions.Fence():
                yield self._mark(f"fence: {plain(a.why)}", SESSIONS + a.session, 0, "p")

    def _granted(self, a: actions.Grant) -> Iterator[Event]:
        key = a.session, a.request
        what = " + ".join(map(plain, self._seen.asked.get(key, ()))) or f"request {a.request}"
        if a.waited_s and key not in self._waits:
            self._waits[key] = _TraceSpan(f"wait: {what}", self._now - a.waited_s * 1e6, {})
        yield from self._span(self._waits, key, "wait")
        came = {"loaded": a.loaded, "waited_ms": round(a.waited_s * 1e3, 3)}
        self._leases[key] = _TraceSpan(f"lease: {what}", self._now, came)

    def _why(self, a: actions.Evict) -> dict[str, Any]:
        for_whom = " + ".join(map(plain, self._seen.room_for(a)))
        return {"reason": a.reason, **({"for": for_whom} if for_whom else {})}

    # --- events of the trace -------------------------------------------------------------

    def _begins(self, name: str, doing: str, args: dict[str, Any]) -> Iterator[Event]:
        if name not in self._tracks:
            self._tracks[name] = len(self._tracks) + 1
            yield _named("thread_name", COMPONENTS, self._tracks[name], plain(name))
        yield from self._ends(name)
        self._doing[name] = _TraceSpan(doing, self._now, args)

    def _leaves(self, name: str) -> Iterator[Event]:
        yield from self._ends(name)
        if self._resident.pop(name, None) is not None:
            yield self._count()

    def _ends(self, name: str) -> Iterator[Event]:
        if (was := self._doing.pop(name, None)) is not None:
            yield self._complete(was, COMPONENTS, self._tracks[name])

    def _complete(self, was: _TraceSpan, pid: int, tid: int) -> Event:
        return {
            "ph": "X",
            "name": was.name,
            "pid": pid,
            "tid": tid,
            "ts": was.since,
            "dur": self._now - was.since,
            "args": was.args,
        }

    def _copied(self, generation: int) -> Iterator[Event]:
        """Copies of one direction may overlap, so their events are asynchronous."""
        order, time = self._seen.copies.get(generation, (None, 0.0))
        if not isinstance(order, actions.CopyIn | actions.CopyOut):
            return
        since = self._at(time)
        args: dict[str, Any] = {"bytes": copied_bytes(order), "generation": generation}
        if took := self._now - since:
            args["GB_per_s"] = round(args["bytes"] / took / 1e3, 3)
        direction = _IN if isinstance(order, actions.CopyIn) else _OUT
        was = _TraceSpan(plain(order.name), since, args)
        yield from self._pair(was, COPIES, direction, "copy", generation)

    def _span(
        self, begun: dict[tuple[int, int], _TraceSpan], key: tuple[int, int], kind: str
    ) -> Iterator[Event]:
        if (was := begun.pop(key, None)) is not None:
            yield from self._pair(was, SESSIONS + key[0], 0, kind, key[1])

    def _over(self, key: tuple[int, int]) -> Iterator[Event]:
        yield from self._span(self._waits, key, "wait")
        yield from self._span(self._leases, key, "lease")

    def _pair(self, was: _TraceSpan, pid: int, tid: int, kind: str, number: int) -> Iterator[Event]:
        shared = {"name": was.name, "cat": kind, "id": f"{kind} {pid} {number}", "pid": pid}
        yield {**shared, "tid": tid, "ph": "b", "ts": was.since, "args": was.args}
        yield {**shared, "tid": tid, "ph": "e", "ts": self._now}

    def _mark(self, name: str, pid: int, tid: int, scope: str) -> Event:
        return {"ph": "i", "name": name, "pid": pid, "tid": tid, "ts": self._now, "s": scope}

    def _count(self) -> Event:
        total = sum(dict(self._resident.values()).values())
        args = {"bytes": total}
        return {"ph": "C", "name": "on the device", "pid": COPIES, "ts": self._now, "args": args}


def trace(records: Iterable[Record], since: float = 0.0) -> Iterator[Event]:
    """Yield the events of a run; of those that ended before `since`, in Unix time, only names."""
    one, first = TraceBuilder(), 0.0
    for record in records:
        first = first or record.time
        after = (since - first) * 1e6
        yield from (event for event in one.add(record) if _over(event) >= after)
    yield from one.end()


def _over(event: Event) -> float:
    """Return when an event ends; names never end."""
    return float("inf") if event["ph"] == "M" else float(event["ts"] + event.get("dur", 0.0))


def _heads(first: Record) -> Iterator[Event]:
    of = "" if first.start is None else f" on {first.start.device}"
    yield _named("process_name", COMPONENTS, 0, f"components{of}")
    yield _named("process_name", COPIES, 0, "copies")
    yield _named("thread_name", COPIES, _IN, "to the device")
    yield _named("thread_name", COPIES, _OUT, "to the host")


def _named(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def rendered(records: Iterable[Record], since: float = 0.0) -> Iterator[bytes]:
    """Yield the trace as a file, in pieces, because it may be larger than memory."""
    encode = msgspec.json.Encoder().encode
    yield b'{"displayTimeUnit":"ms","traceEvents":['
    between = b"\n"
    for event in trace(records, since):
        yield between + encode(event)
        between = b",\n"
    yield b"\n]}\n"
