"""Loads ahead of an acquire: prefetches, and the followers of a used component.

Both are guesses: they take free memory and that of idle components, and only while no acquire waits
for memory. `planner.py` carries them out.
"""

from collections.abc import Iterable
from itertools import accumulate, pairwise

from swapd.core import eviction, explain, predictions, requests, transfers, twins
from swapd.core.actions import Foresee
from swapd.core.ledger import Ledger
from swapd.core.records import OPERATOR, Component, Follower, Key
from swapd.core.states import State
from swapd.shared.protocol import Follows, Prefetch

#: Most components with followers; half as many, if the followers were only observed.
FOLLOWED_MAX = 256

# --- prefetches --------------------------------------------------------------------------


def on_prefetch(ledger: Ledger, key: Key, asked: Prefetch) -> None:
    names = ledger.expand(asked.names)
    if asked.over is not None:
        names = tuple(name for name in names if ledger.may_be_acquired(name))
    for name in names:
        if not ledger.may_be_acquired(name):
            return ledger.refuse(key, "unknown_component", explain.unknown(ledger, name))
        if problem := eviction.cannot_come_in(ledger, [ledger.components[name]], None):
            return ledger.refuse(key, problem.code, explain.refused(ledger, problem))
    until = requests.deadline(asked.timeout_s, ledger.now)
    for c in ledger.named(names):
        _expect(ledger, c, asked.over, until)
    expire(ledger)
    ledger.accept(key)
    ledger.replan = True


def _expect(
    ledger: Ledger, c: Component, over: tuple[str, ...] | None, until: float | None
) -> None:
    if c.leases and not c.superseded:
        return  # it is granted, which is the end of a prefetch
    ledger.prefetches[c.name] = over
    _set_expected(ledger, c, True)
    if until is not None:
        ledger.expiries.set(c.name, until)


def _set_expected(ledger: Ledger, c: Component, expected: bool) -> None:
    c.expected = expected
    ledger.expiries.drop(c.name)
    if c.state is State.LOADING:
        transfers.settle(ledger, c)  # the rank of its load changes


def expire(ledger: Ledger) -> None:
    for name in ledger.expiries.over(ledger.now):
        _take_back(ledger, ledger.components[name])


def _take_back(ledger: Ledger, c: Component) -> None:
    ledger.prefetches.pop(c.name, None)
    _set_expected(ledger, c, False)
    ledger.replan = True


# --- what follows ------------------------------------------------------------------------


def declare_order(ledger: Ledger) -> None:
    for order in ledger.rules.order:
        for after, name in pairwise(order):
            ledger.followers.setdefault(after, {})[name] = Follower(name, after, OPERATOR)


def on_follows(ledger: Ledger, key: Key, asked: Follows) -> None:
    """Replace the followers of `asked.after`, unless the rules name them, or those of `asked` were
    only observed and a session has declared others."""
    before = ledger.followers.get(asked.after, {}).values()
    if any(f.session == OPERATOR or (asked.seen and not f.seen) for f in before):
        return ledger.accept(key)
    if asked.names and not before and (problem := _no_place(ledger, asked)):
        return ledger.refuse(key, "bad_request", problem)
    _forget(ledger, asked.after)
    if asked.names:
        ledger.followers[asked.after] = _followers(key[0], asked)
    ledger.accept(key)


def _followers(session: int, asked: Follows) -> dict[str, Follower]:
    seen = asked.seen  # it counts as the end of a loop, until it has come after a single use
    return {name: Follower(name, asked.after, session, seen, looped=seen) for name in asked.names}


def _no_place(ledger: Ledger, asked: Follows) -> str | None:
    most = FOLLOWED_MAX // 2 if asked.seen else FOLLOWED_MAX
    if len(ledger.followers) < most:
        return None
    return (
        f"the daemon knows the followers of {most} components, and takes no more; take some back: "
        "follows(after=...) without a name"
    )


def end_session(ledger: Ledger, session: int) -> None:
    for after, followers in list(ledger.followers.items()):
        if next(iter(followers.values())).session == session:  # one session named all of them
            _forget(ledger, after)


def _forget(ledger: Ledger, after: str) -> None:
    for follower in ledger.followers.pop(after, {}).values():
        if follower.acted:
            for c in _named(ledger, follower.name):
                _take_back(ledger, c)
        predictions.forget(ledger, follower)


def note_use(ledger: Ledger, used: list[Component]) -> None:
    """Expect the absent followers of components that are about to be leased."""
    for follower in predictions.predict(ledger, used):
        absent = _beside_the_rest(ledger, follower, used)
        if not absent or eviction.cannot_come_in(ledger, absent, None):
            continue
        if not follower.acted:
            follower.acted = True
            ledger.out.append(Foresee(follower.name, follower.after))
        for c in absent:
            _expect(ledger, c, None, None)
        ledger.replan = True


def note_asked(ledger: Ledger, asked: list[Component]) -> None:
    """End the predictions of what an acquire asks for, and of what follows it."""
    predictions.note_asked(ledger, asked)
    out = [c for c in asked if c.state is State.ABSENT or c.evicting]
    for follower in predictions.note_out(ledger, out) if out else ():
        for c in _named(ledger, follower.name):
            if c.name in ledger.prefetches:
                _take_back(ledger, c)


def _beside_the_rest(ledger: Ledger, follower: Follower, used: list[Component]) -> list[Component]:
    """Return the absent components to load for `follower` now. They leave room for what the use
    before them still needs, for which they would leave again."""
    absent = [c for c in _absent(ledger, follower) if c.name not in ledger.prefetches]
    if follower.ends_a_loop and ledger.rivals(absent):
        return []
    rest = _still_needed(ledger, follower, used) if absent else 0
    if rest or follower.ends_a_loop:
        expected = sum([c.chunks for c in _named(ledger, follower.name) if c.expected])
        return _first_of(absent, eviction.may_free(ledger) - rest - expected)
    return absent


def _first_of(components: list[Component], chunks: int) -> list[Component]:
    sizes = accumulate(c.chunks for c in components)
    return [c for c, size in zip(components, sizes, strict=True) if size <= chunks]


def _still_needed(ledger: Ledger, follower: Follower, used: list[Component]) -> int:
    """Return the chunks that the use before `follower` needs: of parts that it has not had, and in
    a loop also of those that it has had."""
    now = {c.name for c in used}
    parts = _named(ledger, follower.after)
    needed = [c for c in parts if predictions.is_still_needed(follower, c) and c.name not in now]
    if follower.ends_a_loop:
        needed = list(dict.fromkeys(needed + _idle(ledger, parts + used)))
    return sum([c.chunks for c in needed])


def _idle(ledger: Ledger, components: list[Component]) -> list[Component]:
    return [c for c in components if c.name in ledger.idle]


def lacks_room(ledger: Ledger, asked: Iterable[Component]) -> bool:
    """Return whether the trusted followers of these need more than the free memory."""
    if not ledger.followers:
        return False
    sides = dict.fromkeys(c.side for c in asked)
    trusted = [
        follower
        for side in sides
        for follower in ledger.followers.get(side, {}).values()
        if follower.trust >= predictions.TRUSTED
    ]
    out = sum(c.chunks for follower in trusted for c in _absent(ledger, follower))
    return out > ledger.pool.free


def _absent(ledger: Ledger, follower: Follower) -> list[Component]:
    absent = (c for c in _named(ledger, follower.name) if c.state is State.ABSENT)
    return [c for c in absent if twins.to_join(ledger, c) is None]


def _named(ledger: Ledger, name: str) -> list[Component]:
    names = ledger.expand((name,))
    return ledger.named([name for name in names if ledger.may_be_acquired(name)])
