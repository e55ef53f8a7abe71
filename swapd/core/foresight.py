"""Predicts from the order of past uses when each component is needed again. Pure.

Pipelines use the same few components in the same order, so counting what followed what soon gives
the order. Where it does not, LRU is better. Two ghosts simulate evictions by both rules, and the
rule that moved fewer chunks lately decides.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import combinations
from typing import NamedTuple, Protocol, TypeVar

#: With more components and families than this, always use LRU.
THINGS_MAX = 64
#: Number of uses to look ahead.
AHEAD = 12
#: Ignore futures less likely than this.
LEAST = 0.02
#: Uses remembered for each context; beyond this, all counts are halved.
REMEMBERED = 128
#: Trust what followed two things after so many uses, or while it was always the same.
TRUSTED = 24
#: Time constant, in uses, of the chunks that a ghost moved "lately".
LATELY = 128
#: While LRU decides, the ghosts follow one in so many periods of LATELY uses.
SELDOM = 4
#: Compare all sets of so many candidates. Of more candidates, take those needed last.
SETS_OF = 8

Context = tuple[str, ...]


class Candidate(NamedTuple):
    name: str
    chunks: int


class Chain:
    """Counts what followed each context: the two things used last, or the last one."""

    def __init__(self) -> None:
        self._followed: dict[Context, Counter[str]] = defaultdict(Counter)
        self._context: Context = ()

    def use(self, name: str) -> None:
        if self._context[-1:] == (name,):
            return
        for context in (self._context, self._context[-1:]):
            followed = self._followed[context]
            followed[name] += 1
            if sum(followed.values()) > REMEMBERED:
                halved = {one: count // 2 for one, count in followed.items() if count > 1}
                self._followed[context] = Counter(halved)
        self._context = _then(self._context, name)

    def forget(self, name: str) -> None:
        self._context = tuple(one for one in self._context if one != name)
        for context in [context for context in self._followed if name in context]:
            del self._followed[context]
        for followed in self._followed.values():
            del followed[name]

    def expected(self, using: Iterable[str] = ()) -> defaultdict[str, float]:
        """Return, by name, after how many uses each is expected again once `using` are used."""
        context = reduce(_then, using, self._context)
        likely = {context: 1.0}
        #: Probability that each was not used until this step.
        unused: dict[str, float] = {}
        expected: defaultdict[str, float] = defaultdict(lambda: 2.0 * AHEAD)
        for step in range(AHEAD):
            likely, used = self._step(likely)
            if not used:
                break
            for name in used:
                if name not in unused:
                    unused[name], expected[name] = 1.0, step
            for name, share in unused.items():
                expected[name] += share
                unused[name] = share * (1.0 - used.get(name, 0.0))
        for name, share in unused.items():
            expected[name] += share * (2 * AHEAD - step)
        return expected

    def _step(
        self, likely: Mapping[Context, float]
    ) -> tuple[dict[Context, float], dict[str, float]]:
        """Return the probabilities of each context and each use, one use later."""
        after, used = defaultdict[Context, float](float), defaultdict[str, float](float)
        for context, p in likely.items():
            followed, total = self._after(context)
            each = p / max(total, 1)
            for name, count in followed.items():
                if (share := each * count) >= LEAST:
                    used[name] += share
                    after[_then(context, name)] += share
        return after, used

    def _after(self, context: Context) -> tuple[Mapping[str, int], int]:
        """Return what followed the last two uses, or the last if that is not trusted; and the
        sum."""
        followed: Mapping[str, int] = self._followed.get(context, {})
        total = sum(followed.values())
        if total < TRUSTED and len(followed) != 1:
            followed = self._followed.get(context[-1:], {})
            total = sum(followed.values())
        return followed, total


def _then(context: Context, name: str) -> Context:
    """Uses in a row count once."""
    return context if context[-1:] == (name,) else (*context, name)[-2:]


class _Ghost:
    """Simulates one rule of eviction."""

    def __init__(self) -> None:
        #: The least recently used first.
        self.there: dict[str, Candidate] = {}
        self.moved = 0.0

    def use(self, one: Candidate, room: int, chain: Chain | None) -> None:
        self.moved -= self.moved / LATELY
        if self.there.pop(one.name, None) != one:
            self.moved += one.chunks
            candidates = list(self.there.values())
            need = one.chunks + sum([other.chunks for other in candidates]) - room
            expected = chain.expected() if chain and need > 0 else None
            for victim in going(need, candidates, expected):
                del self.there[victim.name]
        self.there[one.name] = one


class Foresight:
    def __init__(self) -> None:
        self._chain = Chain()
        self._known: set[str] = set()
        self._uses = 0
        self._lru, self._foreseen = _Ghost(), _Ghost()

    def know(self, name: str) -> None:
        self._known.add(name)

    def use(self, name: str, chunks: int, room: int) -> None:
        """Note a use. `room`: chunks that evictable components have in all."""
        if len(self._known) > THINGS_MAX:
            return
        self._chain.use(name)
        self._uses += 1
        if not self.rules and self._uses // LATELY % SELDOM:
            return  # LRU is better now: look again later
        one = Candidate(name, chunks)
        self._lru.use(one, room, None)
        self._foreseen.use(one, room, self._chain)

    def forget(self, name: str) -> None:
        """Forget it. Unknown names, such as those of parts, are ignored."""
        if name in self._known:
            self._known.discard(name)
            self._chain.forget(name)
            self._lru.there.pop(name, None)
            self._foreseen.there.pop(name, None)

    @property
    def rules(self) -> bool:
        """Whether the chain moved less lately than LRU."""
        few = len(self._known) <= THINGS_MAX
        return few and self._foreseen.moved < self._lru.moved

    def expected(self, using: Iterable[str]) -> defaultdict[str, float]:
        return self._chain.expected(using)


def going(
    need: int, candidates: Sequence[Candidate], expected: defaultdict[str, float] | None
) -> list[Candidate]:
    """Return the candidates to evict to free `need` chunks. They come least recently used first.

    Without `expected`, take the first ones. Otherwise take the set with the least cost: chunks
    divided by the uses until they are needed again, in sum.
    """
    if need <= 0:
        return []
    if expected is None:
        return _first(need, candidates)
    last = sorted(candidates, key=lambda one: -expected[one.name])
    few = last[:SETS_OF]
    if sum(one.chunks for one in few) < need:
        return _first(need, last)
    return _cheapest(need, few, candidates, expected)


def _cheapest(
    need: int,
    few: Sequence[Candidate],
    candidates: Sequence[Candidate],
    expected: Mapping[str, float],
) -> list[Candidate]:
    """Return the cheapest set of `few` that is enough; of equal ones, the least recently used."""
    cost = {one: one.chunks / expected[one.name] for one in few}
    place = {one: at for at, one in enumerate(candidates)}
    sets = (
        some
        for n in range(1, len(few) + 1)
        for some in combinations(few, n)
        if sum([one.chunks for one in some]) >= need
    )
    best = min(sets, key=lambda some: (sum(cost[one] for one in some), sum(place[o] for o in some)))
    return list(best)


def _first(need: int, candidates: Iterable[Candidate]) -> list[Candidate]:
    return needed(*oldest(need, candidates))


# --- which of several things to evict, given their order ----------------------------------------


class Sized(Protocol):
    @property
    def chunks(self) -> int: ...


Thing = TypeVar("Thing", bound=Sized)


def victims(need: int, idle: Iterable[Thing]) -> list[Thing] | None:
    """Return which to evict to free `need` chunks, or None if all are too few.

    `idle` come in the order of eviction. Of those that are enough, superfluous ones stay, the last
    first: to free 10 of a=1, b=10, only b goes.
    """
    chosen, short = oldest(need, idle)
    return None if short > 0 else needed(chosen, short)


def oldest(need: int, idle: Iterable[Thing]) -> tuple[list[Thing], int]:
    """Return the first ones that have `need` chunks, or all; and how many chunks are lacking
    then."""
    chosen: list[Thing] = []
    if need > 0:
        for thing in idle:
            if thing.chunks:
                chosen.append(thing)
                need -= thing.chunks
                if need <= 0:
                    break
    return chosen, need


def needed(chosen: list[Thing], short: int) -> list[Thing]:
    """Return `chosen` without superfluous ones, dropping the last first; all, if chunks are
    lacking."""
    kept: list[Thing] = []
    for thing in reversed(chosen):
        if short + thing.chunks <= 0:
            short += thing.chunks
        else:
            kept.append(thing)
    return kept[::-1]
