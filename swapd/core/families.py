"""Which components stay: the parts of a family that are kept, pins, and evictions on request."""

from collections.abc import Iterable, Iterator, Sequence

from swapd.core import explain, transfers
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Key, State
from swapd.shared.protocol import Code, EvictNow, Pin, Resize, rest_of

Refusal = tuple[Code, str]

# --- families ----------------------------------------------------------------------------


def on_resize(ledger: Ledger, session: int, asked: Resize) -> None:
    key = (session, asked.id)
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
    """Why the part of a family that is in no block cannot stay for good, or None if it can, or need
    not: some other part must fit beside it."""
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
    """Keep so many bytes of a family; None: as many as there is room for beside components that
    never leave."""
    family = ledger.families[name]
    first = family.get(rest_of(name))
    others = [c for c in family.values() if c is not first]
    sizes = [c.chunks for c in others]
    room = ledger.pool.total - ledger.never_leaving(family.values())
    room -= first.chunks if first else 0
    if resident_bytes is None:
        kept = spread(sizes, room_to_keep(sizes, room, beside=2))
    else:
        kept = spread([c.nbytes for c in others], resident_bytes - (first.nbytes if first else 0))
        most = room_to_keep(sizes, room, beside=1)
        kept = kept if sum(sizes[i] for i in kept) <= most else spread(sizes, most)
    if first:
        transfers.set_kept(ledger, first, True)
    for i, c in enumerate(others):
        transfers.set_kept(ledger, c, i in kept)


def spread(sizes: Sequence[int], room: int) -> set[int]:
    """Which of the parts of `sizes`, by number, to keep in `room`: as many as fit, evenly spread.

    Then equally many parts are copied between any two kept ones, and their copies have the time in
    between.
    """
    fit = left = 0
    for size in sorted(sizes):  # no choice has more parts than this
        left += size
        fit += left <= room
    for n in range(fit, 0, -1):
        chosen = {(2 * i + 1) * len(sizes) // (2 * n) for i in range(n)}
        if sum(sizes[i] for i in chosen) <= room:
            return chosen
    return set()


def room_to_keep(sizes: Sequence[int], room: int, beside: int) -> int:
    """How much of `room` the parts of `sizes` may keep: all of it if they all fit. Else `beside` of
    the largest parts need room as well: one in use, and others that load."""
    return room if sum(sizes) <= room else room - beside * max(sizes, default=0)


# --- pins --------------------------------------------------------------------------------


def on_pin(ledger: Ledger, session: int, asked: Pin) -> None:
    key = (session, asked.id)
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
    """The components of this name; None if the request was refused."""
    if ledger.stopping:
        ledger.refuse(key, "stopping", explain.STOPPING)
        return None
    if (family := ledger.families.get(name)) is not None:
        return list(family.values())
    if ledger.may_be_acquired(name):
        return [ledger.components[name]]
    ledger.refuse(key, "unknown_component", explain.unknown(ledger, name))
    return None


def why_no_pin(ledger: Ledger, asked: list[Component]) -> Refusal | None:
    """A pinned component takes its room from all others: each of these, and each waiter, must still
    fit."""
    for c in asked:
        if c.group is not None:
            return "conflict", explain.takes_turns(c)
        if c.evicting:
            return "in_use", f"{c.name!r} is leaving the device; pin it when it has left"
    stays = {c.name: c for c in asked if c.policy == c.own_policy}
    fixed = ledger.staying + _chunks(stays.values())
    if fixed > ledger.pool.total:
        return "too_large", explain.no_room_to_pin(ledger, asked, fixed, "")
    for what, needed in _needed(ledger):
        if fixed + _chunks(c for c in needed if c.name not in stays) > ledger.pool.total:
            return "too_large", explain.no_room_to_pin(ledger, asked, fixed, what)
    return None


def _chunks(components: Iterable[Component]) -> int:
    return sum(c.chunks for c in components if c.policy != "permanent")


def _needed(ledger: Ledger) -> Iterator[tuple[str, Sequence[Component]]]:
    """Each component, and those of each waiter, with their name for people."""
    known = ledger.components
    for c in known.values():
        yield explain.called(c), [c]
    for w in ledger.queue:
        what = f"{explain.asked_for(ledger, w)}, which {explain.who(ledger, w.session)} waits for,"
        yield what, [known[n] for n in w.names if n in known]


def _why_no_unpin(ledger: Ledger, asked: list[Component]) -> Refusal | None:
    """Components registered as "permanent" are not pinned."""
    if any(c.pinned or c.own_policy != "permanent" for c in asked):
        return None
    return "conflict", explain.permanent(ledger, asked)


# --- evictions on request ------------------------------------------------------------------


def on_evict_now(ledger: Ledger, session: int, asked: EvictNow) -> None:
    key = (session, asked.id)
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
    """A component that is leased, promised or loading stays; with the device down, all stay."""
    if ledger.down:
        return "device_failed", explain.device_down(ledger.down)
    there = [c for c in asked if c.on_device and not c.evicting]
    for c in there:
        if c.policy != "permanent" and c.name not in ledger.idle:
            return "in_use", _used(ledger, c)
    may_go = [c for c in there if c.name in ledger.idle]
    for c in may_go:
        if c.waiting:
            whose = explain.who(ledger, next(iter(c.waiting))[0])
            return "in_use", f"{c.name!r} is needed by {whose}, which waits; try again later"
    if not there or may_go:
        return None
    if any(c.pinned for c in there):
        return "conflict", f"{explain.together(ledger, asked)} is pinned; unpin it first"
    return "conflict", explain.permanent(ledger, asked)


def _used(ledger: Ledger, c: Component) -> str:
    if c.leases:
        names = ", ".join(explain.holders(ledger, c, explain.NAMED_MAX))
        written = ", and being written to" if c.mutable else ""
        return f"{c.name!r} is leased by {names}{written}; it can go once it is released"
    if c.state is State.LOADING:
        return f"{c.name!r} is coming in; try again when it is loaded"
    return f"{c.name!r} is kept for a waiter; try again after its use"
