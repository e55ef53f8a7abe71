"""Swap log records as text for people, given the records before them (`RecordContext`). Pure."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rich.text import Text

from swapd.cli.common import clock
from swapd.cli.target import OWN_LABEL
from swapd.core import actions, events
from swapd.core.chunks import count
from swapd.core.requests import deadline
from swapd.log.history import RecordContext, copied_bytes
from swapd.log.records import Record
from swapd.shared import protocol
from swapd.shared.text import counted, plain
from swapd.shared.units import rate, seconds, size

_VERB_CELLS = 11
_SUBJECT_CELLS = (10, 28)

GOOD, MOVE, WAIT, BAD, QUIET = "green", "magenta", "yellow", "red", "dim"


class Phrase(NamedTuple):
    """A record in words. `swap`: the default view shows it, not only --all."""

    verb: str
    subject: str
    detail: str = ""
    style: str = QUIET
    swap: bool = False


class ShownLine(NamedTuple):
    time: float
    text: Text


def line(record: Record, seen: RecordContext, *, everything: bool = False) -> ShownLine | None:
    said = say(record, seen)
    return in_columns(record.time, said, seen) if said.swap or everything else None


def in_columns(time: float, said: Phrase, seen: RecordContext) -> ShownLine:
    low, high = _SUBJECT_CELLS
    width = min(max(map(len, seen.sizes), default=low), high)
    text = Text.assemble(
        (f"{clock(time)}  ", "dim"),
        (said.verb.ljust(_VERB_CELLS), said.style),
        said.subject.ljust(max(width, low)),
        "  ",
        (said.detail, QUIET if said.style == QUIET else ""),
    )
    text.rstrip()
    return ShownLine(time, text)


def sentence(record: Record, seen: RecordContext) -> Text:
    said = say(record, seen)
    words = Text(said.verb, said.style)
    for part in (said.subject, " ".join(said.detail.split())):
        if part:
            words.append(f" {part}", "")
    return words


def say(record: Record, seen: RecordContext) -> Phrase:
    """Put a record in words that are safe to show: any program may have written its file. `seen`
    holds the records before it."""
    item: Any = record.event or record.action
    if item is None:
        return _of_log(record)
    words = _Fields(item, record, seen)
    said = _SAID[type(words.item)]
    if not isinstance(said, Phrase):
        said = said(words.item, words)
    verb, subject, detail = (part.format_map(words) for part in said[:3])
    return Phrase(verb, plain(subject), plain(detail), said.style, said.swap)


def _of_log(record: Record) -> Phrase:
    if (start := record.start) is not None:
        chunks = f"{counted(start.chunks, 'chunk')} of {size(start.chunk_bytes)}"
        about = plain(f"swapd {start.version} on {start.device}: {chunks}")
        return Phrase("start", about, "", "bold", True)
    why = "the disk was full, or the disk or this reader was too slow"
    return Phrase("missing", f"{counted(record.dropped, 'record')}: {why}", "", BAD, True)


class _Fields(dict[str, str]):
    """The values of a template's fields, each computed when it is used."""

    def __init__(self, item: Any, record: Record, seen: RecordContext) -> None:
        super().__init__()
        self.session: int = getattr(item, "session", 0)
        self.item: Any = item.request if isinstance(item, events.SessionRequest) else item
        self.record, self.seen = record, seen

    def __missing__(self, field: str) -> str:
        compute = _FIELDS.get(field)
        return str(getattr(self.item, field)) if compute is None else compute(self)


_FIELDS: dict[str, Callable[[_Fields], str]] = {
    "names": lambda w: " + ".join(w.seen.about(w.record)),
    "who": lambda w: _who(w.seen, w.session),
    "size": lambda w: size(w.item.nbytes),
    "copied": lambda w: _copied(w.item.generation, w.record, w.seen),
    "ordered": lambda w: f"{_amount(w.item)}{_of_all(w.item)}",
    "after": lambda w: _after(w.item.generation, w.record, w.seen),
    "chunks": lambda w: counted(count(w.item.runs), "chunk"),
    "where": lambda w: f"in part: {w['chunks']}" if w.item.runs else "in the arena",
    "terms": lambda w: _terms(w.item),
    "registration": lambda w: _registration(w.item),
    "again": lambda w: f", used {w.item.again} times more" if w.item.again else "",
    "followed": lambda w: w.item.after,
    "over": lambda w: f", over {' + '.join(w.item.over)}" if w.item.over else "",
    "kept": lambda w: (
        "as much as fits" if w.item.resident_bytes is None else size(w.item.resident_bytes)
    ),
    "pin": lambda w: "unpin" if w.item.unpin else "pin",
    "memory": lambda w: ", which takes no memory" if w.item.empty else "",
    "want": lambda w: "learns that it is wanted" if w.item.wanted else "may keep it",
    "hurry": lambda w: (
        "learns that an acquire waits" if w.item.waits else "may keep its last leases again"
    ),
    "rank": lambda w: (
        "is what an acquire waits for",
        "is what a prefetch waits for",
        "waits for all others: nobody needs it",
    )[w.item.urgency[0]],
    "used": lambda w: _used(w.item.used),
    "leavers": lambda w: ", ".join(_who(w.seen, session) for session in w.item.sessions),
    "known_size": lambda w: size(w.seen.sizes[w.item.name]) if w.item.name in w.seen.sizes else "",
    "why_evicted": lambda w: why_evicted(w.item, w.seen),
    "brought": lambda w: _brought(w.item, w.record, w.seen),
}


def _opened(e: events.SessionOpened, w: _Fields) -> Phrase:
    swap = not e.label.startswith(OWN_LABEL)
    return Phrase("opened", "{label} (session {session})", "", GOOD, swap)


def _gone(e: events.SessionGone, w: _Fields) -> Phrase:
    swap = not w.seen.labels.get(e.session, "").startswith(OWN_LABEL)
    return Phrase("gone", "{who}", "and with it {names}" if w["names"] else "", WAIT, swap)


def _pinned(e: events.HostCopiesPinned, w: _Fields) -> Phrase:
    how = f"{{size}} of {size(e.of)}, after {seconds(e.took_s)}"
    if e.refused:
        return Phrase("pinned", "host copies", f"{how}; the rest is not: {{refused}}", WAIT, True)
    return Phrase("pinned", "host copies", how, GOOD, True)


def _unread(e: events.Unread, w: _Fields) -> Phrase:
    what = "messages" if e.channel == "lifeline" else "replies"
    if not e.count:
        return Phrase("reads", "{who}", f"all its {what}")
    why = "{error}" if w["error"] else "does not read"
    return Phrase("unread", "{who}", f"{{count}} {what}: {why}", WAIT)


def _rules(e: events.RulesChanged, w: _Fields) -> Phrase:
    of = "".join(f", overtake {most} for {name}" for name, most in e.overtake_of)
    rules = (
        f"ack_timeout {e.ack_timeout_s:g} s, residency_factor {e.residency_factor:g}, "
        f"residency_bound {e.residency_bound_s:g} s, patience {e.patience_s:g} s, "
        f"overtake {e.overtake}{of}, turn {e.turn_s:g} s, keep_host {size(e.keep_host)}"
    )
    return Phrase("rules", "", f"changed: {rules}", "bold", True)


def _grant(a: actions.Grant, w: _Fields) -> Phrase:
    if not a.waited_s:
        return Phrase("hit", "{names}", "to {who}")
    passed = f", overtaken by {a.overtaken}" if a.overtaken else ""
    detail = f"to {{who}} after {seconds(a.waited_s)}{passed}{{brought}}"
    return Phrase("granted", "{names}", detail, GOOD, True)


def _refuse(a: actions.Refuse, w: _Fields) -> Phrase:
    why = "{who}, {code}: {message}"
    verb, style = ("skipped", QUIET) if a.tried else ("refused", BAD)
    return Phrase(verb, "{names}", why, style, not a.tried)


def _evicted(a: actions.Evicted, w: _Fields) -> Phrase:
    """The default view shows the line only if leaving took time that no other line shows."""
    record = w.record
    cause, decided = w.seen.evictions.get(a.generation, (record.cause, record.time))
    took = record.time - decided
    detail = "{size:>9}  left" + (f" after {seconds(took)}" if took else "")
    return Phrase("evicted", "{name}", detail, MOVE, cause != record.cause and not a.bytes_back)


_CAME: dict[actions.Outcome, str] = {
    "in": "was in when it was asked for: {saved} saved",
    "coming": "was coming when it was asked for: {saved} saved",
    "no_room": "found no room before it was asked for",
    "taken_back": "is expected no longer",
    "in_vain": "left again before it was asked for",
}


def _foreseen(a: actions.Foreseen, w: _Fields) -> Phrase:
    detail = f"after {{followed}}, {_CAME[a.outcome].format(saved=seconds(a.saved_s))}"
    return Phrase("foreseen", "{names}", detail, GOOD if a.saved_s else WAIT, True)


def _follow(asked: protocol.Follows, w: _Fields) -> Phrase:
    how = "seen in the calls of" if asked.seen else "says"
    return Phrase("follow", "{names}", f"follow {{followed}}, {how} {{who}}")


#: The words for each kind of event, request and action: a template, or a function that makes one.
_SAID: dict[type, Phrase | Callable[[Any, _Fields], Phrase]] = {
    events.SessionOpened: _opened,
    events.SessionEnds: Phrase("ending", "{who}", "", WAIT),
    events.SessionGone: _gone,
    events.ProcessExited: Phrase("exited", "{who}", "its process has ended"),
    events.UnmapAck: Phrase("let go", "{who}", "its process has unmapped everything"),
    events.HostCopyMade: Phrase("host copy", "{names}", "is made; to be filled"),
    events.HostCopySealed: Phrase("ready", "{names}", "may be acquired"),
    events.HostCopyFailed: Phrase("failed", "{names}", "{code}: {why}", BAD, True),
    events.HostCopyFound: Phrase("found", "{name}", "{size}, kept by the last daemon", GOOD, True),
    events.MemoryMissing: Phrase("short", "{chunks}", "in use by workers from before", WAIT, True),
    events.HostCopiesPinned: _pinned,
    events.RevokeAck: Phrase("unmapped", "{names}", "in {who}"),
    events.CopiedIn: Phrase("in", "{names}", "{copied}", GOOD, True),
    events.CopyStopped: Phrase("stopped", "{names}", "its load: nobody waited for it", MOVE, True),
    events.CopiedOut: Phrase("out", "{names}", "{copied}  written back", MOVE, True),
    events.Lent: Phrase("lent", "{names}", "the driver has it{after}", GOOD, True),
    events.Reclaimed: Phrase("back", "{names}", "{where}{after}", MOVE, True),
    events.CopyFailed: Phrase("failed", "{names}", "{why}", BAD, True),
    events.Dropping: Phrase("let go", "{names}", "is asked of {leavers}"),
    events.DropAck: Phrase("let go", "{names}", "by {who}"),
    events.Unread: _unread,
    events.DeviceDown: Phrase("down", "", "the device: {why}", BAD, True),
    events.RulesChanged: _rules,
    events.Tick: Phrase("tick", "", "time to look again"),
    events.Stopping: Phrase("stopping", "", "", "bold", True),
    protocol.Register: Phrase("register", "{names}", "{registration}; by {who}", "cyan", True),
    protocol.Unregister: Phrase("unregister", "{names}", "by {who}", "cyan", True),
    protocol.Forget: Phrase("forget", "{names}", "their kept host copies, by {who}", "cyan", True),
    protocol.Update: Phrase("update", "{names}", "by {who}", "cyan", True),
    protocol.GiveUp: Phrase("give up", "{names}", "its update, by {who}", WAIT, True),
    protocol.Commit: Phrase("commit", "{names}", "by {who}"),
    protocol.Acquire: Phrase("ask", "{names}", "by {who}{terms}"),
    protocol.AcquireWorkspace: Phrase("ask", "{names}", "{size} for {who}{terms}"),
    protocol.AcquireStart: Phrase("ask", "{names}", "for {who}{terms}"),
    protocol.Release: Phrase("release", "{names}", "by {who}{again}{used}"),
    protocol.Cancel: Phrase("cancel", "{names}", "by {who}"),
    protocol.Prefetch: Phrase("prefetch", "{names}", "asked by {who}{over}"),
    protocol.Follows: _follow,
    protocol.Resize: Phrase("resize", "{names}", "keep {kept}; by {who}", "cyan", True),
    protocol.Pin: Phrase("{pin}", "{names}", "by {who}", "cyan", True),
    protocol.EvictNow: Phrase("ask", "{names}", "to leave, by {who}", "cyan", True),
    actions.MakeHostCopy: Phrase("make", "{names}", "a host copy of {size}{memory}"),
    actions.Hasten: Phrase("rank", "{name}", "its load {rank}"),
    actions.StopCopy: Phrase("stop", "{name}", "its load: nobody waits for it"),
    actions.SealHostCopy: Phrase("seal", "{names}", "the host copy"),
    actions.KeepHostCopy: Phrase("keep", "{names}", "the host copy, for the next that loads it"),
    actions.DropHostCopy: Phrase("drop", "{names}", "the host copy"),
    actions.CopyIn: Phrase("load", "{names}", "{ordered}"),
    actions.CopyOut: Phrase("write", "{names}", "{ordered}  back to its host copy"),
    actions.Lend: Phrase("lend", "{names}", "to {who}"),
    actions.Reclaim: Phrase("reclaim", "{names}", "from the driver"),
    actions.SendRevoke: Phrase("revoke", "{names}", "from {who}"),
    actions.SendWanted: Phrase("want", "{names}", "{who} {want}"),
    actions.SendHurry: Phrase("hurry", "{who}", "{hurry}"),
    actions.Accept: Phrase("done", "{names}", "for {who}"),
    actions.Grant: _grant,
    actions.Refuse: _refuse,
    actions.SendBroken: Phrase("broken", "{names}", "{who} holds it no longer: {why}", BAD, True),
    actions.Fence: Phrase("fence", "{who}", "{why}", BAD, True),
    actions.Waiting: Phrase("waiting", "{names}", "{who} {why}", WAIT, True),
    actions.Evict: Phrase("evict", "{name}", "{known_size:>9}  {why_evicted}", MOVE, True),
    actions.Evicted: _evicted,
    actions.Foresee: Phrase("foresee", "{names}", "it follows {followed}, which is used"),
    actions.Foreseen: _foreseen,
    actions.Lost: Phrase("lost", "{names}", "{why}", f"bold {BAD}", True),
}

_WHY: dict[actions.Reason, str] = {
    "room": "to make room",
    "alternating": "excluded by its group",
    "sequential": "released, and sequential",
    "resized": "not kept any more",
    "asked": "asked for",
    "unregister": "unregistered",
    "failed": "its load failed",
    "update": "updated",
    "joined": "its bytes stay in, for another component that has the same",
}


def why_evicted(a: actions.Evict, seen: RecordContext) -> str:
    why = _WHY[a.reason]
    if a.reason in ("room", "alternating") and a.waiter is not None:
        asked = " + ".join(seen.room_for(a)) or f"request {a.waiter[1]}"
        why += f" for {asked}, asked by {_who(seen, a.waiter[0])}"
    elif a.reason == "room":
        why += " for a prefetch"
    if seen.scratch.get(a.name) == "dropped":
        return f"dropped, {why}"
    if a.name in seen.scratch and seen.used.get(a.name) == 0:
        return f"dropped, as none of it is used, {why}"
    return why


def _brought(a: actions.Grant, record: Record, seen: RecordContext) -> str:
    words = []
    families: dict[str, list[actions.CopyIn]] = {}
    for name, order in seen.brought(a, record.time).items():
        if name in seen.scratch:
            words.append(_contents(order))
        else:
            families.setdefault(seen.part_of.get(name, name), []).append(order)
    for name, parts in reversed(families.items()):
        among = sum(seen.part_of.get(place.name) == name for place in a.placements)
        of = f" in {len(parts)} of {among} parts" if among else ""
        words.insert(0, f"{name} {size(sum(map(copied_bytes, parts)))}{of}")
    return f": {', '.join(words)}" if words else ""


def _contents(order: actions.CopyIn) -> str:
    if order.only == ():
        return f"{order.name} {size(order.nbytes)} of zeros"
    among = f" of {size(order.nbytes)}" if _of_all(order) else ""
    return f"{order.name} {size(copied_bytes(order))}{among} restored"


def _copied(generation: int, record: Record, seen: RecordContext) -> str:
    order, began = seen.copies.get(generation, (None, 0.0))
    if not isinstance(order, actions.CopyIn | actions.CopyOut):
        return ""
    took = record.time - began
    if not copied_bytes(order):
        return f"{_amount(order)}  {seconds(took):>7}"
    return f"{_amount(order)}  {speed(copied_bytes(order), took)}{_of_all(order)}"


def speed(nbytes: int, took: float) -> str:
    return f"{seconds(took):>7}  {rate(nbytes / took) if took > 0 else '':>9}"


def _amount(order: actions.CopyIn | actions.CopyOut) -> str:
    if order.only == ():
        return f"{size(order.nbytes):>9}, zeroed"
    if isinstance(order, actions.CopyIn) and order.joins:
        return f"{size(order.nbytes):>9}, which {order.joins} has in already: nothing is copied"
    return f"{size(copied_bytes(order)):>9}"


def _of_all(order: actions.CopyIn | actions.CopyOut) -> str:
    if not order.only or copied_bytes(order) == order.nbytes:
        return ""
    rest = ", the rest zeroed" if isinstance(order, actions.CopyIn) else ""
    return f"  of {size(order.nbytes)}{rest}"


def _used(said: tuple[protocol.UsedRanges, ...]) -> str:
    return "".join(
        f"; of {used.name} {size(sum(nbytes for _, nbytes in used.ranges))} is used"
        for used in said
    )


def _after(generation: int, record: Record, seen: RecordContext) -> str:
    if generation not in seen.copies:
        return ""
    return f" after {seconds(record.time - seen.copies[generation][1])}"


def _registration(asked: protocol.Register) -> str:
    terms = f"{size(asked.nbytes)}, {asked.policy}"
    terms += "" if asked.group is None else f" in {asked.group}"
    if asked.scratch:
        return f"{terms}, scratch, {asked.scratch} when it is evicted"
    return f"{terms}, mutable" if asked.mutable else terms


def _terms(asked: protocol.AnyAcquire) -> str:
    within_s = deadline(asked.timeout_s, 0.0)
    terms = {
        f"priority {getattr(asked, 'priority', 0)}": getattr(asked, "priority", 0),
        f"within {seconds(within_s or 0.0)}": within_s is not None,
        "waits for the name": getattr(asked, "await_registration", False),
        "early": getattr(asked, "early", False),
    }
    said = ", ".join(term for term, holds in terms.items() if holds)
    return f" ({said})" if said else ""


def _who(seen: RecordContext, session: int) -> str:
    label = seen.labels.get(session)
    return f"session {session}" if label is None else f"{label} (session {session})"
