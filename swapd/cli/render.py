"""Swap log records as text for people, given the records before them.

Pure: a record and a `Seen` in, text out. The log, and that of one component, share it.
"""

from datetime import datetime
from typing import NamedTuple

from rich.text import Text

from swapd.cli.common import OWN_LABEL
from swapd.core import actions, events
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.core.requests import deadline
from swapd.log.history import Seen, copied_bytes
from swapd.log.records import Record
from swapd.shared import protocol
from swapd.shared.text import plain
from swapd.shared.units import rate, seconds, size

_VERB_CELLS = 11
#: Bounds of the width of the names' column, which fits the longest name.
_SUBJECT_CELLS = (10, 28)

GOOD, MOVE, WAIT, BAD, QUIET = "green", "magenta", "yellow", "red", "dim"


class Said(NamedTuple):
    """A record in words. `swap`: it belongs to the default view, not only to --all."""

    verb: str
    subject: str
    detail: str
    style: str = QUIET
    swap: bool = False


def line(record: Record, seen: Seen, *, everything: bool = False) -> Text | None:
    """One line of the readable log, or None if the record is not for this view."""
    said = _shown(record, seen)
    return in_columns(record.time, said, seen) if said.swap or everything else None


def in_columns(time: float, said: Said, seen: Seen) -> Text:
    """One line of the readable log."""
    low, high = _SUBJECT_CELLS
    width = min(max(map(len, seen.sizes), default=low), high)
    text = Text.assemble(
        (stamp(time), "dim"),
        "  ",
        (said.verb.ljust(_VERB_CELLS), said.style),
        said.subject.ljust(max(width, low)),
        "  ",
        (said.detail, QUIET if said.style == QUIET else ""),
    )
    text.rstrip()
    return text


def sentence(record: Record, seen: Seen) -> Text:
    """The same line without columns, for one component's log."""
    said = _shown(record, seen)
    words = Text(said.verb, said.style)
    for part in (said.subject, " ".join(said.detail.split())):
        if part:
            words.append(f" {part}", "")
    return words


def _shown(record: Record, seen: Seen) -> Said:
    """A record in words, safe to show: any program may have written its file."""
    said = say(record, seen)
    return said._replace(subject=plain(said.subject), detail=plain(said.detail))


def stamp(time: float) -> str:
    """Local date and time with milliseconds, and the zone."""
    return datetime.fromtimestamp(time).astimezone().isoformat(" ", "milliseconds")


def say(record: Record, seen: Seen) -> Said:
    """A record in words. `seen` holds the records before it."""
    if record.event is not None:
        return _event(record.event, record, seen)
    if record.action is not None:
        return _action(record.action, record, seen)
    if record.start is not None:
        start = record.start
        what = (
            f"swapd {start.version} on {start.device}: {start.chunks} chunks of "
            f"{size(start.chunk_bytes)}"
        )
        return Said("start", what, "", "bold", True)
    why = "the disk was full, or the disk or this reader was too slow"
    return Said("missing", f"{record.dropped} records: {why}", "", BAD, True)


def _event(e: AnyEvent, record: Record, seen: Seen) -> Said:
    names = _joined(seen.about(record))
    match e:
        case events.SessionOpened():
            own = e.label.startswith(OWN_LABEL)
            return Said("opened", f"{plain(e.label)} (session {e.session})", "", GOOD, not own)
        case events.SessionEnds():
            return Said("ending", _who(seen, e.session), "", WAIT, False)
        case events.SessionGone():
            own = seen.labels.get(e.session, "").startswith(OWN_LABEL)
            took = f"and with it {names}" if names else ""
            return Said("gone", _who(seen, e.session), took, WAIT, not own)
        case events.ProcessExited():
            return Said("exited", _who(seen, e.session), "its process has ended")
        case events.LetGo():
            return Said("let go", _who(seen, e.session), "its process has unmapped everything")
        case events.Asked():
            return _asked(e.request, names, _who(seen, e.session))
        case events.HostCopyMade():
            return Said("host copy", names, "is made; to be filled")
        case events.HostCopySealed():
            return Said("ready", names, "may be acquired")
        case events.HostCopyFailed():
            return Said("failed", names, f"{e.code}: {plain(e.why)}", BAD, True)
        case events.HostCopiesPinned():
            why = f"; the rest is not: {plain(e.refused)}" if e.refused else ""
            how = f"{size(e.nbytes)} of {size(e.of)}, after {seconds(e.took_s)}{why}"
            return Said("pinned", "host copies", how, WAIT if e.refused else GOOD, True)
        case events.Revoked():
            return Said("unmapped", names, f"in {_who(seen, e.session)}")
        case events.CopiedIn():
            return Said("in", names, _copied(e.generation, record, seen), GOOD, True)
        case events.CopiedOut():
            copied = f"{_copied(e.generation, record, seen)}  written back"
            return Said("out", names, copied, MOVE, True)
        case events.Lent():
            return Said("lent", names, f"the driver has it{_after(e, record, seen)}", GOOD, True)
        case events.Reclaimed() if e.runs:
            how = f"in part: {sum(n for _, n in e.runs)} chunks{_after(e, record, seen)}"
            return Said("back", names, how, MOVE, True)
        case events.Reclaimed():
            return Said("back", names, f"in the arena{_after(e, record, seen)}", MOVE, True)
        case events.CopyFailed():
            return Said("failed", names, plain(e.why), BAD, True)
        case events.Dropping():
            who = ", ".join(_who(seen, session) for session in e.sessions)
            return Said("let go", names, f"is asked of {who}")
        case events.Dropped():
            return Said("let go", names, f"by {_who(seen, e.session)}")
        case events.Unread():
            what = "messages" if e.channel == "lifeline" else "replies"
            if not e.count:
                return Said("reads", _who(seen, e.session), f"all its {what}")
            why = plain(e.error) or "does not read"
            return Said("unread", _who(seen, e.session), f"{e.count} {what}: {why}", WAIT)
        case events.DeviceDown():
            return Said("down", "", f"the device: {plain(e.why)}", BAD, True)
        case events.RulesChanged():
            rules = (
                f"ack_timeout {e.ack_timeout_s:g} s, residency_factor {e.residency_factor:g}, "
                f"residency_bound {e.residency_bound_s:g} s, patience {e.patience_s:g} s"
            )
            return Said("rules", "", f"changed: {rules}", "bold", True)
        case events.Tick():
            return Said("tick", "", "time to look again")
        case events.Stopping():
            return Said("stopping", "", "", "bold", True)


def _asked(asked: protocol.AnyOrder, names: str, who: str) -> Said:
    match asked:
        case protocol.Register():
            group = "" if asked.group is None else f" in {plain(asked.group)}"
            words = [size(asked.nbytes), asked.policy + group]
            if asked.scratch:
                words.append(f"scratch, {asked.scratch} when it is evicted")
            elif asked.mutable:
                words.append("mutable")
            detail = f"{', '.join(words)}; by {who}"
            return Said("register", names, detail, "cyan", True)
        case protocol.Unregister():
            return Said("unregister", names, f"by {who}", "cyan", True)
        case protocol.Update():
            return Said("update", names, f"by {who}", "cyan", True)
        case protocol.GiveUp():
            return Said("give up", names, f"its update, by {who}", WAIT, True)
        case protocol.Commit():
            return Said("commit", names, f"by {who}")
        case protocol.Acquire():
            return Said("ask", names, f"by {who}{_terms(asked)}")
        case protocol.AcquireWorkspace():
            what = f"{size(asked.nbytes)} for {who}{_terms(asked)}"
            return Said("ask", names, what)
        case protocol.AcquireStart():
            return Said("ask", names, f"for {who}{_terms(asked)}")
        case protocol.Release():
            again = f", used {asked.again} times more" if asked.again else ""
            return Said("release", names, f"by {who}{again}{_used(asked.used)}")
        case protocol.Cancel():
            return Said("cancel", names, f"by {who}")
        case protocol.Prefetch():
            over = f", over {_joined(asked.over)}" if asked.over else ""
            return Said("prefetch", names, f"asked by {who}{over}")
        case protocol.Resize():
            kept = "as much as fits" if asked.resident_bytes is None else size(asked.resident_bytes)
            return Said("resize", names, f"keep {kept}; by {who}", "cyan", True)
        case protocol.Pin():
            return Said("unpin" if asked.unpin else "pin", names, f"by {who}", "cyan", True)
        case protocol.EvictNow():
            return Said("ask", names, f"to leave, by {who}", "cyan", True)


def _action(a: AnyAction, record: Record, seen: Seen) -> Said:
    names = _joined(seen.about(record))
    match a:
        case actions.MakeHostCopy():
            nothing = ", which takes no memory" if a.empty else ""
            return Said("make", names, f"a host copy of {size(a.nbytes)}{nothing}")
        case actions.SealHostCopy():
            return Said("seal", names, "the host copy")
        case actions.DropHostCopy():
            return Said("drop", names, "the host copy")
        case actions.CopyIn():
            return Said("load", names, f"{_amount(a)}{_of_all(a)}")
        case actions.CopyOut():
            return Said("write", names, f"{_amount(a)}{_of_all(a)}  back to its host copy")
        case actions.Lend():
            return Said("lend", names, f"to {_who(seen, a.session)}")
        case actions.Reclaim():
            return Said("reclaim", names, "from the driver")
        case actions.Revoke():
            return Said("revoke", names, f"from {_who(seen, a.session)}")
        case actions.Want():
            asked = "learns that it is wanted" if a.wanted else "may keep it"
            return Said("want", names, f"{_who(seen, a.session)} {asked}")
        case actions.Hurry():
            who = _who(seen, a.session)
            what = "learns that an acquire waits" if a.waits else "may keep its last leases again"
            return Said("hurry", who, what)
        case actions.Accept():
            return Said("done", names, f"for {_who(seen, a.session)}")
        case actions.Grant():
            who = f"to {_who(seen, a.session)}"
            if not a.waited_s:
                return Said("hit", names, who)
            detail = f"{who} after {seconds(a.waited_s)}{_brought(a, record, seen)}"
            return Said("granted", names, detail, GOOD, True)
        case actions.Refuse():
            why = f"{_who(seen, a.session)}, {a.code}: {plain(a.message)}"
            if a.tried:
                return Said("skipped", names, why)
            return Said("refused", names, why, BAD, True)
        case actions.Broken():
            why = f"{_who(seen, a.session)} holds it no longer: {plain(a.why)}"
            return Said("broken", names, why, BAD, True)
        case actions.Fence():
            return Said("fence", _who(seen, a.session), plain(a.why), BAD, True)
        case actions.Waiting():
            return Said("waiting", names, f"{_who(seen, a.session)} {plain(a.why)}", WAIT, True)
        case actions.Evict():
            return _evict(a, seen)
        case actions.Evicted():
            return _evicted(a, record, seen)
        case actions.Unpinned():
            why = f"for {_who(seen, a.session)}, whose request would not fit beside it"
            return Said("unpinned", names, why, WAIT, True)
        case actions.Lost():
            return Said("lost", names, plain(a.why), f"bold {BAD}", True)


def _evict(a: actions.Evict, seen: Seen) -> Said:
    nbytes = seen.sizes.get(a.name)
    amount = "" if nbytes is None else size(nbytes)
    return Said("evict", plain(a.name), f"{amount:>9}  {why_evicted(a, seen)}", MOVE, True)


def why_evicted(a: actions.Evict, seen: Seen) -> str:
    """The reason of an eviction, and the treatment of the contents if it is scratch."""
    for_whom = ""
    if a.waiter is not None:
        asked = _joined(seen.room_for(a)) or f"request {a.waiter[1]}"
        for_whom = f"for {asked}, asked by {_who(seen, a.waiter[0])}"
    match a.reason:
        case "room":
            why = f"to make room {for_whom}" if for_whom else "to make room for a prefetch"
        case "alternating":
            why = f"excluded by its group {for_whom}".rstrip()
        case "sequential":
            why = "released, and sequential"
        case "resized":
            why = "not kept any more"
        case "asked":
            why = "asked for"
        case "unregister":
            why = "unregistered"
        case "failed":
            why = "its load failed"
        case "update":
            why = "updated"
    if seen.scratch.get(a.name) == "dropped":
        return f"dropped, {why}"
    if a.name in seen.scratch and seen.used.get(a.name) == 0:
        return f"dropped, as none of it is used, {why}"
    return why


def _evicted(a: actions.Evicted, record: Record, seen: Seen) -> Said:
    """It gets its own line only if leaving took time that no other line shows."""
    cause, decided = seen.evictions.get(a.generation, (record.cause, record.time))
    took = record.time - decided
    detail = f"{size(a.nbytes):>9}  left" + (f" after {seconds(took)}" if took else "")
    return Said("evicted", plain(a.name), detail, MOVE, cause != record.cause and not a.bytes_back)


def _brought(a: actions.Grant, record: Record, seen: Seen) -> str:
    """The loads for a grant: bytes and parts of each family; zeros or restored bytes of scratch."""
    orders = seen.brought(a, record.time)
    words = []
    families: dict[str, list[actions.CopyIn]] = {}
    for name, order in orders.items():
        if name in seen.scratch:
            words.append(_began(order))
        else:
            families.setdefault(seen.part_of.get(name, name), []).append(order)
    for name, parts in reversed(families.items()):
        nbytes = sum(map(copied_bytes, parts))
        among = sum(seen.part_of.get(place.name) == name for place in a.placements)
        of = f" in {len(parts)} of {among} parts" if among else ""
        words.insert(0, f"{plain(name)} {size(nbytes)}{of}")
    return f": {', '.join(words)}" if words else ""


def _began(order: actions.CopyIn) -> str:
    """The contents with which scratch was loaded."""
    if order.only == ():
        return f"{plain(order.name)} {size(order.nbytes)} of zeros"
    among = f" of {size(order.nbytes)}" if _of_all(order) else ""
    return f"{plain(order.name)} {size(copied_bytes(order))}{among} restored"


def _copied(generation: int, record: Record, seen: Seen) -> str:
    order, began = seen.copies.get(generation, (None, 0.0))
    if not isinstance(order, actions.CopyIn | actions.CopyOut):
        return ""
    took = record.time - began
    nbytes = copied_bytes(order)
    if order.only == ():
        return f"{_amount(order)}  {seconds(took):>7}"
    speed = rate(nbytes / took) if took > 0 else ""
    return f"{_amount(order)}  {seconds(took):>7}  {speed:>9}{_of_all(order)}"


def _amount(order: actions.CopyIn | actions.CopyOut) -> str:
    """The bytes copied, or the whole size if it is only zeroed."""
    if order.only == ():
        return f"{size(order.nbytes):>9}, zeroed"
    return f"{size(copied_bytes(order)):>9}"


def _of_all(order: actions.CopyIn | actions.CopyOut) -> str:
    """The whole size, if only a part is copied."""
    if not order.only or copied_bytes(order) == order.nbytes:
        return ""
    rest = ", the rest zeroed" if isinstance(order, actions.CopyIn) else ""
    return f"  of {size(order.nbytes)}{rest}"


def _used(said: tuple[protocol.Used, ...]) -> str:
    """The ranges of scratch to save from now on."""
    return "".join(
        f"; of {plain(used.name)} {size(sum(nbytes for _, nbytes in used.ranges))} is used"
        for used in said
    )


def _after(e: events.Lent | events.Reclaimed, record: Record, seen: Seen) -> str:
    if e.generation not in seen.copies:
        return ""
    _, began = seen.copies[e.generation]
    return f" after {seconds(record.time - began)}"


def _terms(asked: protocol.AnyAcquire) -> str:
    first = not isinstance(asked, protocol.AcquireStart) and asked.priority
    terms = [f"priority {first}"] if first else []
    within_s = deadline(asked.timeout_s, 0.0)
    terms += [f"within {seconds(within_s)}"] if within_s is not None else []
    if isinstance(asked, protocol.Acquire):
        terms += ["waits for the name"] if asked.await_registration else []
        terms += ["early"] if asked.early else []
    return f" ({', '.join(terms)})" if terms else ""


def _who(seen: Seen, session: int) -> str:
    label = seen.labels.get(session)
    return f"session {session}" if label is None else f"{plain(label)} (session {session})"


def _joined(names: tuple[str, ...]) -> str:
    return " + ".join(map(plain, names))
