"""The fewest bytes that any choice of evictions loads, for the same uses in the same order. Pure.

Only loads on demand are considered: a load ahead of its use saves time, but no bytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import combinations
from typing import NamedTuple

from swapd.replay.work import RecordedWork, ReplayTally
from swapd.shared import protocol

Names = frozenset[str]

#: All choices are tried within these limits: components at a time, sets of them, and sets in all.
_AT_A_TIME_MAX = 12
_SETS_MAX = 1_000
_TRIED_MAX = 500_000


class Fewest(NamedTuple):
    nbytes: int
    #: If False, `nbytes` is a bound: no choice loads fewer.
    exact: bool


def fewest_of(work: RecordedWork, outcome: ReplayTally, chunks: int) -> Fewest:
    """Return the fewest bytes for the uses in this outcome.

    It is a bound if the work has more than components with one registration each: workspaces,
    scratch, new weights, twins, of which one load serves all.
    """
    asked = [request for _, _, request in work.requests()]
    registered = [one for one in asked if isinstance(one, protocol.Register)]
    twins = _twins(registered)
    sizes = _sizes(registered, twins)
    plain = len(registered) == len(sizes) and not any(map(_changes_sizes, asked))
    uses = [Names(twins[name] for name in names if name in twins) for names in outcome.uses]
    found = fewest(uses, sizes, chunks, work.start.chunk_bytes)
    return found._replace(exact=found.exact and plain)


def _changes_sizes(asked: protocol.AnyOrder) -> bool:
    is_scratch = isinstance(asked, protocol.Register) and bool(asked.scratch)
    return is_scratch or isinstance(asked, protocol.Update | protocol.AcquireWorkspace)


def _sizes(registered: Sequence[protocol.Register], twins: Mapping[str, str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for one in registered:
        name, nbytes = twins[one.name], 0 if one.scratch else one.nbytes
        sizes[name] = min(nbytes, sizes.get(name, nbytes))
    return sizes


def _twins(registered: Sequence[protocol.Register]) -> dict[str, str]:
    """Return one name for all components that had the same bytes at any time, by each name."""
    first: dict[tuple[str, str], str] = {}
    of = {one.name: one.name for one in registered}
    for one in registered:
        if one.content:
            twin, own = of[first.setdefault((one.content, one.layout), one.name)], of[one.name]
            if twin != own:
                of = {name: twin if it == own else it for name, it in of.items()}
    return of


def fewest(
    uses: Sequence[Names], sizes: Mapping[str, int], chunks: int, chunk_bytes: int = 1
) -> Fewest:
    """Return the fewest bytes for `uses`, each of which needs all its components at once. `sizes`
    are in bytes.

    Components take whole chunks of a device that is empty at first. The result is exact for a few
    components, or if those needed last exactly make room for each load; else a bound.
    """
    bound = _by_next_use(uses, sizes, chunks, chunk_bytes)
    found = None if bound.exact else _of_all_choices(uses, sizes, chunks, chunk_bytes)
    return bound if found is None else Fewest(found, True)


def _of_all_choices(
    uses: Sequence[Names], sizes: Mapping[str, int], chunks: int, chunk_bytes: int
) -> int | None:
    taken = {name: -(-nbytes // chunk_bytes) for name, nbytes in sizes.items()}

    @cache
    def moves(there: Names, asked: Names) -> tuple[int, list[Names]]:
        """Return the bytes to load for `asked`, and the largest sets that may be there then."""
        if asked <= there:
            return 0, [there]
        room = chunks - sum(taken[one] for one in asked)
        ends = [some | asked for some in _largest(there - asked, taken, room)]
        return sum(sizes[one] for one in asked - there), ends

    least, tried = {Names(): 0}, 0
    for asked in uses:
        tried += len(least)
        many = len(least) > _SETS_MAX or max(map(len, least)) > _AT_A_TIME_MAX
        if many or tried > _TRIED_MAX:
            return None
        least = _least_after(least, asked, moves)
    return min(least.values())


def _least_after(
    least: Mapping[Names, int],
    asked: Names,
    moves: Callable[[Names, Names], tuple[int, list[Names]]],
) -> dict[Names, int]:
    after: dict[Names, int] = {}
    for there, moved in least.items():
        nbytes, ends = moves(there, asked)
        for end in ends:
            after[end] = min(moved + nbytes, after.get(end, moved + nbytes))
    return after


def _largest(names: Names, taken: Mapping[str, int], room: int) -> list[Names]:
    found: list[Names] = []
    for n in range(len(names), -1, -1):
        for some in map(frozenset, combinations(sorted(names), n)):
            fits = not n or sum(taken[one] for one in some) <= room
            if fits and not any(some < larger for larger in found):
                found.append(some)
    return found


def _by_next_use(
    uses: Sequence[Names], sizes: Mapping[str, int], chunks: int, chunk_bytes: int
) -> Fewest:
    """Evict what is needed last, byte by byte: no choice of whole components loads less."""
    room, loaded = chunks * chunk_bytes, 0
    whole = all(nbytes % chunk_bytes == 0 for nbytes in sizes.values())
    there: dict[str, int] = {}
    next_of: dict[str, int] = {}
    last: list[tuple[int, str]] = []
    for asked, later in zip(uses, _next_uses(uses), strict=True):
        next_of.update(later)
        for name in asked:
            missing = sizes[name] - there.get(name, 0)
            loaded += missing
            room -= missing
            there[name] = sizes[name]
        while room < 0 and last:
            when, name = heappop(last)
            if name in asked or next_of[name] != -when:
                continue
            goes = min(there[name], -room)
            room += goes
            there[name] -= goes
            if there[name]:
                whole = False
                heappush(last, (when, name))
        for name in asked:
            heappush(last, (-next_of[name], name))
    return Fewest(loaded, whole)


def _next_uses(uses: Sequence[Names]) -> Iterator[dict[str, int]]:
    coming: dict[str, int] = {}
    found = []
    for number in range(len(uses) - 1, -1, -1):
        found.append({name: coming.get(name, len(uses)) for name in uses[number]})
        coming.update(dict.fromkeys(uses[number], number))
    return reversed(found)
