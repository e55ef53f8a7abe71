"""How many parts of a family are kept: as the owner asked, or as many as there is room for."""

from swapd.core import explain, policy, transfers
from swapd.core.admission import Admission
from swapd.core.ledger import Ledger
from swapd.shared.protocol import Code, Resize, rest_of


def on_resize(ledger: Ledger, admission: Admission, session: int, asked: Resize) -> None:
    key = (session, asked.id)
    if asked.name not in ledger.families:
        return ledger.refuse(key, "unknown_component", explain.no_family(ledger, asked.name))
    if problem := _never_stays(ledger, asked.name):
        return ledger.refuse(key, *problem)
    if asked.resident_bytes is None:
        ledger.automatic[asked.name] = None
    else:
        ledger.automatic.pop(asked.name, None)
    spread(ledger, asked.name, asked.resident_bytes)
    ledger.accept(key)


def _never_stays(ledger: Ledger, name: str) -> tuple[Code, str] | None:
    """Why the part of a family that is in no block cannot stay for good, or None if it can, or need
    not: some other part must fit beside it."""
    family = ledger.families[name]
    rest = family.get(rest_of(name))
    if rest is None or rest.own_policy != "permanent":
        return None
    others = (c.chunks for c in family.values() if c is not rest)
    least = rest.chunks + max(others, default=0)
    fixed = ledger.never_leaving(family.values(), pins=False)
    if least + fixed <= ledger.pool.total:
        return None
    return "too_large", explain.too_large(ledger, name, least, fixed, explain.LESS_PERMANENT)


def spread(ledger: Ledger, name: str, resident_bytes: int | None) -> None:
    """Keep so many bytes of a family; None: as many as there is room for beside components that
    never leave."""
    family = ledger.families[name]
    first = [c for c in family.values() if c.name == rest_of(name)]
    others = [c for c in family.values() if c not in first]
    sizes = [c.chunks for c in others]
    room = ledger.pool.total - ledger.never_leaving(family.values())
    room -= sum(c.chunks for c in first)
    if resident_bytes is None:
        kept = policy.spread(sizes, policy.room_to_keep(sizes, room, beside=2))
    else:
        asked = resident_bytes - sum(c.nbytes for c in first)
        kept = policy.spread([c.nbytes for c in others], asked)
        most = policy.room_to_keep(sizes, room, beside=1)
        kept = kept if sum(sizes[i] for i in kept) <= most else policy.spread(sizes, most)
    for c in first:
        transfers.set_kept(ledger, c, True)
    for i, c in enumerate(others):
        transfers.set_kept(ledger, c, i in kept)
