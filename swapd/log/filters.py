"""Selects the records of the swap log that a reader wants. Pure."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from swapd.core import actions, events
from swapd.log.history import Seen
from swapd.log.records import KINDS, Record
from swapd.shared.protocol import Register


class Filter(NamedTuple):
    """Conditions that a record must all meet; an empty one always holds.

    `components`: names or patterns; the name of a family includes its parts. `sessions`: labels,
    patterns of them, or numbers of the sessions that acted or were served. `kinds`: as in the
    schema. `min_s`: shortest duration that the record reports. `since`: Unix time.
    """

    components: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    min_s: float = 0.0
    since: float = 0.0

    def wants(self, record: Record, seen: Seen) -> bool:
        """Whether a record meets them all. `seen` holds the records before it."""
        return (
            record.time >= self.since
            and (not self.kinds or kind_of(record) in self.kinds)
            and (not self.components or self._is_of_component(record, seen))
            and (not self.sessions or self._is_of_session(record, seen))
            and (not self.min_s or (took(record, seen) or 0.0) >= self.min_s)
        )

    def _is_of_component(self, record: Record, seen: Seen) -> bool:
        about = seen.about(record)
        names = {*about, *(seen.part_of[name] for name in about if name in seen.part_of)}
        if isinstance(e := record.event, events.SessionRequest) and isinstance(e.request, Register):
            names.add(e.request.part_of or e.request.name)
        return any(fnmatchcase(name, given) for name in names for given in self.components)

    def _is_of_session(self, record: Record, seen: Seen) -> bool:
        opened = record.event
        if isinstance(opened, events.SessionOpened):
            return self._is_meant(opened.session, opened.label)
        return any(self._is_meant(one, seen.labels.get(one, "")) for one in _sessions(record))

    def _is_meant(self, session: int, label: str) -> bool:
        return any(given == str(session) or fnmatchcase(label, given) for given in self.sessions)


def kind_of(record: Record) -> str:
    """The kind of a record, or its type if it has none."""
    item = record.event or record.action
    if isinstance(item, events.SessionRequest):
        return str(item.request.__struct_config__.tag)
    if item is not None:
        return str(item.__struct_config__.tag)
    return "start" if record.start is not None else "dropped"


def unknown_kinds(kinds: tuple[str, ...]) -> list[str]:
    return [kind for kind in kinds if kind not in KINDS]


def took(record: Record, seen: Seen) -> float | None:
    """Seconds that the finished step of a record took; None if the record finishes nothing."""
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
