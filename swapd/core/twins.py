"""Twins: components with the same bytes, of which one copy on the device serves all.

A component whose twin is on the device joins it on its chunks, and nothing is copied. The last to
leave frees the chunks. Of twins that nobody needs, one stays.
"""

from collections.abc import Collection, Hashable, Iterable

from swapd.core.ledger import Ledger, drop_member
from swapd.core.records import Component
from swapd.core.states import State


def to_join(ledger: Ledger, c: Component) -> Component | None:
    """Return a twin that absent `c` may join."""
    return next(filter(_is_in, _twins(ledger, c)), None) if ledger.alike else None


def to_await(ledger: Ledger, c: Component) -> Component | None:
    """Return a twin that absent `c` may join soon: a request needs its load. None if one is in."""
    coming = None
    for other in _twins(ledger, c):
        if _is_in(other):
            return None
        if other.state is State.LOADING and (other.leases or other.promised):
            coming = other
    return coming


def _twins(ledger: Ledger, c: Component) -> Iterable[Component]:
    if (origin := ledger.host.contents.origin(c.uid)) in ledger.alike and c.chunks:
        for other in ledger.alike[origin].values():
            if other is not c and not other.excludes(c):
                yield other


def _is_in(c: Component) -> bool:
    """Return whether the bytes are on the chunks of `c`."""
    return c.state is State.RESIDENT or (c.state is State.LOADING and c.joined)


def needed(ledger: Ledger, asked: Collection[Component]) -> set[str]:
    """Return the names of `asked`, and of the twins that absent ones will join."""
    names = {c.name for c in asked}
    for c in asked if ledger.alike else ():
        if c.state is State.ABSENT and (twin := to_join(ledger, c)) is not None:
            names.add(twin.name)
    return names


# --- on the same chunks ------------------------------------------------------------------


def take_chunks(ledger: Ledger, c: Component) -> Component | None:
    """Give `c` its chunks for a load: those of a twin, which is returned, or its own. Its load
    would have taken as long as the twin's."""
    twin = to_join(ledger, c)
    c.joined = twin is not None
    if twin is not None:
        c.runs = ledger.pool.share(twin.runs)
        c.swap_in_s, c.copy_s = twin.swap_in_s, twin.copy_s
    else:
        c.runs = ledger.pool.take(c.chunks, prefer=c.runs)
    if c.content and c.chunks:
        c.origin = ledger.host.contents.origin(c.uid)
    if c.origin:
        ledger.alike.setdefault(c.origin, {})[c.name] = c
    return twin


def beside(ledger: Ledger, c: Component) -> list[Component]:
    if not c.origin:
        return []
    alike = ledger.alike[c.origin].values()
    return [other for other in alike if other is not c and other.runs == c.runs]


def leased_beside(ledger: Ledger, some: Iterable[Component]) -> list[Component]:
    if not ledger.pool.shared:
        return []
    return [other for c in some for other in beside(ledger, c) if other.leases]


def need_not_stay(ledger: Ledger, c: Component) -> bool:
    """Return whether idle `c` leaves because a twin keeps its bytes in. None leaves while the
    device is down, as the twin may leave for good."""
    if not c.origin or ledger.down or c.policy == "permanent":
        return False
    return any(map(_is_in, beside(ledger, c)))


def begin_to_leave(ledger: Ledger, c: Component) -> None:
    """The chunks of `c` will soon be free, unless another stays on them."""
    stays = c.origin and any(not other.evicting for other in beside(ledger, c))
    c.frees = 0 if stays else c.chunks
    ledger.leaving += c.frees


def leave(ledger: Ledger, c: Component) -> None:
    """The caller gives the chunks of `c` back."""
    ledger.leaving -= c.frees
    c.frees = 0
    if not c.origin:
        return
    others = beside(ledger, c)
    drop_member(ledger.alike, c.origin, c)
    c.origin = 0
    if others and all(other.evicting and not other.frees for other in others):
        begin_to_leave(ledger, others[0])


def body(ledger: Ledger, c: Component) -> tuple[Hashable, int]:
    """Return a key for the chunks that `c` is on or will join, and how many of them are not
    fixed."""
    one = c if c.on_device else to_join(ledger, c) or c
    if others := beside(ledger, one):
        return one.runs, one.chunks - max(other.fixed for other in (one, *others))
    return one.name, one.chunks - one.fixed
