"""What a client asks becomes an event of the core. Pure: no sockets, no clock.

Checks here what a type cannot say; whether it may be granted is the core's to decide.
"""

from itertools import pairwise

from swapd.core import events
from swapd.core.events import AnyEvent
from swapd.shared import protocol
from swapd.shared.board import SEGMENTS_MAX
from swapd.shared.text import problem_with_text

#: More than any machine has: a size above it is a mistake.
_BYTES_MAX = 1 << 50

#: Longer than any daemon runs: who waits so long, or for ever (inf), has no deadline.
_TIMEOUT_MAX_S = 1e9


def problem_with(request: protocol.AnyRequest) -> str | None:
    """What is wrong with a request that decodes, for its sender; None if nothing is."""
    match request:
        case protocol.Acquire():
            return _names(request.names) or _timeout(request.timeout_s)
        case protocol.AcquireWorkspace():
            return _workspace(request.nbytes) or _timeout(request.timeout_s)
        case protocol.Prefetch() | protocol.Forecast():
            return _names(request.names)
        case protocol.Register():
            names = (request.name, request.part_of) if request.part_of else (request.name,)
            return _names(names) or _size(request.nbytes, request.segments) or _rest(request)
        case protocol.Commit():
            return _names((request.name, *request.also))
        case protocol.Update() | protocol.GiveUp() | protocol.Unregister():
            return _names((request.name,))
        case protocol.Resize():
            return _names((request.name,)) or _size(request.resident_bytes or 0, ())
        case _:
            return None


def _names(names: tuple[str, ...]) -> str | None:
    if not names:
        return "names no component; name at least one"
    if len(names) > protocol.NAMES_MAX:
        return f"more than {protocol.NAMES_MAX} names in one request"
    for name in names:
        if not 0 < len(name) <= protocol.NAME_MAX_CHARS or not name.isprintable():
            return f"{name[:40]!r} is no name: 1 to {protocol.NAME_MAX_CHARS} printable characters"
    return None


def _timeout(timeout_s: float | None) -> str | None:
    return None if (timeout_s or 0.0) >= 0.0 else f"timeout_s={timeout_s} is no time"


def _workspace(nbytes: int) -> str | None:
    return None if 0 < nbytes < _BYTES_MAX else f"nbytes={nbytes} is no size of a workspace"


def _rest(request: protocol.Register) -> str | None:
    said = {"content": request.content, "layout": request.layout, "group": request.group or ""}
    for what, text in said.items():
        if problem := problem_with_text(what, text):
            return problem
    if request.content and request.mutable:
        return "a mutable component shares its bytes with no other; give no content"
    if request.passing and not request.part_of:
        return 'only a part of a family passes through; give part_of, or policy="sequential"'
    return None


def _size(nbytes: int, segments: tuple[int, ...]) -> str | None:
    if not 0 <= nbytes < _BYTES_MAX:
        return f"nbytes={nbytes} is no size"
    if len(segments) > SEGMENTS_MAX:
        return f"{len(segments)} segments; at most {SEGMENTS_MAX}"
    rising = all(a <= b for a, b in pairwise((0, *segments)))
    if segments and not (rising and segments[-1] == nbytes):
        return f"segments must end at rising offsets, the last at nbytes={nbytes}"
    return None


def event_of(request: protocol.AnyRequest, session: int, now: float) -> AnyEvent:
    """The event that `request` of `session` is. Questions are none: they change nothing."""
    match request:
        case protocol.Acquire():
            return events.Acquire(
                now,
                session,
                request.id,
                request.agent,
                request.names,
                request.priority,
                _deadline(request.timeout_s, now),
                request.wait,
                request.early,
            )
        case protocol.Release():
            return events.Release(now, session, request.lease, request.again)
        case protocol.Cancel():
            return events.Cancel(now, session, request.acquire)
        case protocol.Prefetch():
            return events.Prefetch(now, session, request.id, request.names)
        case protocol.Resize():
            return events.Resize(now, session, request.id, request.name, request.resident_bytes)
        case protocol.Register():
            return events.Register(
                now,
                session,
                request.id,
                request.name,
                request.nbytes,
                request.policy,
                request.group,
                request.mutable,
                request.segments,
                request.part_of,
                f"{request.content} {request.layout}" if request.content else "",
                request.passing,
            )
        case protocol.Commit():
            return events.Commit(now, session, request.id, request.name, request.also)
        case protocol.Update():
            return events.Update(now, session, request.id, request.name)
        case protocol.GiveUp():
            return events.GiveUp(now, session, request.id, request.name, request.update)
        case protocol.Unregister():
            return events.Unregister(now, session, request.id, request.name)
        case protocol.AcquireWorkspace():
            return events.AcquireWorkspace(
                now,
                session,
                request.id,
                request.agent,
                request.nbytes,
                request.priority,
                _deadline(request.timeout_s, now),
            )
        case protocol.Status() | protocol.Forecast():
            raise ValueError("a question is no event")


def _deadline(timeout_s: float | None, now: float) -> float | None:
    return None if timeout_s is None or timeout_s > _TIMEOUT_MAX_S else now + timeout_s
