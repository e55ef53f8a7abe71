"""Every order of events in a small world: `python -m tests.core.orders [--depth 10] [--strict]`.

Two sessions, each with one thread, and three components, of which one is mutable, with two chunks
too few for all. Each state is checked as in every test of a `World`, and from some of them all
waits must end. Acquires of one component, releases, cancels, and the ends of copies, failed or not;
with `--more` also acquires of two, prefetches, `Unregister`, and sessions that go. The clock stands
still. Prints the number of new states after each move: 488,774 of them in all to depth 10, in half
an hour of two cores.
"""

import argparse
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain, islice
from multiprocessing import get_context
from typing import Any

from tests.core.driver import wind_up
from tests.core.world import World

CHUNKS = 3
SIZES = {"a": 2, "b": 1, "c": 2}
#: A request is numbered by its kind, so that a state does not tell how often it came before.
ACQUIRES, PREFETCHES, UNREGISTERS = 10, 20, 30
#: Of numbers from here on only the order matters: a million for each counter of the core.
COUNTED = 1_000_000
#: Counts and times: no decision depends on them while the clock stands still and LRU decides.
IRRELEVANT = {
    *("_planned_at", "copy_s", "gap_s", "last_used", "load_started", "made_way_at", "released_at"),
    *("swap_in_s", "use_s", "used_since", "lane", "lane_in", "lane_out", "foresight", "last_agent"),
    *("counts", "evictions", "hits", "loads", "tally", "uses", "wasted", "peak_chunks"),
    *("out", "request", "why"),
}
#: All waits must end from one in so many states.
WOUND_UP = 8


def begin(*, strict: bool) -> World:
    w = World(CHUNKS, strict=strict, eviction="lru", residency_factor=0.0)
    one, two = w.open(), w.open()
    w.register(one, "a", SIZES["a"])
    w.register(one, "b", SIZES["b"], mutable=True)
    w.register(two, "c", SIZES["c"])
    w.ledger._generation, w.ledger.arrivals = COUNTED, 2 * COUNTED
    w.ledger.holders._seq = 3 * COUNTED
    return w


def moves(w: World, more: bool) -> Iterator[Callable[[], object]]:
    """All that may happen next."""
    asked = [("a",), ("b",), ("c",), *([("b", "c")] if more else [])]
    for session in sorted(w.sessions):
        if not any(key[0] == session for key in w.waiting):  # else its thread waits
            for number, names in enumerate(asked, ACQUIRES):
                if (session, number) not in w.leases:
                    yield partial(_ask, w, number, w.acquire, session, *names)
    for key in sorted(w.waiting):
        yield partial(w.cancel, key)
    for key in sorted(w.leases):
        yield partial(w.release, key)
    for generation in list(w.moves):
        yield partial(w.end_move, generation)
        yield partial(w.end_move, generation, "it fails")
    for generation in list(w.acks):
        yield partial(w.end_ack, generation)
    if more:
        yield from _more(w)


def _more(w: World) -> Iterator[Callable[[], object]]:
    for session in sorted(w.sessions):
        yield partial(w.leave, session)
    for number, (name, owner) in enumerate(sorted(w.owner.items())):
        if name not in w.ledger.prefetches:
            yield partial(_ask, w, PREFETCHES + number, w.prefetch, owner, name)
        if not w.ledger.components[name].unregistering:
            yield partial(_ask, w, UNREGISTERS + number, w.unregister, owner, name)


def _ask(w: World, number: int, ask: Callable[..., object], *args: Any) -> None:
    w._request = number - 1
    ask(*args)


def state(w: World) -> int:
    """The same for worlds between which only counts and the age of counters differ."""
    told = [sorted(w.acks), sorted(w.stops), sorted(w.dirty), sorted(w.leases)]
    flat: list[Any] = []
    _flatten([w.ledger, told], flat, {})
    counted = sorted({n for n in flat if type(n) is int and n >= COUNTED})
    rank = {n: (n // COUNTED, i) for i, n in enumerate(counted)}
    return hash(repr([rank.get(n, n) if type(n) is int else n for n in flat]))


def _flatten(thing: Any, flat: list[Any], seen: dict[int, int]) -> None:
    seen[id(thing)] = len(seen)
    for part in _parts(thing):
        if part is None or isinstance(part, int | float | str):
            flat.append(part)
        elif (before := seen.get(id(part))) is not None:
            flat.append(("seen", before))
        else:
            _flatten(part, flat, seen)
    flat.append("end")


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, dict):
        return chain.from_iterable(thing.items())
    if isinstance(thing, list | tuple):
        return thing
    if isinstance(thing, set | frozenset):
        return sorted(thing, key=repr)
    kind = type(thing)
    slots = getattr(kind, "__struct_fields__", None) or getattr(kind, "__slots__", None)
    fields = _relevant(tuple(slots or vars(thing)))
    return [kind.__name__, *(part for f in fields for part in (f, getattr(thing, f, None)))]


@cache
def _relevant(names: tuple[str, ...]) -> list[str]:
    return sorted(set(names) - IRRELEVANT)


def after(world: bytes, more: bool, last: bool) -> list[tuple[int, bytes]]:
    """All worlds that one move makes of this one. Of the `last`, only what tells them apart."""
    made = []
    for i in range(sum(1 for _ in moves(pickle.loads(world), more))):
        w: World = pickle.loads(world)
        next(islice(moves(w, more), i, None))()
        w.log.clear()
        w.answers.clear()
        found, copy = state(w), b"" if last else pickle.dumps(w)
        if found % WOUND_UP == 0:
            wind_up(w)
        made.append((found, copy))
    return made


def explore(depth: int, *, strict: bool, more: bool, workers: int) -> Iterator[int]:
    """The number of new states after each of so many moves."""
    first = begin(strict=strict)
    seen, worlds = {state(first)}, [pickle.dumps(first)]
    with get_context("fork").Pool(workers) as pool:  # hashes of strings are those of this process
        for left in range(depth, 0, -1):
            found, then = dict[int, bytes](), partial(after, more=more, last=left == 1)
            for made in pool.imap_unordered(then, worlds, chunksize=16):
                found.update((key, world) for key, world in made if key not in seen)
            worlds = list(found.values())
            seen |= found.keys()
            yield len(worlds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked = vars(parser.parse_args())
    for made, count in enumerate(explore(asked.pop("depth"), **asked), 1):
        print(f"{made:3} moves: {count} new states", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
