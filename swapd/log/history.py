"""Reads the swap log back: its runs, and each record in the context of earlier ones.

Records name sessions, requests and copies by number; `Seen` remembers the meaning of the numbers.
Lives here: reading and remembering. May not live here: text for people.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from swapd.core import actions, events
from swapd.core.records import workspace_name
from swapd.core.requests import names_of
from swapd.log.records import OtherSchema, Record, parse
from swapd.shared import protocol

#: Most sessions whose label is remembered; a record may name one that is long gone.
LABELS_MAX = 10_000
#: Most names of gone components that are remembered.
NAMES_GONE_MAX = 1_000

#: Slow actions, whose ends name them by generation.
Slow = actions.CopyIn | actions.CopyOut | actions.Lend | actions.Reclaim


def copied_bytes(order: actions.CopyIn | actions.CopyOut) -> int:
    """Bytes that this copy moves: all of a component, or the used ranges of scratch."""
    return order.nbytes if order.only is None else sum(nbytes for _, nbytes in order.only)


class LogLine(NamedTuple):
    """One line of the log, as bytes and as a record."""

    raw: bytes
    record: Record


class Runs(NamedTuple):
    """The contents of a log: the lines that this version reads, and the number of runs in another
    schema."""

    lines: list[LogLine]
    left_out: int


def read(path: Path) -> list[LogLine]:
    """All lines of a log, those of the rotated file first.

    Leaves out lines that do not parse (cut short by a power failure, or of a later version's kind),
    an unfinished last line, and earlier runs in another schema. Raises: OSError; OtherSchema if the
    last run is in another.
    """
    reader = Reader()
    lines = list(reader.read(_whole_lines(path)))
    if reader.other is not None:
        raise reader.other
    return lines


def read_runs(path: Path) -> Runs:
    """The same, even if the last run is in another schema. Raises: OSError."""
    reader = Reader()
    return Runs(list(reader.read(_whole_lines(path))), reader.left_out)


class Reader:
    """Reads lines in order."""

    def __init__(self) -> None:
        #: Why the current run cannot be read; None if it can.
        self.other: OtherSchema | None = None
        self.left_out = 0

    def read(self, lines: Iterable[bytes]) -> Iterator[LogLine]:
        for raw in lines:
            if (record := self._parse(raw)) is not None:
                yield LogLine(raw, record)

    def _parse(self, raw: bytes) -> Record | None:
        try:
            record = parse(raw)
        except OtherSchema as exc:
            self.other = exc
            self.left_out += 1
            return None
        except (msgspec.MsgspecError, ValueError, RecursionError):  # no UTF-8, or no record
            self.left_out += bool(raw) and self.other is not None
            return None
        if record.start is not None:
            self.other = None
        elif self.other is not None:
            self.left_out += 1
            return None
        return record


def _whole_lines(path: Path) -> list[bytes]:
    with path.open("rb") as now:
        try:
            with path.with_name(path.name + ".1").open("rb") as before:
                old = b"" if _same(now.fileno(), before.fileno()) else before.read()
        except FileNotFoundError:
            old = b""
        data = old + now.read()
    whole, _, _ = data.rpartition(b"\n")
    return whole.split(b"\n")


def _same(a: int, b: int) -> bool:
    """Whether a rotation came between the two `open`s."""
    return os.path.sameopenfile(a, b)


def last_run(lines: Sequence[LogLine]) -> Sequence[LogLine]:
    """The lines of the latest daemon: a log can hold several, and each counts from 1."""
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].record.start is not None or (
            i and lines[i].record.seq < lines[i - 1].record.seq
        ):
            return lines[i:]
    return lines


class Seen:
    """The context that later records refer to by number.

    `note` each record after looking at it. `Seen` forgets everything that no later record can refer
    to, so that a reader can follow a log for months.
    """

    def __init__(self) -> None:
        self.labels: dict[int, str] = {}
        #: (session, request): its names, from the request to the release or refusal.
        self.asked: dict[tuple[int, int], tuple[str, ...]] = {}
        #: Copies in flight, loans and reclaims, by generation: the order and its time.
        self.copies: dict[int, tuple[Slow, float]] = {}
        #: Evictions in progress, by generation: the cause, and the time of the decision.
        self.evictions: dict[int, tuple[int, float]] = {}
        #: Names of host copies by uid, and of components by session.
        self.masters: dict[int, str] = {}
        self.owned: dict[int, dict[str, None]] = {}
        self.sizes: dict[str, int] = {}
        #: Scratch by name; and the bytes of it that are worth saving, if a release gave them.
        self.scratch: dict[str, protocol.Scratch] = {}
        self.used: dict[str, int] = {}
        #: The family of each part, by name.
        self.part_of: dict[str, str] = {}
        #: The last load of each component, and the time of its end.
        self.came: dict[str, tuple[actions.CopyIn, float]] = {}

    def about(self, record: Record) -> tuple[str, ...]:
        """The components of a record; for an eviction also those that it makes room for."""
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
        """The component of an event that has only the number of a host copy or a generation."""
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
        """The slow action of this generation, while it runs."""
        return self.copies[generation][0] if generation in self.copies else None

    def room_for(self, evict: actions.Evict) -> tuple[str, ...]:
        """The names for which an eviction makes room."""
        return () if evict.waiter is None else self.asked.get(evict.waiter, ())

    def brought(self, grant: actions.Grant, time: float) -> dict[str, actions.CopyIn]:
        """The loads that a grant waited for, by name."""
        began = time - grant.waited_s
        found = ((place, self.came.get(place.name)) for place in grant.placements)
        return {
            place.name: came[0]
            for place, came in found
            if came and came[0].generation == place.generation and came[1] >= began
        }

    def note(self, record: Record) -> None:
        """Update the context after a record."""
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
            case events.SessionGone():
                self._forget_session(e.session)
            case events.Reclaimed() if e.runs:
                pass  # the rest comes later
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
        """Forget names that belong to no component and no open request; rarely, because it looks at
        all of them. Such names come from refused requests, and from before the log begins."""
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
            return  # the other of two: an update
        self.came.pop(a.name, None)
        for names in self.owned.values():
            names.pop(a.name, None)


def names_in(lines: Iterable[LogLine]) -> set[str]:
    """The names of all components in a log."""
    return {name for _, about in _with_names(lines) for name in about}


def _with_names(lines: Iterable[LogLine]) -> Iterator[tuple[LogLine, tuple[str, ...]]]:
    """Each line with the components of its record."""
    seen = Seen()
    for line in lines:
        yield line, seen.about(line.record)
        seen.note(line.record)


def belonging(lines: Iterable[LogLine], name: str) -> set[str]:
    """`name`, and other names for it in records: for a family its parts, for a part its family."""
    asked = [
        e.request for line in lines if isinstance(e := line.record.event, events.SessionRequest)
    ]
    registered = [request for request in asked if isinstance(request, protocol.Register)]
    parts = {e.name for e in registered if e.part_of == name}
    return {name} | parts | {e.part_of for e in registered if e.name == name and e.part_of}


class StoryStep(NamedTuple):
    """One record in the story of a component. `depth`: number of causes before it."""

    line: LogLine
    depth: int
    #: Whether it is about the component itself, or only a cause of such a record.
    about: bool


def of_component(lines: Sequence[LogLine], name: str) -> list[list[StoryStep]]:
    """The story of a component, or a family: a chapter for each first cause, in order of time.

    A chapter has the records about the component that followed from that cause, each after its own
    cause, and one deeper. `lines` are those of one run.
    """
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
    """These records, and the causes of each, as far as the log has them."""
    kept: set[int] = set()
    for seq in about:
        while seq in by_seq and seq not in kept:
            kept.add(seq)
            seq = by_seq[seq].record.cause
    return kept


def _in_turn(first: int, effects: Mapping[int, list[int]]) -> Iterator[tuple[int, int]]:
    """A record and all that followed from it, each after its cause, with its depth."""
    todo = [(first, 0)]
    while todo:
        seq, depth = todo.pop()
        yield seq, depth
        todo += [(effect, depth + 1) for effect in reversed(effects.get(seq, []))]
