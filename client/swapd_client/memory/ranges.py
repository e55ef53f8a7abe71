"""The address ranges of all components of this process, of any client. No torch.

An absent component cannot be read. So tensors inside one may not move into another component, and
copying them needs a lease.
"""

import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

from swapd_client.errors import InvalidSource
from swapd_client.memory.part import Claim, Part
from swapd_client.memory.place import Place

#: Name, address and bytes of memory to be read or moved.
Origin = tuple[str, int, int]


class RegisteredRange(NamedTuple):
    start: int
    end: int
    name: str
    #: Represents the session that registered it, which may end first.
    owner: object
    #: None if its client was closed without keeping the bytes.
    part: Part | None
    #: The range of such a client: it is freed with its last tensor.
    gone: Place | None = None


#: Held while tensors are checked and moved: another thread would copy freed memory.
moving = threading.RLock()
#: Sorted by start, without overlaps.
_lying: list[RegisteredRange] = []
_claims: dict[int, Claim] = {}
#: Called when a range is added or removed, for `faults`.
_listeners: list[tuple[Callable[[RegisteredRange], None], Callable[[RegisteredRange], None]]] = []


def claim(made: Claim, origins: Iterable[Origin], of: Part | None = None) -> None:
    """Reserve `origins` for a new component. Call it under `moving`, and `release` afterwards.

    Raises: InvalidSource if a tensor is in a component other than `of`, or is being moved into
    another.
    """
    for what, start, nbytes in origins:
        if (found := find(start, nbytes)) and (found.part is None or found.part is not of):
            raise InvalidSource(_refusal(what, found, made))
    for address in made.memory:
        other = _claims.get(address, made)
        if other[:2] != made[:2]:
            raise InvalidSource(
                f"{made.name!r} has tensors that another thread is registering as component "
                f"{other.name!r}; register each under one name"
            )
    _claims.update(dict.fromkeys(made.memory, made))


def release(made: Claim) -> None:
    """End a claim. May be repeated."""
    with moving:
        for address in made.memory:
            if _claims.get(address) is made:
                del _claims[address]


def add(part: Part, owner: object) -> None:
    """Note that the part's tensors are in its range."""
    with moving:
        one = RegisteredRange(part.address, part.address + part.span, part.name, owner, part)
        at = _at(one.start)
        if at < len(_lying) and _lying[at].start == one.start:
            _take_out(at)
        _lying.insert(at, one)
        for added, _ in _listeners:
            added(one)


def remove(part: Part, *, is_gone: bool = False) -> None:
    """Note that the range is private memory; or, if `is_gone`, freed."""
    with moving:
        at = _at(part.address)
        if at == len(_lying) or _lying[at].start != part.address:
            return
        if _lying[at].part not in (part, None):  # it was freed, and another part has its addresses
            return
        if is_gone:
            _lying[at] = _lying[at]._replace(part=None, gone=part.where)
            for added, _ in _listeners:
                added(_lying[at])
        else:
            _take_out(at)


def _take_out(at: int) -> None:
    for _, left in _listeners:
        left(_lying[at])
    del _lying[at]


def _at(start: int) -> int:
    """Return the index of the first range that starts at `start` or later."""
    return bisect_left(_lying, (start,))


def find(start: int, nbytes: int) -> RegisteredRange | None:
    """Return the component that has any of these bytes."""
    with moving:
        while (at := _at(start + nbytes) - 1) >= 0 and nbytes and _lying[at].end > start:
            found = _lying[at]
            where = found.part.where if found.part else found.gone
            if where is None or not where.over:
                return found
            _take_out(at)  # freed with its last tensor
        return None


def listen(
    added: Callable[[RegisteredRange], None], left: Callable[[RegisteredRange], None]
) -> None:
    """Call `added` for all present ranges, and both functions for later changes."""
    with moving:
        _listeners.append((added, left))
        for one in _lying:
            added(one)


def refuse_unheld(origins: Iterable[Origin]) -> None:
    """Raise InvalidSource for the first origin in a component without a lease here."""
    for what, start, nbytes in origins:
        found = find(start, nbytes)
        if found and not (found.part and found.part.holders):
            raise InvalidSource(
                f"{what!r} is in component {found.name!r}, which this process has no lease "
                f"on, so it cannot be read: do this within client.acquire({found.name!r})"
            )


def refuse_taken(origins: Iterable[Origin]) -> None:
    """Raise InvalidSource for the first origin in a component, because it cannot be written to."""
    for what, start, nbytes in origins:
        if found := find(start, nbytes):
            raise InvalidSource(
                f"{what!r} is in component {found.name!r} already: unregister that first"
            )


def _refusal(what: str, found: RegisteredRange, made: Claim) -> str:
    there = found.name
    if found.part is None:
        return (
            f"{what!r} was in component {there!r} of a client that was closed with keep=False: its "
            "bytes are no longer there; load it again"
        )
    other = "" if found.owner is made.owner else ", of another client of this process"
    return (
        f"{what!r} is in component {there!r} already{other}: use it under its lease, or unregister "
        f"{there!r} (or close its client) before you register it as {made.name!r}"
    )


def _renew_lock() -> None:
    """Another thread of the parent may hold the lock."""
    global moving
    moving = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
