"""Decides which components stay: kept parts of families, pins; and evicts on request."""

from collections.abc import Iterable, Iterator, Sequence

from swapd.core import explain, transfers
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Key
from swapd.core.states import State
from swapd.shared.protocol import Code, EvictNow, Pin, Resize, rest_of
from swapd.shared.units import size

Refusal = tuple[Code, str]

# --- families ----------------------------------------------------------------------------


def on_resize(ledger: Ledger, key: Key, asked: Resize) -> None:
    if asked.name not in ledger.families:
        return ledger.refuse(key, "unknown_component", explain.no_family(ledger, asked.name))
    if problem := _never_stays(ledger, asked.name):
        return ledger.refuse(key, *problem)
    if asked.resident_bytes is None:
        ledger.automatic[asked.name] = None
    else:
        ledger.automatic.pop(asked.name, None)
    keep(ledger, asked.name, asked.resident_bytes)
    ledger.accept(key)


def _never_stays(ledger: Ledger, name: str) -> Refusal | None:
    """Return why the part that is in no block (`rest`) cannot stay: no other part would fit beside
    it."""
    family = ledger.families[name]
    rest = family.get(rest_of(name))
    if rest is None or rest.own_policy != "permanent":
        return None
    others = (c.chunks for c in family.values() if c is not rest)
    least = rest.chunks + max(others, default=0)
    fixed = ledger.never_leaving(family.values())
    if least + fixed <= ledger.pool.total:
        return None
    return "too_large", explain.too_large(ledger, name, least, fixed, explain.LESS_PERMANENT)


def keep(ledger: Ledger, name: str, resident_bytes: int | None) -> None:
    """`resident_bytes` None: keep as much as fits beside components that never leave."""
    family = ledger.families[name]
    rest = family.get(rest_of(name))
    first = [rest] if rest else []
    others = [c for c in family.values() if c is not rest]
    room = ledger.pool.total - ledger.never_leaving(family.values())
    room -= sum(c.chunks for c in first)
    if resident_bytes is not None:
        resident_bytes -= sum(c.nbytes for c in first)
    kept = [others[i] for i in _kept(others, room, resident_bytes)]
    for c in (*first, *others):
        transfers.set_kept(ledger, c, c in first or c in kept)


def _kept(parts: list[Component], room: int, resident_bytes: int | None) -> set[int]:
    sizes = [c.chunks for c in parts]
    if resident_bytes is None:
        return spread(sizes, room_to_keep(sizes, room, beside=2))
    kept = spread([c.nbytes for c in parts], resident_bytes)
    most = room_to_keep(sizes, room, beside=1)
    return kept if sum(sizes[i] for i in kept) <= most else spread(sizes, most)


def spread(sizes: Sequence[int], room: int) -> set[int]:
    """Return which parts to keep in `room`, by index: as many as fit, evenly spread. So equally
    many parts are loaded between any two kept ones, whose use gives these loads time."""
    fit = left = 0
    for chunks in sorted(sizes):  # at most this many parts fit
        left += chunks
        fit += left <= room
    for n in range(fit, 0, -1):
        chosen = {(2 * i + 1) * len(sizes) // (2 * n) for i in range(n)}
        if sum(sizes[i] for i in chosen) <= room:
            return chosen
    return set()


def room_to_keep(sizes: Sequence[int], room: int, beside: int) -> int:
    """Return how much of `room` the kept parts may take. Unless every part fits, `beside` of the
    largest parts need room, too: one in use, the others loading."""
    return room if sum(sizes) <= room else room - beside * max(sizes, default=0)


# --- pins --------------------------------------------------------------------------------


def on_pin(ledger: Ledger, key: Key, asked: Pin) -> None:
    members = _members(ledger, key, asked.name)
    if members is None:
        return
    problem = _why_no_unpin(ledger, members) if asked.unpin else why_no_pin(ledger, members)
    if problem:
        return ledger.refuse(key, *problem)
    for c in members:
        transfers.set_pinned(ledger, c, not asked.unpin)
    ledger.accept(key)


def _members(ledger: Ledger, key: Key, name: str) -> list[Component] | None:
    if (family := ledger.families.get(name)) is not None:
        return list(family.values())
    if ledger.may_be_acquired(name):
        return [ledger.components[name]]
    ledger.refuse(key, "unknown_component", explain.unknown(ledger, name))
    return None


def why_no_pin(ledger: Ledger, asked: list[Component]) -> Refusal | None:
    """Return why these cannot be pinned: every other component, every waiter, and the largest turn
    of every session must still fit.
    """
    if problem := next(filter(None, map(_cannot_stay, asked)), None):
        return problem
    stays = {c.name: c for c in asked if c.policy == c.own_policy}
    fixed = ledger.staying + _chunks(stays.values())
    if fixed > ledger.pool.total:
        return "too_large", _no_room_to_pin(ledger, asked, fixed, "")
    for what, needed in _needed(ledger):
        if fixed + _chunks(c for c in needed if c.name not in stays) > ledger.pool.total:
            return "too_large", _no_room_to_pin(ledger, asked, fixed, what)
    return None


def _cannot_stay(c: Component) -> Refusal | None:
    if c.group is not None:
        return "conflict", _takes_turns(c)
    if c.evicting:
        return "in_use", f"{c.name!r} is leaving the device; pin it when it has left"
    return None


def _chunks(components: Iterable[Component]) -> int:
    return sum(c.chunks for c in components if c.policy != "permanent")


def _needed(ledger: Ledger) -> Iterator[tuple[str, Sequence[Component]]]:
    known = ledger.components
    for c in known.values():
        yield explain.called(c), [c]
    for w in ledger.queue:
        what = f"{explain.asked_for(ledger, w)}, which {explain.who(ledger, w.session)} waits for,"
        yield what, [known[n] for n in w.names if n in known]
    for number, session in ledger.sessions.items():
        yield f"the largest turn of {explain.who(ledger, number)}", ledger.named(session.turn)


def _why_no_unpin(ledger: Ledger, asked: list[Component]) -> Refusal | None:
    if any(c.pinned or c.own_policy != "permanent" for c in asked):
        return None
    return "conflict", _never_leaves(ledger, asked)


def _takes_turns(c: Component) -> str:
    return (
        f"{c.name!r} takes turns with the other members of group {c.group}: if it stayed, none of "
        "them could come in. Register it in no group to pin it"
    )


def _no_room_to_pin(ledger: Ledger, asked: list[Component], fixed: int, other: str) -> str:
    beside = f"{other} would not fit any more" if other else "they would not fit together"
    budget = size(ledger.pool.total * ledger.chunk_bytes)
    return (
        f"{explain.together(ledger, asked)} cannot stay: beside "
        f"{size(fixed * ledger.chunk_bytes)} that never leave {beside}; the budget is {budget}. "
        "Unpin another one, or raise the daemon's --budget"
    )


def _never_leaves(ledger: Ledger, asked: list[Component]) -> str:
    what = explain.together(ledger, asked)
    if any(c.pinned for c in asked):
        return f"{what} is pinned; unpin it first"
    return f'{what} was registered as "permanent": it never leaves until it is unregistered'


# --- evictions on request ------------------------------------------------------------------


def on_evict_now(ledger: Ledger, key: Key, asked: EvictNow) -> None:
    members = _members(ledger, key, asked.name)
    if members is None:
        return
    if problem := why_no_eviction(ledger, members):
        return ledger.refuse(key, *problem)
    for c in members:
        if c.name in ledger.idle:
            transfers.evict(ledger, c, "asked", None)
    ledger.accept(key)


def why_no_eviction(ledger: Ledger, asked: list[Component]) -> Refusal | None:
    """Return why these cannot be evicted: one is leased, promised or loading, or the device is
    down."""
    if ledger.down:
        return "device_failed", explain.device_down(ledger.down)
    there = [c for c in asked if c.state in (State.LOADING, State.RESIDENT)]
    if problem := next(filter(None, (_in_use(ledger, c) for c in there)), None):
        return "in_use", problem
    if not there or any(c.name in ledger.idle for c in there):
        return None
    return "conflict", _never_leaves(ledger, asked)


def _in_use(ledger: Ledger, c: Component) -> str:
    """Return why a component may not leave now; "" if it may, or never leaves."""
    if c.name in ledger.idle:
        if not c.waiting:
            return ""
        whose = explain.who(ledger, next(iter(c.waiting))[0])
        return f"{c.name!r} is needed by {whose}, which waits; try again later"
    return "" if c.policy == "permanent" else _used(ledger, c)


def _used(ledger: Ledger, c: Component) -> str:
    if c.leases:
        names = ", ".join(explain.holders(ledger, c, explain.NAMED_MAX))
        written = ", and being written to" if c.mutable else ""
        return f"{c.name!r} is leased by {names}{written}; it can go once it is released"
    if c.state is State.LOADING:
        return f"{c.name!r} is coming in; try again when it is loaded"
    return f"{c.name!r} is kept for a waiter; try again after its use"
