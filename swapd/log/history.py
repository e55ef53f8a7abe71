"""The context of each swap log record, the story of a component, and filters. Makes no text for
people."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from swapd.core import actions, events
from swapd.core.records import workspace_name
from swapd.core.requests import names_of
from swapd.log.reader import LogLine
from swapd.log.records import KINDS, Record
from swapd.shared import protocol

#: Limit of remembered labels; a record may name a session that ended long ago.
LABELS_MAX = 10_000
NAMES_GONE_MAX = 1_000

#: Actions whose end is an event with their generation.
Slow = actions.CopyIn | actions.CopyOut | actions.Lend | actions.Reclaim


def copied_bytes(order: actions.CopyIn | actions.CopyOut) -> int:
    """Return the bytes to copy: all of a component, or of scratch the ranges in use, or none."""
    if isinstance(order, actions.CopyIn) and order.joins:
        return 0
    return order.nbytes if order.only is None else sum(nbytes for _, nbytes in order.only)


class RecordContext:
    """What the numbers in later records mean: records name sessions, requests and copies by number.

    Call `note` with each record after looking at it. `note` forgets what no later record can refer
    to, so that a reader can follow a log for months.
    """

    def __init__(self) -> None:
        self.labels: dict[int, str] = {}
        #: Names by (session, request), until the release or refusal.
        self.asked: dict[tuple[int, int], tuple[str, ...]] = {}
        #: Copies, loans and reclaims in progress, by generation: the order and its time.
        self.copies: dict[int, tuple[Slow, float]] = {}
        #: (cause, time of the decision) of evictions in progress, by generation.
        self.evictions: dict[int, tuple[int, float]] = {}
        #: Names of host copies by uid, and of components by session.
        self.masters: dict[int, str] = {}
        self.owned: dict[int, dict[str, None]] = {}
        self.sizes: dict[str, int] = {}
        #: Scratch by name, and the bytes worth saving, if a release named them.
        self.scratch: dict[str, protocol.Scratch] = {}
        self.used: dict[str, int] = {}
        self.part_of: dict[str, str] = {}
        #: Last load of each component, and when it ended.
        self.came: dict[str, tuple[actions.CopyIn, float]] = {}

    def about(self, record: Record) -> tuple[str, ...]:
        """Return the components of a record; for an eviction also those for which it makes room."""
        match record.event or record.action:
            case events.SessionRequest() as e:
                return self._about(e.session, e.request)
            case actions.Grant() | actions.Refuse() | actions.Accept() as a:
                return self.asked.get((a.session, a.request), ())
            case actions.Evict() as a:
                return (a.name, *self.room_for(a))
            case events.SessionEnds() | events.SessionGone() as e:
                return tuple(self.owned.get(e.session, ()))
            case actions.Waiting() as a:
                return a.names
            case item:
                name = getattr(item, "name", None) or self._name(item)
                return (name,) if name else ()

    def _name(self, item: Any) -> str | None:
        """Find the component of an event that has only a uid or a generation."""
        if (uid := getattr(item, "uid", None)) is not None:
            return self.masters.get(uid)
        order = self.order(getattr(item, "generation", -1))
        return order.name if order else None

    def _about(self, session: int, request: protocol.AnyOrder) -> tuple[str, ...]:
        match request:
            case protocol.Release(lease=lease) | protocol.Cancel(acquire=lease):
                return self.asked.get((session, lease), ())
            case protocol.AcquireWorkspace():
                return (workspace_name(session, request.id),)
            case protocol.AcquireStart():
                return (protocol.THE_START,)
            case _:
                return names_of(request)

    def order(self, generation: int) -> Slow | None:
        return self.copies[generation][0] if generation in self.copies else None

    def room_for(self, evict: actions.Evict) -> tuple[str, ...]:
        return () if evict.waiter is None else self.asked.get(evict.waiter, ())

    def brought(self, grant: actions.Grant, time: float) -> dict[str, actions.CopyIn]:
        """Return the loads that a grant waited for, by name."""
        began = time - grant.waited_s
        found = ((place, self.came.get(place.name)) for place in grant.placements)
        return {
            place.name: came[0]
            for place, came in found
            if came and came[0].generation == place.generation and came[1] >= began
            if not came[0].joins
        }

    def note(self, record: Record) -> None:
        if record.event is not None:
            self._note_event(record.event, record.time)
        elif record.action is not None:
            self._note_action(record.action, record)

    def _note_event(self, e: events.AnyEvent, time: float) -> None:
        match e:
            case events.SessionRequest():
                self._note_asked(e.session, e.request)
            case events.SessionOpened():
                self.labels[e.session] = e.label
                if len(self.labels) > LABELS_MAX:
                    del self.labels[next(iter(self.labels))]
            case events.HostCopyFound():
                self.masters[e.uid] = e.name
            case events.SessionGone():
                self._forget_session(e.session)
            case events.Reclaimed() if e.runs:
                pass  # the rest is reclaimed later
            case _ if isinstance(e, events.Over):
                order, _ = self.copies.pop(e.generation, (None, 0.0))
                if isinstance(e, events.CopiedIn) and isinstance(order, actions.CopyIn):
                    self.came[order.name] = order, time

    def _note_action(self, a: actions.AnyAction, record: Record) -> None:
        match a:
            case actions.Accept() | actions.Refuse():
                self.asked.pop((a.session, a.request), None)
            case actions.MakeHostCopy():
                self.masters[a.uid] = a.name
                self.owned.setdefault(a.session, {})[a.name] = None
            case actions.DropHostCopy():
                self._forget_component(a)
            case actions.CopyIn() | actions.CopyOut() | actions.Lend() | actions.Reclaim():
                self.copies[a.generation] = (a, record.time)
            case actions.Evict():
                self.evictions[a.generation] = (record.cause, record.time)
            case actions.Evicted() | actions.Lost():
                self.evictions.pop(a.generation, None)

    def _note_asked(self, session: int, request: protocol.AnyOrder) -> None:
        match request:
            case protocol.Release(lease=lease) | protocol.Cancel(acquire=lease):
                self.asked.pop((session, lease), None)
            case _:
                self.asked[session, request.id] = self._about(session, request)
        if isinstance(request, protocol.Register):
            self._note_registered(request)
        elif isinstance(request, protocol.Release) and request.used:
            for used in request.used:
                self.used[used.name] = sum(nbytes for _, nbytes in used.ranges)
            self._forget_names(self.used)

    def _note_registered(self, request: protocol.Register) -> None:
        name = request.name
        for by_name in (self.scratch, self.used, self.part_of):
            by_name.pop(name, None)
        self.sizes[name] = request.nbytes
        if request.scratch:
            self.scratch[name] = request.scratch
        if request.part_of:
            self.part_of[name] = request.part_of
        self._forget_names(self.sizes)

    def _forget_names(self, grown: Mapping[str, object]) -> None:
        """Forget names without a component or open request, of refused requests or from before the
        log begins. Looks at all names, so it is rarely done."""
        if len(grown) <= 2 * len(self.masters) + NAMES_GONE_MAX:
            return
        there = set(self.masters.values()).union(*self.asked.values())
        known: tuple[dict[str, Any], ...] = (self.sizes, self.scratch, self.used, self.part_of)
        for by_name in known:
            for name in by_name.keys() - there:
                del by_name[name]

    def _forget_session(self, session: int) -> None:
        self.owned.pop(session, None)
        for key in [key for key in self.asked if key[0] == session]:
            del self.asked[key]

    def _forget_component(self, a: actions.DropHostCopy) -> None:
        self.masters.pop(a.uid, None)
        if a.name in self.masters.values():
            return  # an update: the other host copy remains
        self.came.pop(a.name, None)
        for names in self.owned.values():
            names.pop(a.name, None)


def names_in(lines: Iterable[LogLine]) -> set[str]:
    return {name for _, about in _with_names(lines) for name in about}


def _with_names(lines: Iterable[LogLine]) -> Iterator[tuple[LogLine, tuple[str, ...]]]:
    seen = RecordContext()
    for line in lines:
        yield line, seen.about(line.record)
        seen.note(line.record)


def belonging(lines: Iterable[LogLine], name: str) -> set[str]:
    """Return `name` with the parts of this family, or the family of this part."""
    asked = [
        e.request for line in lines if isinstance(e := line.record.event, events.SessionRequest)
    ]
    registered = [request for request in asked if isinstance(request, protocol.Register)]
    parts = {e.name for e in registered if e.part_of == name}
    return {name} | parts | {e.part_of for e in registered if e.name == name and e.part_of}


class StoryStep(NamedTuple):
    """One record in a story. `depth`: number of causes before it."""

    line: LogLine
    depth: int
    #: False if the record is only a cause of records about the component.
    about: bool


def of_component(lines: Sequence[LogLine], name: str) -> list[list[StoryStep]]:
    """Return the story of a component or family, in the run of `lines`: a chapter for each first
    cause, in order of time. A chapter has the records about the component that followed from that
    cause, each after its own cause and one deeper."""
    names = belonging(lines, name)
    numbered = [line for line in lines if not line.record.dropped]
    by_seq = {line.record.seq: line for line in numbered}
    about = {line.record.seq for line, of in _with_names(numbered) if not names.isdisjoint(of)}
    kept = _with_causes(about, by_seq)
    effects: dict[int, list[int]] = {}  # of each record in the story, and of 0
    for seq in sorted(kept):
        cause = by_seq[seq].record.cause
        effects.setdefault(cause if cause in kept else 0, []).append(seq)
    return [
        [StoryStep(by_seq[seq], depth, seq in about) for seq, depth in _in_turn(first, effects)]
        for first in effects.get(0, [])
    ]


def _with_causes(about: Iterable[int], by_seq: Mapping[int, LogLine]) -> set[int]:
    """Add the causes of these records, as far as the log has them."""
    kept: set[int] = set()
    for seq in about:
        while seq in by_seq and seq not in kept:
            kept.add(seq)
            seq = by_seq[seq].record.cause
    return kept


def _in_turn(first: int, effects: Mapping[int, list[int]]) -> Iterator[tuple[int, int]]:
    todo = [(first, 0)]
    while todo:
        seq, depth = todo.pop()
        yield seq, depth
        todo += [(effect, depth + 1) for effect in reversed(effects.get(seq, []))]


class Filter(NamedTuple):
    """Conditions that a record must all meet; an empty one always holds.

    `components`: names or patterns; a family's name includes its parts. `sessions`: labels,
    patterns, or numbers of the sessions that acted or were served. `min_s`: shortest duration that
    the record reports. `since`: Unix time.
    """

    components: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    min_s: float = 0.0
    since: float = 0.0

    def wants(self, record: Record, seen: RecordContext) -> bool:
        """`seen` has noted all records before this one."""
        return (
            record.time >= self.since
            and (not self.kinds or kind_of(record) in self.kinds)
            and (not self.components or self._is_of_component(record, seen))
            and (not self.sessions or self._is_of_session(record, seen))
            and (not self.min_s or (took(record, seen) or 0.0) >= self.min_s)
        )

    def _is_of_component(self, record: Record, seen: RecordContext) -> bool:
        about = seen.about(record)
        names = {*about, *(seen.part_of[name] for name in about if name in seen.part_of)}
        request = getattr(record.event, "request", None)
        if isinstance(request, protocol.Register):
            names.add(request.part_of or request.name)
        return any(fnmatchcase(name, given) for name in names for given in self.components)

    def _is_of_session(self, record: Record, seen: RecordContext) -> bool:
        opened = record.event
        if isinstance(opened, events.SessionOpened):
            return self._is_meant(opened.session, opened.label)
        return any(self._is_meant(one, seen.labels.get(one, "")) for one in _sessions(record))

    def _is_meant(self, session: int, label: str) -> bool:
        return any(given == str(session) or fnmatchcase(label, given) for given in self.sessions)


def kind_of(record: Record) -> str:
    item = record.event or record.action
    if isinstance(item, events.SessionRequest):
        return str(item.request.__struct_config__.tag)
    if item is not None:
        return str(item.__struct_config__.tag)
    return "start" if record.start is not None else "dropped"


def unknown_kinds(kinds: tuple[str, ...]) -> list[str]:
    return [kind for kind in kinds if kind not in KINDS]


def took(record: Record, seen: RecordContext) -> float | None:
    """Return the seconds of the step that the record ends; None if it ends none."""
    if isinstance(record.event, events.Over):
        return _since(record.event.generation, seen.copies, record)
    match record.action:
        case actions.Grant() as a:
            return a.waited_s
        case actions.Evicted() | actions.Lost() as a:
            return _since(a.generation, seen.evictions, record)
        case _:
            return None


def _since(
    generation: int, begun: Mapping[int, tuple[object, float]], record: Record
) -> float | None:
    return record.time - begun[generation][1] if generation in begun else None


def _sessions(record: Record) -> tuple[int, ...]:
    item = record.event or record.action
    if isinstance(item, actions.Evict):
        return () if item.waiter is None else (item.waiter[0],)
    if isinstance(item, events.Dropping):
        return item.sessions
    session = getattr(item, "session", None)
    return () if session is None else (session,)
