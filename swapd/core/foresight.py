"""When components are expected again, by the order in which they were used so far. Pure.

The chain: how often each followed each two before it. Pipelines use the same few components in the
same order, so it soon knows the order; where it does not, LRU moves less. So two ghosts, which move
nothing, follow the uses as well: one evicts by the chain, one the least recently used. Whichever
moved less lately says how to evict.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import combinations
from typing import NamedTuple, Protocol, TypeVar

#: Most components and families that are foreseen: with more, LRU rules.
THINGS_MAX = 64
#: Uses that it looks ahead.
AHEAD = 12
#: Less likely futures are left out.
LEAST = 0.02
#: A context remembers so many uses that followed it, older ones for half and less.
REMEMBERED = 128
#: What followed two things is trusted after so many uses, or while it was always the same.
TRUSTED = 24
#: "Lately", in uses: the time constant of what the ghosts have moved.
LATELY = 128
#: While LRU rules, the ghosts follow the uses of one in so many periods of that length.
SELDOM = 4
#: All sets of so many candidates are compared; of more, those that are needed last go first.
SETS_OF = 8

#: The two things used last.
Context = tuple[str, ...]


class Candidate(NamedTuple):
    """What may go: a component or a family, and its chunks."""

    name: str
    chunks: int


class Chain:
    """The order of uses so far."""

    def __init__(self) -> None:
        self._followed: dict[Context, Counter[str]] = defaultdict(Counter)
        self._context: Context = ()

    def use(self, name: str) -> None:
        """It is used. Uses in a row are one."""
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
        """After how many uses each is expected again, once `using` are used; by name."""
        context = reduce(_then, using, self._context)
        likely = {context: 1.0}
        #: How likely each was not used until then.
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
        """One use later: how likely each context is, and each thing used."""
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
        """How often each followed: the two, or if that is not certain enough, the last one; and
        how often any did."""
        followed: Mapping[str, int] = self._followed.get(context, {})
        total = sum(followed.values())
        if total < TRUSTED and len(followed) != 1:
            followed = self._followed.get(context[-1:], {})
            total = sum(followed.values())
        return followed, total


def _then(context: Context, name: str) -> Context:
    """The two used last, once `name` is used. Uses in a row are one."""
    return context if context[-1:] == (name,) else (*context, name)[-2:]


class _Ghost:
    """What would be in, and the chunks moved lately, under one rule of eviction."""

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
    """Follows the uses of components that may be evicted, and of families."""

    def __init__(self) -> None:
        self._chain = Chain()
        #: Registered components and families.
        self._known: set[str] = set()
        self._uses = 0
        self._lru, self._foreseen = _Ghost(), _Ghost()

    def know(self, name: str) -> None:
        self._known.add(name)

    def use(self, name: str, chunks: int, room: int) -> None:
        """A component, or a family, is used, with room for so many chunks in all."""
        if len(self._known) > THINGS_MAX:
            return
        self._chain.use(name)
        self._uses += 1
        if not self.rules and self._uses // LATELY % SELDOM:
            return  # the order says little: look again later
        one = Candidate(name, chunks)
        self._lru.use(one, room, None)
        self._foreseen.use(one, room, self._chain)

    def forget(self, name: str) -> None:
        """It is gone. Names that are not known, as those of parts, are nothing."""
        if name in self._known:
            self._known.discard(name)
            self._chain.forget(name)
            self._lru.there.pop(name, None)
            self._foreseen.there.pop(name, None)

    @property
    def rules(self) -> bool:
        """Whether evicting by the chain moved less lately than LRU."""
        few = len(self._known) <= THINGS_MAX
        return few and self._foreseen.moved < self._lru.moved

    def expected(self, using: Iterable[str]) -> defaultdict[str, float]:
        return self._chain.expected(using)


def going(
    need: int, candidates: Sequence[Candidate], expected: defaultdict[str, float] | None
) -> list[Candidate]:
    """Which of the candidates go to free `need` chunks. They come in the order of their last use.

    Without `expected`: the first ones. Else the set that costs the fewest expected bytes for each
    use: the sum of chunks by the uses until they come back.
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
    """The set of `few` that is enough and costs least; of several, the least recently used."""
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
    """The first that are enough, or all, without superfluous ones."""
    return needed(*oldest(need, candidates))


# --- of things in the order in which they should go, those that free enough ---------------------


class Sized(Protocol):
    @property
    def chunks(self) -> int: ...


Thing = TypeVar("Thing", bound=Sized)


def victims(need: int, idle: Iterable[Thing]) -> list[Thing] | None:
    """Those to evict to free `need` chunks, or None if all are too few.

    `idle` come in the order in which they should go. Every one returned is necessary: oldest first
    alone would take too many (need 10 with idle a=1, b=10 would take both), so the most recent
    superfluous ones stay.
    """
    chosen, short = oldest(need, idle)
    return None if short > 0 else needed(chosen, short)


def oldest(need: int, idle: Iterable[Thing]) -> tuple[list[Thing], int]:
    """The first ones that have `need` chunks, or all; and how many chunks are lacking then."""
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
    """Without the most recent superfluous ones; all, if chunks are lacking."""
    kept: list[Thing] = []
    for thing in reversed(chosen):
        if short + thing.chunks <= 0:
            short += thing.chunks
        else:
            kept.append(thing)
    return kept[::-1]
