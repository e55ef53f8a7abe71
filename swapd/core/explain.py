"""What the core says of itself: messages for people, the status snapshot, the self-check.

Every refusal says what is wrong, who holds what, and what to do about it.
"""

from collections import Counter
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING

from swapd.core.chunks import count
from swapd.core.records import Component, Lease, State, Waiter
from swapd.protocol import ComponentStatus, SessionStatus

if TYPE_CHECKING:
    from swapd.core.residency import Residency

STOPPING = "swapd is stopping; connect again when it is back"
SIZE = "a component cannot have fewer than 0 bytes"
GROUP = 'policy "alternating" needs group="...", and no other policy takes one'
REPLAYED = "this request id is in use already, or its session is not open; use a new id"


def size(nbytes: int) -> str:
    """`nbytes` for people: 1536 MiB, 9.1 GiB."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= 10 * factor or (nbytes >= factor and nbytes % factor == 0):
            return f"{nbytes / factor:.4g} {unit}"
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.2f} GiB"
    if nbytes >= 1 << 20:
        return f"{nbytes / (1 << 20):.1f} MiB"
    return f"{nbytes} B"


def who(core: "Residency", session: int) -> str:
    known = core.sessions.get(session)
    return f"{known.label} (session {session})" if known else f"session {session}"


def holders(core: "Residency", c: Component, most: int | None = None) -> tuple[str, ...]:
    """The sessions that lease `c`, for people; at most so many."""
    sessions = sorted({s for s, _ in c.leases})
    more = (f"{len(sessions[most:])} more",) if most is not None and sessions[most:] else ()
    return *(who(core, s) for s in sessions[:most]), *more


def held(core: "Residency", most: int | None = None) -> str:
    """Who holds what, one sentence; at most so many components, with their first holders."""
    parts = [
        f"{c.name} ({size(c.nbytes)}) by {', '.join(holders(core, c, most))}"
        for c in islice(core.leased.values(), most)
    ]
    if most is not None and len(core.leased) > most:
        parts.append(f"and {len(core.leased) - most} more")
    return "held: " + "; ".join(parts) if parts else "nothing is held"


def duplicate(core: "Residency", other: Component) -> str:
    return (
        f"{other.name!r} is registered already by {who(core, other.session)}; "
        "unregister it there, or choose another name"
    )


def too_large(core: "Residency", name: str, chunks: int, fixed: int) -> str:
    total = core.pool.total
    beside = f", beside {size(fixed * core.chunk_bytes)} that never leave" if fixed else ""
    return (
        f"{name} needs {size(chunks * core.chunk_bytes)}{beside}; the budget is "
        f"{size(total * core.chunk_bytes)} (in chunks of {size(core.chunk_bytes)}). "
        "Raise the daemon's --budget, or register it in smaller components"
    )


def unknown(core: "Residency", name: str) -> str:
    if name in core.components:
        return f"{name!r} is still being registered, or going away; acquire it with wait=True"
    near = get_close_matches(name, core.components, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else _registered(core)
    return f"nobody has registered {name!r}; {hint} Use wait=True to wait for it"


def _registered(core: "Residency") -> str:
    names = ", ".join(sorted(core.components)) or "nothing"
    return f"registered: {names}."


def committed(name: str) -> str:
    return f"{name!r} was committed already; register it once, commit it once"


def not_owner(core: "Residency", c: Component) -> str:
    return f"{c.name!r} belongs to {who(core, c.session)}; only it can unregister it"


def in_use(core: "Residency", c: Component) -> str:
    if c.leases:
        return f"{c.name!r} is leased by {', '.join(holders(core, c))}; release it, then unregister"
    return f"{c.name!r} is in the middle of another request; wait for that one's answer"


def unregistered(c: Component) -> str:
    return f"{c.name!r} is being unregistered by the session that owns it"


def owner_gone(c: Component, label: str) -> str:
    return f"{c.name!r} went with {label}, which had registered it and is gone"


def parked(names: Iterable[str]) -> str:
    return f"not registered yet: {', '.join(names)}"


def blocked(core: "Residency", w: Waiter, most: int | None = None) -> str:
    """Why a waiter cannot be granted now; names at most so many of those in the way."""
    asked = [core.components[n] for n in w.names]
    missing = sum(c.chunks for c in asked if c.state is State.ABSENT)
    return (
        f"needs {size(missing * core.chunk_bytes)}, "
        f"free {size(core.pool.free * core.chunk_bytes)}; {held(core, most)}"
    )


def timeout(core: "Residency", w: Waiter, now: float) -> str:
    absent = [n for n in w.names if not core.may_be_acquired(n)]
    why = parked(absent) if absent else blocked(core, w)
    return (
        f"{' + '.join(w.names)} not granted in {now - w.arrived:.3g} s: {why}. "
        "Release what is held, raise timeout=, or raise the daemon's --budget"
    )


def conflict(asked: Iterable[Component]) -> str:
    names = " and ".join(f"{c.name} (group {c.group})" for c in asked if c.group is not None)
    return (
        f"{names} exclude each other: members of one alternating group are never on the "
        "device together. Acquire them one after the other, or register them in other groups"
    )


def deadlock(core: "Residency", w: Waiter, stuck: list[Waiter]) -> str:
    others = ", ".join(
        f"{who(core, o.session)} waits for {' + '.join(o.names)}" for o in stuck if o is not w
    )
    why = f"{others}, holding what this needs" if others else "its own thread holds what it needs"
    return (
        f"{' + '.join(w.names)} could never be granted: {why}; {held(core)}. "
        "Release before acquiring more, or acquire all at once: acquire('a', 'b')"
    )


def copy_failed(c: Component, why: str) -> str:
    where = (
        "device: it is still in host memory"
        if c.state is State.LOADING
        else ("host: it is still on the device")
    )
    return f"copying {c.name!r} failed ({why}), and it did not reach the {where}; try again"


def fenced(c: Component, timeout_s: float) -> str:
    return (
        f"gave no acknowledgement within {timeout_s:g} s that {c.name!r} is unmapped "
        "(is the process stopped or stuck?); its session is ended, connect again"
    )


def lost(c: Component) -> str:
    return (
        f"its worker ended with {c.name!r} on the device; what it wrote since the last "
        "write-back is gone, the master has the state before"
    )


def component_status(core: "Residency", c: Component, now: float) -> ComponentStatus:
    return ComponentStatus(
        name=c.name,
        session=c.session,
        nbytes=c.nbytes,
        state="leased" if c.leases else "idle" if c.name in core.idle else c.state.value,
        policy=c.policy,
        group=c.group,
        mutable=c.mutable,
        leases=len(c.leases),
        holders=holders(core, c),
        idle_s=None if c.leases or c.last_used is None else now - c.last_used,
        loads=c.loads,
        evictions=c.evictions,
        hits=c.hits,
        swap_in_s=c.swap_in_s,
    )


def session_status(core: "Residency", session: int) -> SessionStatus:
    known = core.sessions[session]
    return SessionStatus(session, known.label, len(known.leases), len(known.waiters))


def check(core: "Residency") -> None:
    """Raise AssertionError if the state contradicts itself. For tests and after a fault."""
    occupied = [c.runs for c in core.components.values() if c.on_device]
    current = set(map(id, core.components.values()))
    occupied += [m.runs for m in core.moves.values() if id(m.component) not in current]
    occupied += [runs for held in core.quarantined.values() for runs in held]
    numbers = [i for runs in occupied for first, n in runs for i in range(first, first + n)]
    numbers += [i for first, n in core.pool.runs() for i in range(first, first + n)]
    assert sorted(numbers) == list(range(core.pool.total)), "a chunk is lost or held twice"
    assert core.pool.free == count(core.pool.runs())
    for c in core.components.values():
        assert c.session in core.sessions, f"{c} outlived its session"
        assert not c.leases or c.state is State.RESIDENT, f"{c} is leased and not resident"
        assert all(key in core.leases for key in c.leases), f"{c} is held by no lease"
        assert all(key in core.queue for key in c.promised | c.waiting), f"{c}: no waiter"
        assert not c.on_device or count(c.runs) == c.chunks, f"{c} is on the wrong chunks"
        idle = c.state is State.RESIDENT and not c.leases and not c.promised
        assert (c.name in core.idle) == (idle and c.policy != "resident"), f"{c}: idle is wrong"
        copying = c.state in (State.LOADING, State.WRITING_BACK)
        assert (c.generation in core.moves) == copying, f"{c}: copy and state differ"
    assert core._leaving == sum(c.chunks for c in core.components.values() if c.evicting)
    leased = {c.name for c in core.components.values() if c.leases}
    assert set(core.leased) == leased, "leased is wrong"
    held = Counter(lease.owner for lease in core.leases.values())
    assert core._held == held, "who holds how many leases is wrong"
    assert set(core.leases) == {(s, n) for s, known in core.sessions.items() for n in known.leases}
    for key, lease in core.leases.items():
        _check_lease(core, key, lease)
    for w in core.queue:
        assert w.session in core.sessions, f"{w} outlived its session"
        ways = [w.queued, w.admitted, w.key in core._parked]
        assert ways.count(True) == 1, f"{w} must be queued, admitted or parked"
        for c in (core.components[n] for n in w.names if not ways[2]):
            assert w.key in (c.promised if w.admitted else c.waiting), f"{c} forgot {w}"
    _check_groups(core)


def _check_lease(core: "Residency", key: tuple[int, int], lease: Lease) -> None:
    assert key[0] in core.sessions, f"{lease} outlived its session"
    for name in lease.names:
        c = core.components.get(name)
        assert c is None or key in c.leases, f"{lease} does not hold {name}"


def _check_groups(core: "Residency") -> None:
    seen: dict[str, Component] = {}
    for c in core.components.values():
        if c.group is not None and c.on_device:
            assert c.group not in seen, f"{c} and {seen[c.group]} exclude each other"
            seen[c.group] = c
