"""Checks of a request by itself, before it becomes an event; its deadline; the content that it
shares."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from swapd.core.events import HostCopyFound
from swapd.core.records import WORKSPACE, is_workspace
from swapd.shared import protocol
from swapd.shared.text import problem_with_text

#: More than any machine has: a larger size is a mistake.
_BYTES_MAX = 1 << 50

#: Bounded because the use of a component loads all its followers.
_FOLLOWERS_MAX = 64

#: Longer than any daemon runs: such a timeout means no deadline.
_TIMEOUT_MAX_S = 1e9


def problem_with(request: protocol.AnyRequest) -> str | None:
    """Return the problem with a decoded request, for its sender."""
    checks = _CHECKS.get(type(request), ())
    return next(filter(None, (check(request) for check in checks)), None)


def names_of(request: protocol.AnyOrder | None) -> tuple[str, ...]:
    many = protocol.Acquire | protocol.Prefetch | protocol.Follows | protocol.Forget
    if isinstance(request, many):
        return request.names
    name = getattr(request, "name", None)
    return () if name is None else (name,)


def _names(names: tuple[str, ...]) -> str | None:
    if not names:
        return "names no component; name at least one"
    if len(names) > protocol.NAMES_MAX:
        return f"more than {protocol.NAMES_MAX} names in one request"
    for name in names:
        if not 0 < len(name) <= protocol.NAME_MAX_CHARS or not name.isprintable():
            return f"{name[:40]!r} is no name: 1 to {protocol.NAME_MAX_CHARS} printable characters"
    return None


def _name(request: Any) -> str | None:
    return _names((request.name, *getattr(request, "also", ())))


def _asked_names(request: Any) -> str | None:
    return _names(request.names)


def _foretold(request: protocol.ForecastRequest) -> str | None:
    if request.acquire is None:
        return _names(request.names)
    return "a forecast of an acquire that waits takes no names" if request.names else None


def _over(request: protocol.Prefetch) -> str | None:
    return _names(request.over) if request.over else None


def _followers(request: protocol.Follows) -> str | None:
    if len(request.names) > _FOLLOWERS_MAX:
        return f"{len(request.names)} names; at most {_FOLLOWERS_MAX} may follow one"
    if request.after in request.names:
        return f"{request.after!r} cannot follow itself; name what is used after it"
    return _names((request.after, *request.names))


def _forgotten(request: protocol.Forget) -> str | None:
    return _names(request.names) if request.names else None


def _timeout(request: Any) -> str | None:
    timeout_s = request.timeout_s
    return None if (timeout_s or 0.0) >= 0.0 else f"timeout_s={timeout_s} must be at least 0"


def _workspace(request: protocol.AcquireWorkspace) -> str | None:
    nbytes = request.nbytes
    return None if 0 < nbytes < _BYTES_MAX else f"nbytes={nbytes} is no size of a workspace"


def _to_register(request: protocol.Register) -> str | None:
    name, family = request.name, request.part_of
    if problem := _names((name, family) if family else (name,)):
        return problem
    if is_workspace(name) or is_workspace(family):
        return f"names that begin with {WORKSPACE!r} are for workspaces; choose another name"
    if family == name:
        return f"{name!r} cannot be a part of itself; give it a name other than that of its family"
    return None


def _texts(request: protocol.Register) -> str | None:
    if (request.policy == "alternating") != (request.group is not None):
        return 'policy "alternating" needs group="...", and no other policy takes one'
    said = {"content": request.content, "layout": request.layout, "group": request.group or ""}
    problems = (problem_with_text(what, text) for what, text in said.items())
    return next(filter(None, problems), None)


def _contents(request: protocol.Register) -> str | None:
    if request.content and request.mutable:
        return "a mutable component shares its bytes with no other; give no content"
    if request.certain and not request.content:
        return "certain=True says that no other bytes have this content; give one"
    return None


def _scratch(request: protocol.Register) -> str | None:
    if request.scratch and not (request.mutable and request.content == ""):
        return "only its worker writes to scratch: mutable=True, and no content"
    if request.filled and request.scratch != "saved":
        return 'filled=True is for scratch that is "saved"; leave it out'
    if request.scratch and request.segments:
        return "scratch comes in as a whole; give no segments"
    return None


def _transient(request: protocol.Register) -> str | None:
    if request.transient and not request.part_of:
        return 'only a part of a family can be transient; give part_of, or policy="sequential"'
    return None


def _segments(request: protocol.Register) -> str | None:
    return _size(request.nbytes, request.segments)


def _kept(request: protocol.Resize) -> str | None:
    return _size(request.resident_bytes or 0, ())


def _size(nbytes: int, segments: tuple[int, ...]) -> str | None:
    if not 0 <= nbytes < _BYTES_MAX:
        return f"nbytes={nbytes} is no size"
    if len(segments) > protocol.SEGMENTS_MAX:
        return f"{len(segments)} segments; at most {protocol.SEGMENTS_MAX}"
    rising = all(a <= b for a, b in pairwise((0, *segments)))
    if segments and not (rising and segments[-1] == nbytes):
        return f"segments must end at rising offsets, the last at nbytes={nbytes}"
    return None


def _spare(request: Any) -> str | None:
    return next(filter(None, map(_all_used, request.spare)), None)


def _all_used(release: protocol.Release) -> str | None:
    told = release.used
    if len(told) > protocol.NAMES_MAX:
        return f"more than {protocol.NAMES_MAX} names in one request"
    return next(filter(None, map(_used, told)), None)


def _used(used: protocol.UsedRanges) -> str | None:
    if problem := _names((used.name,)):
        return problem
    if len(used.ranges) > protocol.RANGES_MAX:
        return f"{len(used.ranges)} ranges; at most {protocol.RANGES_MAX}"
    end = 0
    for start, nbytes in used.ranges:
        if start < end or nbytes < 1 or start + nbytes > _BYTES_MAX:
            return f"ranges of {used.name!r} must be (offset, bytes): ascending, apart, not empty"
        end = start + nbytes
    return None


_CHECKS: dict[type, tuple[Callable[[Any], str | None], ...]] = {
    protocol.Acquire: (_asked_names, _timeout, _spare),
    protocol.AcquireWorkspace: (_workspace, _timeout, _spare),
    protocol.AcquireStart: (_timeout,),
    protocol.Prefetch: (_asked_names, _over, _timeout),
    protocol.Follows: (_followers,),
    protocol.ForecastRequest: (_foretold,),
    protocol.Register: (_to_register, _segments, _texts, _contents, _scratch, _transient),
    protocol.Commit: (_name,),
    protocol.Update: (_name,),
    protocol.GiveUp: (_name,),
    protocol.Unregister: (_name,),
    protocol.Forget: (_forgotten,),
    protocol.Pin: (_name,),
    protocol.EvictNow: (_name,),
    protocol.Release: (_all_used,),
    protocol.Resize: (_name, _kept),
}


def deadline(timeout_s: float | None, now: float) -> float | None:
    """Return when an acquire that came at `now` expires; None: never."""
    return None if timeout_s is None or timeout_s > _TIMEOUT_MAX_S else now + timeout_s


def due(due_s: float, now: float) -> int:
    """Return the rank of an acquire by when it is wanted: negative milliseconds; 0, the last,
    without a time. Infinity counts as none, as the swap log cannot hold it."""
    return 0 if due_s > _TIMEOUT_MAX_S else int(min((now + due_s) * 1e3 - protocol.NUMBER_MAX, -1))


def content(request: protocol.Register | HostCopyFound) -> str:
    """Return the content and its layout in the host copy. Sharers are equal in both."""
    return f"{request.content} {request.layout}" if request.content else ""
