"""Predicts what is used next, from what sessions said follows what. Changes no component:
`prefetch.py` loads.

A prediction ends when its component is asked for, or leaves before that. A follower that was often
loaded in vain is loaded again only after a few predictions of it have come true.
"""

from collections.abc import Iterable, Iterator

from swapd.core.actions import Foreseen, Outcome
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Follower
from swapd.core.states import State

#: A follower with less trust is not loaded.
TRUSTED = 0.5
#: Trust is multiplied by this after a load in vain, and grows by this after a prediction that came
#: true without a load.
KEPT_IN_VAIN = 0.75
GAINED = 0.03


def predict(ledger: Ledger, used: Iterable[Component]) -> Iterator[Follower]:
    """Predict what follows the `used` components, which are not leased yet; yield the trusted
    ones."""
    sides: dict[str, float] = {}
    for c in used:
        sides[c.side] = max(c.used_since, sides.get(c.side, 0.0))
    anew = {c.side for c in used if not c.leases}
    for name, used_since in sides.items():
        for follower in ledger.followers.get(name, {}).values():
            if used_since >= follower.began:
                follower.began_before, follower.began = follower.began, ledger.now
                follower.uses += name in anew
            before = ledger.predicted.get(follower.name)
            if before is None or not before.acted:
                ledger.predicted[follower.name] = before = follower
                follower.since, follower.failed = ledger.now, False
            if before.trust >= TRUSTED:
                yield before


def is_used_up(follower: Follower, c: Component) -> bool:
    """Return whether the current use of what `follower` follows has already used its part `c`."""
    return c.side == follower.after and c.used_since >= follower.began


def is_still_needed(follower: Follower, c: Component) -> bool:
    """Return whether the current use of what `follower` follows has yet to use its part `c`, as the
    use before did, or the first use may."""
    return not c.leases and follower.began_before <= c.used_since < follower.began


def note_asked(ledger: Ledger, asked: list[Component]) -> None:
    """End the predictions of what an acquire asks for: they came true."""
    for name in dict.fromkeys(c.side for c in asked):
        follower = ledger.predicted.pop(name, None)
        if follower is not None:
            follower.looped, follower.uses = follower.uses > 1, 0
            _came_true(ledger, follower, [c for c in asked if c.side == name])


def note_out(ledger: Ledger, out: list[Component]) -> list[Follower]:
    """End and return the predictions that were in vain: what was loaded for them took the place of
    some of `out`, which is asked for again first."""
    acted = [f for f in ledger.predicted.values() if f.acted]
    in_vain = [f for f in acted if any(is_used_up(f, c) for c in out)]
    for follower in in_vain:
        _is_in_vain(ledger, follower)
    return in_vain


def _came_true(ledger: Ledger, follower: Follower, parts: list[Component]) -> None:
    if not follower.acted:
        if not follower.failed:
            follower.trust = min(1.0, follower.trust + GAINED)
        return
    follower.trust = (3.0 * follower.trust + 1.0) / 4.0
    loaded = [c for c in parts if c.expected and _came_for(follower, c)]
    if not loaded:
        _end(ledger, follower, "no_room")
    elif all(c.state is State.RESIDENT for c in parts):
        _end(ledger, follower, "in", _saved_s(ledger, loaded))
    else:
        _end(ledger, follower, "coming", _saved_s(ledger, loaded))


def _came_for(follower: Follower, c: Component) -> bool:
    return c.on_device and c.load_started >= follower.since


def _saved_s(ledger: Ledger, loaded: list[Component]) -> float:
    """Return the seconds for which these loads ran before they were asked for."""
    since = min(c.load_started for c in loaded)
    ends = [c.load_started + (c.swap_in_s or 0.0) for c in loaded if c.state is State.RESIDENT]
    return (max(ends) if len(ends) == len(loaded) else ledger.now) - since


def note_evicted(ledger: Ledger, c: Component) -> None:
    """End a prediction in vain if `c`, which leaves, was loaded for it."""
    follower = ledger.predicted.get(c.side)
    if follower is None or not follower.acted or not _came_for(follower, c):
        return
    _is_in_vain(ledger, follower)


def _is_in_vain(ledger: Ledger, follower: Follower) -> None:
    follower.failed = True
    follower.trust *= KEPT_IN_VAIN
    _end(ledger, follower, "in_vain")


def _end(ledger: Ledger, follower: Follower, outcome: Outcome, saved_s: float = 0.0) -> None:
    follower.acted = False
    ledger.out.append(Foreseen(follower.name, follower.after, outcome, saved_s))


def forget(ledger: Ledger, follower: Follower) -> None:
    """End the prediction of a follower that no session names any more."""
    if ledger.predicted.get(follower.name) is follower:
        del ledger.predicted[follower.name]
    if follower.acted:
        _end(ledger, follower, "taken_back")
