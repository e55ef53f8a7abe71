"""Messages for people. Every refusal states the problem, the holders, and a remedy."""

from bisect import bisect_left
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from heapq import nlargest
from itertools import islice

from swapd.core.eviction import Refusal, missing_chunks, must_leave_first, twins_coming
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Waiter, is_workspace
from swapd.core.states import State
from swapd.shared.units import size

STOPPING = "swapd is stopping; once it is back, the next call of this client joins it"
SMALLER = "register it in smaller components"
LESS_SCRATCH = "make this scratch smaller"
LESS_PERMANENT = 'register it, or others, with another policy than "permanent"'
_DOWN = (
    "Loading and saving fail until swapd is restarted; components on the device stay there, "
    "and can be acquired. Clients keep their weights when they close, and connect again"
)
#: Most components, or holders of one, that a message names: a few more than people read.
NAMED_MAX = 32
#: `_like` looks at this many sorted names on each side of an unknown one.
_NEAR = 16

REPLAYED = "this request id is in use already, or its session is not open; use a new id"
STARTS_WITH_NOTHING = (
    "a session that waits for its turn to start holds no lease, and starts once: release its "
    "leases first"
)
WAITS_NO_MORE = "no acquire of this session with this number waits"


def who(ledger: Ledger, session: int) -> str:
    known = ledger.sessions.get(session)
    return f"{known.label} (session {session})" if known else f"session {session}"


def starting(ledger: Ledger) -> str:
    turn = next(iter(ledger.starts), None)
    return "nobody starts" if turn is None else f"{who(ledger, turn[0])} starts"


def called(c: Component) -> str:
    return f"workspace of {size(c.nbytes)}" if c.workspace else c.name


def asked_for(ledger: Ledger, w: Waiter) -> str:
    known = ledger.components
    return " + ".join(called(known[n]) if n in known else n for n in w.asked)


def together(ledger: Ledger, components: Iterable[Component]) -> str:
    """Return the names of these components; the name of a family in place of all its parts."""
    given = {c.name: c for c in components}
    named = dict.fromkeys(
        c.part_of if c.part_of and ledger.families[c.part_of].keys() <= given.keys() else called(c)
        for c in given.values()
    )
    return " + ".join(named)


def holders(ledger: Ledger, c: Component, most: int | None = None) -> tuple[str, ...]:
    first = [who(ledger, session) for session in islice(c.holders, most)]
    more = [f"{len(c.holders) - len(first)} more"] if len(first) < len(c.holders) else []
    return (*first, *more)


def held(ledger: Ledger, most: int = NAMED_MAX) -> str:
    parts = [
        f"{_with_size(c)} by {', '.join(holders(ledger, c, most))}"
        for c in islice(ledger.holders.leased.values(), most)
    ]
    if len(ledger.holders.leased) > most:
        parts.append(f"and {len(ledger.holders.leased) - most} more")
    return "held: " + "; ".join(parts) if parts else "nothing is held"


def _of_owner(ledger: Ledger, c: Component) -> str:
    return f"{c.part_of or c.name} ({size(c.nbytes)}) of {who(ledger, c.session)}"


def _with_size(c: Component) -> str:
    return called(c) if c.workspace else f"{c.name} ({size(c.nbytes)})"


def duplicate(ledger: Ledger, other: Component) -> str:
    return (
        f"{other.name!r} is registered already by {who(ledger, other.session)}; "
        "unregister it there, or choose another name"
    )


def is_family(ledger: Ledger, name: str, parts: Iterable[Component]) -> str:
    owner = next(iter(parts)).session
    return (
        f"{name!r} stands for parts that {who(ledger, owner)} has registered; "
        "unregister them there, or choose another name"
    )


def no_family(ledger: Ledger, name: str) -> str:
    c = ledger.components.get(name)
    if c is not None and c.part_of:
        return f"{name!r} is a part of {c.part_of!r}; resize that"
    if c is not None:
        return (
            f"{name!r} was registered whole: it is on the device, or not. To keep some of it "
            "there, register it in parts (register_family, or attach with layerwise offload)"
        )
    near = _like(name, sorted(ledger.families))
    known = _first(ledger.families) or "nothing"
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"in parts: {known}."
    return f"nobody has registered {name!r} in parts; {hint}"


def refused(ledger: Ledger, found: Refusal) -> str:
    match found.why:
        case "down":
            return cannot_come_in(ledger, found.of)
        case "conflict":
            return conflict(found.of)
        case "too_large":
            return too_large_together(ledger, found.of, ledger.fixed_chunks(found.of))


def too_large_together(ledger: Ledger, asked: list[Component], fixed: int) -> str:
    names = together(ledger, asked)
    instead = "ask for less" if any(c.workspace for c in asked) else SMALLER
    chunks = sum(c.chunks for c in asked)
    return too_large(ledger, names, chunks, fixed, instead, {c.name for c in asked})


def too_large(
    ledger: Ledger,
    name: str,
    chunks: int,
    fixed: int,
    instead: str = SMALLER,
    but: Collection[str] = (),
) -> str:
    """`fixed`: chunks of others that never leave. `but`: names that the request itself has."""
    beside = f", beside {size(fixed * ledger.chunk_bytes)} that never leave" if fixed else ""
    staying = [
        c for c in ledger.components.values() if c.policy == "permanent" and c.name not in but
    ]
    if fixed and staying:
        named = (_of_owner(ledger, c) for c in islice(staying, NAMED_MAX))
        beside += f": {', '.join(named)}"
    beside += _quarantined(ledger)
    budget = size(ledger.pool.total * ledger.chunk_bytes)
    return (
        f"{name} needs {size(chunks * ledger.chunk_bytes)}{beside}; the budget is {budget} (in "
        f"chunks of {size(ledger.chunk_bytes)}). "
        f"{_unpin(staying if fixed else [])}Raise the daemon's --budget, or {instead}"
    )


def _quarantined(ledger: Ledger) -> str:
    alive = [s for s in ledger.quarantined if s not in ledger.dying]
    if not alive:
        return ""
    sessions = ", ".join(map(str, islice(alive, NAMED_MAX)))
    until = f"until the process of the ended session {sessions} closes its client, or ends"
    return f" (some of it {until})"


def _unpin(staying: Iterable[Component]) -> str:
    pinned = list(dict.fromkeys(c.part_of or c.name for c in staying if c.only_pinned))
    if not pinned:
        return ""
    return f"Pinned: {_first(pinned)}; any client may end a pin (swapd unpin {pinned[0]}). "


def unknown(ledger: Ledger, name: str) -> str:
    if is_workspace(name):
        return f"{name!r} is no component; a workspace is held by its lease alone"
    if name in ledger.components:
        return f"{name!r} is still being registered, or going away."
    near = _like(name, ledger.names)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else _registered(ledger)
    return f"nobody has registered {name!r}; {hint}"


def not_to_acquire(ledger: Ledger, name: str) -> str:
    advice = "" if is_workspace(name) else " Use await_registration=True to wait for it"
    return f"{unknown(ledger, name)}{advice}"


def _like(name: str, known: list[str]) -> list[str]:
    """Return similar names near `name` in the sorted list `known`."""
    at = bisect_left(known, name)
    around = known[max(0, at - _NEAR) : at + _NEAR]
    return get_close_matches(name, around, n=3, cutoff=0.5)


def _registered(ledger: Ledger) -> str:
    named = (c for c in ledger.components.values() if not c.workspace)
    return f"registered: {_first(c.part_of or c.name for c in named) or 'nothing'}."


def not_kept(ledger: Ledger, name: str) -> str:
    kept = (ledger.host.owners[uid] for uid in ledger.host.kept)
    there = _first(c.part_of or c.name for c in kept) or "nothing"
    return f"no host copy of {name!r} is kept; kept: {there}."


def _first(names: Iterable[str]) -> str:
    """Sorted and without repeats; ends in "..." if there are more."""
    some = dict.fromkeys(islice(names, NAMED_MAX + 1))
    more = ", ..." if len(some) > NAMED_MAX else ""
    return ", ".join(sorted(islice(some, NAMED_MAX))) + more


def committed(names: list[str]) -> str:
    if len(names) > 1:
        return f"{', '.join(names)}: one commit takes several names only if each has an open update"
    return f"{names[0]!r} was committed already; register it once, commit it once"


def not_owner(ledger: Ledger, c: Component, what: str) -> str:
    return f"{c.name!r} belongs to {who(ledger, c.session)}; only it can {what} it"


def written_under_a_lease(c: Component) -> str:
    return f"{c.name!r} is mutable: write to its tensors under a lease, there is nothing to update"


def being_updated(ledger: Ledger, c: Component) -> str:
    owner = who(ledger, c.session)
    return f"{c.name!r} is being updated by {owner}; wait until that is done, or give it up"


def in_use(ledger: Ledger, c: Component) -> str:
    if c.leases:
        names = ", ".join(holders(ledger, c, NAMED_MAX))
        return f"{c.name!r} is leased by {names}; release it, then unregister"
    if c.renewal is not None:
        return being_updated(ledger, c)
    return f"{c.name!r} is in the middle of another request; wait for its answer"


def unregistered(ledger: Ledger, c: Component) -> str:
    owner = who(ledger, c.session)
    return (
        f"{c.name!r} is being unregistered by {owner}; use await_registration=True to wait until "
        "it is registered again"
    )


def no_host_copy(ledger: Ledger, c: Component, why: str) -> str:
    others = (o for o in ledger.components.values() if o is not c and not o.workspace)
    largest = nlargest(3, others, key=lambda o: o.nbytes)
    most = ", ".join(_of_owner(ledger, o) for o in largest)
    return f"{c.name!r} ({size(c.nbytes)}): {why}" + (f". The largest are {most}" if most else "")


def owner_gone(c: Component, label: str) -> str:
    return f"{c.name!r} went with {label}, which had registered it and is gone"


def parked(names: Iterable[str]) -> str:
    return f"not registered yet: {', '.join(names)}"


def blocked(ledger: Ledger, w: Waiter, most: int = NAMED_MAX) -> str:
    asked = ledger.named(w.names)
    missing = missing_chunks(ledger, asked)
    old = [c.name for c in asked if must_leave_first(c, w)]
    if old:
        return (
            f"{' + '.join(old)}: updated, so the holders of the old bytes must release them; "
            f"{held(ledger, most)}"
        )
    if coming := twins_coming(ledger, asked):
        return f"{' + '.join(c.name for c in coming)}, with the same bytes, comes in first"
    head = ledger.queue.head(ledger.now)
    if asked and not missing and head is not None and head is not w:
        return (
            f"all of it is in, but {who(ledger, head.session)} waits for its memory to have "
            f"{asked_for(ledger, head)}, and as many as may went before; {held(ledger, most)}"
        )
    return (
        f"needs {size(missing * ledger.chunk_bytes)}, "
        f"free {size(ledger.pool.free * ledger.chunk_bytes)}; "
        f"{_ahead(ledger, w)}{_in_the_way(ledger, most)}"
    )


def _ahead(ledger: Ledger, w: Waiter) -> str:
    head = ledger.queue.head(ledger.now)
    if head is None or head is w or not w.queued:
        return ""
    why = "came first" if head.due == w.due else "is wanted sooner"
    if head.priority != w.priority:
        higher = head.priority > w.priority
        why = f"has priority {head.priority}" if higher else "has waited longer than --patience"
    need = missing_chunks(ledger, ledger.named(head.names)) * ledger.chunk_bytes
    return (
        f"behind {who(ledger, head.session)}, which {why} and needs {size(need)} "
        f"for {asked_for(ledger, head)}; "
    )


def _in_the_way(ledger: Ledger, most: int) -> str:
    if nbytes := ledger.reclaiming * ledger.chunk_bytes:
        return f"{size(nbytes)} lent, and not back from the driver yet; {held(ledger, most)}"
    if ledger.dying:
        sessions = ", ".join(map(str, islice(ledger.dying, most)))
        return f"the process of ended session {sessions} may still map memory that this needs"
    if ledger.idle and not ledger.holders.leased:
        staying = ", ".join(c.name for c in islice(ledger.idle, most))
        return f"in use a moment ago, and kept for the minimum residency: {staying}"
    return held(ledger, most)


def timeout(ledger: Ledger, w: Waiter, now: float, expected: str) -> str:
    named = [n for n in w.names if not is_workspace(n)]
    absent = [n for n in named if not ledger.may_be_acquired(n)]
    why = parked(absent) if absent else f"{blocked(ledger, w)}; the grant: {expected}"
    return (
        f"{asked_for(ledger, w)} not granted in {now - w.arrived:.3g} s: {why}. "
        "Release leases, raise timeout=, or raise the daemon's --budget"
    )


def conflict(asked: Iterable[Component]) -> str:
    names = " and ".join(f"{c.name} (group {c.group})" for c in asked if c.group is not None)
    return (
        f"{names} exclude each other: members of one alternating group are never on the "
        "device together. Acquire them one after the other, register them in other groups, or with "
        "one part_of"
    )


def deadlock(ledger: Ledger, w: Waiter, stuck: list[Waiter]) -> str:
    waiting = (o for o in stuck if o is not w)
    others = ", ".join(
        f"{who(ledger, o.session)} waits for {asked_for(ledger, o)}"
        for o in islice(waiting, NAMED_MAX)
    )
    why = (
        f"{others}, holding components that this needs"
        if others
        else "its own thread holds components that it needs"
    )
    return (
        f"{asked_for(ledger, w)} could never be granted: {why}; {held(ledger)}. "
        "Release before acquiring more, or acquire all at once: acquire('a', 'b')"
    )


def device_down(why: str) -> str:
    return f"{why}. {_DOWN}"


def cannot_come_in(ledger: Ledger, absent: Iterable[Component]) -> str:
    names = together(ledger, absent)
    return f"{names} cannot be granted: {device_down(ledger.down)}"


def _next(ledger: Ledger, why: str) -> str:
    if not ledger.down:
        return "; try again"
    return f". {_DOWN}" if ledger.down in why else f". {device_down(ledger.down)}"


def copy_failed(ledger: Ledger, c: Component, why: str) -> str:
    if c.scratch and c.state is State.LOADING:
        return f"bringing in {c.name!r} failed ({why}){_next(ledger, why)}"
    comes = c.state is State.LOADING
    to, still = ("device", "in host memory") if comes else ("host", "on the device")
    return (
        f"copying {c.name!r} ({size(c.nbytes)}) failed ({why}), and it did not reach the {to}: "
        f"it is still {still}{_next(ledger, why)}"
    )


def not_saved(c: Component, why: str) -> str:
    return f"saving {c.name!r} failed ({why}): its contents are lost, and begin anew as zeros"


def lend_failed(ledger: Ledger, c: Component, why: str) -> str:
    what = f"the memory of the {called(c)}"
    return f"{what} could not be given to the driver ({why}){_next(ledger, why)}"


def lost(c: Component) -> str:
    before = "write-back are gone, and the host copy has the state before"
    last = "save are gone" if c.scratch else before
    return f"its worker ended with {c.name!r} on the device; its writes since the last {last}"
