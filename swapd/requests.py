"""What a client asks becomes an event of the core. Pure: no sockets, no clock.

Checks here what a type cannot say; whether it may be granted is the core's to decide.
"""

from swapd import protocol
from swapd.core import events
from swapd.core.events import AnyEvent

#: More than any machine has: a size above it is a mistake.
_BYTES_MAX = 1 << 50


def problem_with(request: protocol.AnyRequest) -> str | None:
    """What is wrong with a request that decodes, for its sender; None if nothing is."""
    match request:
        case protocol.Acquire() | protocol.Prefetch():
            names = request.names
        case protocol.Register() | protocol.Commit() | protocol.Unregister():
            names = (request.name,)
        case _:
            return None
    if not names:
        return "names no component; name at least one"
    if len(names) > protocol.NAMES_MAX:
        return f"more than {protocol.NAMES_MAX} names in one request"
    for name in names:
        if not 0 < len(name) <= protocol.NAME_MAX_CHARS or not name.isprintable():
            return f"{name[:40]!r} is no name: 1 to {protocol.NAME_MAX_CHARS} printable characters"
    if isinstance(request, protocol.Register) and not 0 <= request.nbytes < _BYTES_MAX:
        return f"nbytes={request.nbytes} is no size"
    if isinstance(request, protocol.Acquire) and not (request.timeout_s or 0.0) >= 0.0:
        return f"timeout_s={request.timeout_s} is no time"
    return None


def event_of(request: protocol.AnyRequest, session: int, now: float) -> AnyEvent:
    """The event that `request` of `session` is. Status is none: it changes nothing."""
    match request:
        case protocol.Acquire():
            return events.Acquire(
                now,
                session,
                request.id,
                request.agent,
                request.names,
                request.priority,
                None if request.timeout_s is None else now + request.timeout_s,
                request.wait,
            )
        case protocol.Release():
            return events.Release(now, session, request.lease)
        case protocol.Cancel():
            return events.Cancel(now, session, request.acquire)
        case protocol.Prefetch():
            return events.Prefetch(now, session, request.id, request.names)
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
            )
        case protocol.Commit():
            return events.Commit(now, session, request.id, request.name)
        case protocol.Unregister():
            return events.Unregister(now, session, request.id, request.name)
        case protocol.Status():
            raise ValueError("status is no event")
