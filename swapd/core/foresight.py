"""Predicts from the order of past uses when each component is needed again. Pure.

Pipelines use the same few components in the same order, which counting what followed what soon
gives. Without an order, counting how often each is used foretells more, and LRU may be better than
both. So two ghosts simulate evictions, one by these counts and one by LRU, and the one that moved
fewer chunks lately decides.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import combinations
from math import inf, log
from typing import NamedTuple, Protocol, TypeVar

#: With more components and families than this, always use LRU.
THINGS_MAX = 64
#: Number of uses to look ahead.
AHEAD = 12
#: Ignore futures less likely than this.
LEAST = 0.02
#: Uses remembered for each context, and without a context; beyond this, counts are halved.
REMEMBERED, ALL_REMEMBERED = 128, 1024
#: Trust what followed two things once it was counted so often, or while it was always the same.
TRUSTED = 24
#: A thing with this share of the uses after a context is certain to follow.
CERTAIN = 0.95
#: Time constants, in uses: of the chunks that a ghost moved lately; of the gain of a context.
LATELY, FORETOLD = 512, 128
#: LRU decides again once its ghost moved less by this factor: a smaller difference is chance.
BY_CHANCE = 1.02
#: While LRU decides, the ghosts follow one of SELDOM periods, of PERIOD uses each.
SELDOM, PERIOD = 2, 128
#: Compare all sets of so many candidates. Of more candidates, take those needed last.
SETS_OF = 8

Context = tuple[str, ...]


class Candidate(NamedTuple):
    name: str
    chunks: int


class _Counts:
    __slots__ = ("of", "total")

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self.total = 0

    def add(self, name: str, most: int) -> None:
        self.of[name] = self.of.get(name, 0) + 1
        self.total += 1
        if self.total > most:
            self.of = {one: count // 2 for one, count in self.of.items() if count > 1}
            self.total = sum(self.of.values())

    def forget(self, name: str) -> None:
        self.total -= self.of.pop(name, 0)

    def share(self, name: str) -> float:
        """More than 0, even if the thing was never used."""
        return (self.of.get(name, 0) + 0.1) / (self.total + 1.0)

    def certain(self) -> str | None:
        """Return the thing that nearly all uses are of, if there is one."""
        name = max(self.of, key=self.of.__getitem__, default=None)
        return name if name and self.of[name] >= CERTAIN * self.total else None


_NONE = _Counts()


class Chain:
    """Counts what followed each context: the two things used last, or the last one."""

    def __init__(self) -> None:
        #: The uses after each context; all uses after the empty one.
        self._followed: dict[Context, _Counts] = defaultdict(_Counts)
        self._context: Context = ()
        #: Chunks of each at its last use.
        self._chunks: dict[str, int] = {}
        #: By how much the context foretold the last uses better than frequencies: nats a use.
        self._gain = 0.0

    def use(self, name: str, chunks: int) -> None:
        self._chunks[name] = chunks
        if self._context[-1:] == (name,):
            return
        always, last = self._followed[()], self._context[-1:]
        others = 1.0 - always.share(last[0]) if last else 1.0  # uses in a row count once
        gain = log(self._after(self._context).share(name) * others / always.share(name))
        self._gain += (gain - self._gain) / FORETOLD
        always.add(name, ALL_REMEMBERED)
        if last:
            self._followed[last].add(name, REMEMBERED)
        if self._context != last:
            self._followed[self._context].add(name, REMEMBERED)
        self._context = _then(self._context, name)

    def forget(self, name: str) -> None:
        self._context = tuple(one for one in self._context if one != name)
        for context in [context for context in self._followed if name in context]:
            del self._followed[context]
        for followed in self._followed.values():
            followed.forget(name)
        self._chunks.pop(name, None)

    def expected(self, room: int, using: Iterable[str] = ()) -> defaultdict[str, float]:
        """Return, by name, after how many uses each is expected again once `using` are used;
        infinite if it cannot stay until then (`_cannot_stay`). `room`: chunks for all of them."""
        if self._gain < 0.0:
            return self._by_frequency()
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
        expected.update(dict.fromkeys(self._cannot_stay(context, room), inf))
        return expected

    def _cannot_stay(self, context: Context, room: int) -> set[str]:
        """Return those that leave before their next use in any case, as something that is certain
        to come first is too large to fit beside them."""
        leave, before = set[str](), set[str]()
        while name := self._after(context).certain():
            if name in before:
                break
            before.add(name)
            left = room - self._chunks[name]
            leave |= {one for one, chunks in self._chunks.items() if chunks > left} - before
            context = _then(context, name)
        return leave

    def _by_frequency(self) -> defaultdict[str, float]:
        uses = self._followed[()]
        expected = {name: uses.total / count for name, count in uses.of.items()}
        return defaultdict(lambda: 2.0 * uses.total + 1.0, expected)

    def _step(
        self, likely: Mapping[Context, float]
    ) -> tuple[dict[Context, float], dict[str, float]]:
        """Return the probabilities of each context and each use, one use later."""
        after, used = defaultdict[Context, float](float), defaultdict[str, float](float)
        for context, p in likely.items():
            followed, last = self._after(context), context[-1:]
            least = LEAST * followed.total / p
            if max(followed.of.values(), default=0) < least:
                continue
            for name, count in followed.of.items():
                if count >= least:
                    share = p * count / followed.total
                    used[name] += share
                    after[(*last, name)] += share
        return after, used

    def _after(self, context: Context) -> _Counts:
        """Return the uses after two things; after the last one if the former are not trusted."""
        followed = self._followed.get(context, _NONE)
        if followed.total < TRUSTED and len(followed.of) != 1:
            return self._followed.get(context[-1:], _NONE)
        return followed


def _then(context: Context, name: str) -> Context:
    """Uses in a row count once."""
    return context if context[-1:] == (name,) else (*context, name)[-2:]


class _Ghost:
    """Simulates one rule of eviction."""

    def __init__(self) -> None:
        #: What is on the simulated device, the least recently used first.
        self.there: dict[str, Candidate] = {}
        self.moved = 0.0

    def use(self, one: Candidate, room: int, chain: Chain | None) -> None:
        self.moved -= self.moved / LATELY
        if self.there.pop(one.name, None) != one:
            self.moved += one.chunks
            candidates = list(self.there.values())
            need = one.chunks + sum([other.chunks for other in candidates]) - room
            if need > 0:
                expected = chain.expected(room) if chain else None
                for victim in going(need, candidates, expected):
                    del self.there[victim.name]
        self.there[one.name] = one


class Foresight:
    def __init__(self) -> None:
        self._chain = Chain()
        self._known: set[str] = set()
        self._uses = 0
        self._lru, self._foreseen = _Ghost(), _Ghost()
        self._moves_less = False

    def know(self, name: str) -> None:
        self._known.add(name)

    def use(self, name: str, chunks: int, room: int) -> None:
        """`room`: chunks of all components that may be evicted, together."""
        if len(self._known) > THINGS_MAX:
            return
        self._chain.use(name, chunks)
        self._uses += 1
        if not self.rules and self._uses // PERIOD % SELDOM:
            return  # LRU is better now: look again later
        one = Candidate(name, chunks)
        self._lru.use(one, room, None)
        self._foreseen.use(one, room, self._chain)
        self._moves_less = self._foreseen.moved < self._lru.moved * (
            BY_CHANCE if self._moves_less else 1.0
        )

    def forget(self, name: str) -> None:
        """Unknown names, such as those of parts, are ignored."""
        if name in self._known:
            self._known.discard(name)
            self._chain.forget(name)
            self._lru.there.pop(name, None)
            self._foreseen.there.pop(name, None)

    @property
    def rules(self) -> bool:
        """Whether the chain moved less lately than LRU."""
        return len(self._known) <= THINGS_MAX and self._moves_less

    def expected(self, room: int, using: Iterable[str]) -> defaultdict[str, float]:
        return self._chain.expected(room, using)


def going(
    need: int, candidates: Sequence[Candidate], expected: defaultdict[str, float] | None
) -> list[Candidate]:
    """Return the candidates to evict to free `need` chunks. They come least recently used first.

    Without `expected`, take the first ones; otherwise the set with the least sum of chunks divided
    by the uses until they are needed again.
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
    """Of equally cheap sets, take the least recently used."""
    cost = {one: one.chunks / expected[one.name] for one in few}
    place = {one: at for at, one in enumerate(candidates)}
    enough = [one for one in few if one.chunks >= need]
    alone = sorted(enough, key=lambda one: (cost[one], place[one]))[:1]
    # no set is cheaper than one of its members
    cheap = [one for one in few if all(cost[one] < cost[other] for other in alone)]
    sets = (
        list(some)
        for n in range(2, len(cheap) + 1)
        for some in combinations(cheap, n)
        if sum([one.chunks for one in some]) >= need
    )
    return min(
        filter(None, (alone, *sets)),
        key=lambda some: (sum([cost[one] for one in some]), sum([place[one] for one in some])),
    )


def _first(need: int, candidates: Iterable[Candidate]) -> list[Candidate]:
    return needed(*oldest(need, candidates))


# --- which of several things to evict, given their order ----------------------------------------


class Sized(Protocol):
    @property
    def chunks(self) -> int: ...


Thing = TypeVar("Thing", bound=Sized)


def victims(need: int, idle: Iterable[Thing]) -> list[Thing] | None:
    """Return which to evict to free `need` chunks; None if all are too few. `idle` come in the
    order of eviction. Superfluous ones stay, the last first: to free 10 of a=1, b=10, only b
    goes."""
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
    """Drop superfluous ones, the last first; none if chunks are lacking."""
    kept: list[Thing] = []
    for thing in reversed(chosen):
        if short + thing.chunks <= 0:
            short += thing.chunks
        else:
            kept.append(thing)
    return kept[::-1]
