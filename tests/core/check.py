"""Whether the state of a core contradicts itself: its sums, orders and indexes, recomputed."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain, combinations
from operator import attrgetter
from typing import Any

from swapd.core import sharing, twins
from swapd.core.chunks import count
from swapd.core.ledger import HITS_MAX, OTHERS, Ledger
from swapd.core.records import OPERATOR, Agent, Component, Key, Waiter
from swapd.core.residency import Residency
from swapd.core.states import State
from swapd.shared.protocol import Runs


def check(core: Residency) -> None:
    """Raise AssertionError if the state contradicts itself."""
    for part in _CHECKS:
        part(core.ledger)


def _same(what: str, kept: Any, made: Any) -> None:
    assert kept == made, f"{what}: {kept} is kept, and {made} is right"


def _is_idle(c: Component) -> bool:
    return c.state is State.RESIDENT and not c.leases and not c.promised


# --- one component -----------------------------------------------------------------------


def _components(ledger: Ledger) -> None:
    for c in ledger.components.values():
        for problem, wrong in _problems(ledger, c).items():
            assert not wrong, f"{c}: {problem}"


def _problems(ledger: Ledger, c: Component) -> dict[str, bool]:
    if c.workspace:
        return _of_all(ledger, c) | {
            "a workspace has a place": c.mapped,
            "no owner": not (c.leases or c.promised or c.waiting or c.evicting),
        }
    streamed = c.part_of and c.policy == "sequential"
    return (
        _of_all(ledger, c)
        | _of_contents(ledger, c)
        | {
            "its policy": not (c.policy == c.own_policy or streamed),
            "lent to others before it is in": c.state is State.LOADING
            and any(session != c.session for session, _ in c.leases),
        }
    )


def _of_all(ledger: Ledger, c: Component) -> dict[str, bool]:
    move = ledger.moves.get(c.generation)
    moving = c.state in (State.LOADING, State.STOPPING, State.WRITING_BACK, State.RECLAIMING)
    stays = c.policy == "permanent"
    fixed = stays and c.on_device and not c.unregistering
    return {
        "outlived its session": c.session not in ledger.sessions,
        "is leased and not in": bool(c.leases) and c.state not in (State.RESIDENT, State.LOADING),
        "held by no lease": not c.leases <= ledger.leases.keys(),
        "promised to no waiter": any(key not in ledger.queue for key in c.promised),
        "on the wrong chunks": c.on_device and count(c.runs) != c.chunks,
        "idle": (c.name in ledger.idle) != ((_is_idle(c) or c.stoppable) and not stays),
        "copy and state": (move is not None) != moving,
        "frees": c.frees not in ((0, c.chunks) if c.evicting else (0,)),
        "fixed": c.fixed != (c.chunks if fixed else 0),
    }


def _of_contents(ledger: Ledger, c: Component) -> dict[str, bool]:
    return {
        "no writer": bool(c.scratch) and not c.mutable,
        "saved in part": not c.scratch and (c.kept, c.to_save) != (None, None),
        "saved": c.scratch == "dropped" and (c.kept, c.to_save) != ((), ()),
        "written, not updated": c.mutable and c.renewal is not None,
        "superseded": c.superseded != (c.name in ledger.superseded),
        "superseded, and out": c.superseded and c.state not in (State.LOADING, State.RESIDENT),
        "superseded, and without a holder": c.superseded and _is_idle(c),
    }


# --- components together -----------------------------------------------------------------


def _chunks(ledger: Ledger) -> None:
    free = ledger.pool.runs()
    end = 0
    for first, n in sorted((*_occupied(ledger), *free)):
        assert first == end, f"a chunk is lost or held twice: {end}"
        end += n
    _same("chunks", end, ledger.pool.total)
    _same("free", ledger.pool.free, count(free))
    _same("free by length", ledger.pool._by_length, sorted((n, -i) for i, n in free))


def _occupied(ledger: Ledger) -> Iterable[tuple[int, int]]:
    for runs in _takers(ledger):
        yield from runs
    for held in ledger.quarantined.values():
        yield from chain.from_iterable(held)


def _takers(ledger: Ledger) -> Counter[Runs]:
    moving = [move.component.runs for move in ledger.moves.values()]
    return Counter([*moving, *(c.runs for c in _there(ledger) if c.generation not in ledger.moves)])


def _there(ledger: Ledger) -> list[Component]:
    return [c for c in ledger.components.values() if c.on_device]


def _alike(ledger: Ledger) -> None:
    more = {runs: n - 1 for runs, n in _takers(ledger).items() if runs and n > 1}
    _same("takers of the same chunks", ledger.pool.shared, more)
    _same("who has the same bytes", ledger.alike, _by((c.origin, c) for c in _there(ledger)))


def _beside(ledger: Ledger) -> None:
    on = _by((c.runs, c) for c in _there(ledger))
    for c in filter(attrgetter("runs"), _there(ledger)):
        others = {other.name for other in twins.beside(ledger, c)}
        _same(f"who is beside {c}", others, on[c.runs].keys() - {c.name})
        assert not (others and c.mutable), f"{c} may be written to"
        assert c.name not in ledger.idle or not twins.need_not_stay(ledger, c), f"{c} is in idly"


def _leaving(ledger: Ledger) -> None:
    lent = [m.component for m in ledger.moves.values() if m.component.workspace]
    evicting = [c for c in (*ledger.components.values(), *lent) if c.evicting]
    leaving = {c.runs for c in evicting if all(o.evicting for o in twins.beside(ledger, c))}
    _same("leaving", ledger.leaving, sum(map(count, leaving)) + _quarantined(ledger, dying=True))
    reclaimed = (c.chunks for c in lent if c.state is State.RECLAIMING)
    _same("reclaiming", ledger.reclaiming, sum(reclaimed))


def _staying(ledger: Ledger) -> None:
    staying = [c for c in ledger.components.values() if c.policy == "permanent"]
    _same("staying", ledger.staying, sum(c.chunks for c in staying))
    fixed = _quarantined(ledger, dying=False) + sum(c.fixed for c in staying)
    _same("fixed", ledger.fixed, fixed)


def _quarantined(ledger: Ledger, *, dying: bool) -> int:
    held = [some for s, some in ledger.quarantined.items() if (s in ledger.dying) == dying]
    return sum(map(count, chain.from_iterable(held)))


def _names(ledger: Ledger) -> None:
    components = ledger.components.values()
    named = [*ledger.families, *(c.name for c in components if not c.workspace)]
    _same("names", ledger.names, sorted(named))
    things = {c.side for c in ledger.components.values() if not c.workspace}
    _same("foreseen", vars(ledger.foresight)["_known"], things)
    _same("families", ledger.families, _by((c.part_of, c) for c in components))
    assert not ledger.families.keys() & ledger.components.keys(), "a name has two meanings"
    assert ledger.automatic.keys() <= ledger.families.keys(), "a family that is gone keeps room"


def _owners(ledger: Ledger) -> None:
    for name, family in ledger.families.items():
        assert len({c.session for c in family.values()}) == 1, f"{name} has several owners"


def _groups(ledger: Ledger) -> None:
    groups = _by((c.group, c) for c in ledger.components.values() if c.on_device)
    _same("which of a group are in", ledger.groups_in, groups)
    for members in groups.values():
        for a, b in combinations(members.values(), 2):
            assert not a.excludes(b), f"{a} and {b} exclude each other"


def _by(named: Iterable[tuple[Any, Component]]) -> dict[Any, dict[str, Component]]:
    found: dict[Any, dict[str, Component]] = defaultdict(dict)
    for name, c in named:
        if name:
            found[name][c.name] = c
    return found


def _host_copies(ledger: Ledger) -> None:
    host = ledger.host
    own = {c.uid for c in ledger.components.values() if not c.workspace}
    needed = own | {c.renewal.uid for c in ledger.components.values() if c.renewal}
    needed |= host.making.keys() | host.kept.keys()
    read = {m.uid for m in ledger.moves.values()}
    assert needed <= host.owners.keys() <= needed | read, "host copies are wrong"
    assert not host.unordered.keys() & host.making.keys(), "a host copy is made before its order"
    assert all(uid in host.contents for uid in host.unordered), "a host copy is never ordered"
    assert not host.kept.keys() & (own | host.making.keys()), "what is kept is in use"
    assert all(map(host.contents.is_last, host.kept)), "what is kept serves nobody"
    _same("kept bytes", host.kept_bytes, sum(host.owners[uid].nbytes for uid in host.kept))
    assert host.kept_bytes <= ledger.rules.keep_host, "too much is kept"


def _counts(ledger: Ledger) -> None:
    """Also every name with counts is registered."""
    tallies, all_of = ledger.counts.of, ledger.counts.of.values()
    _same("loads", ledger.loads, sum(tally.loads for tally in all_of))
    _same("evictions", ledger.evictions, sum(tally.evictions for tally in all_of))
    hits = sum(tally.hits for tally in all_of)
    _same("hits", min(ledger.hits, HITS_MAX), min(hits, HITS_MAX))
    names = {c.side: c for c in ledger.components.values() if not c.workspace}
    assert tallies.keys() - {OTHERS} <= names.keys(), "counts of a component that is gone"
    for c in ledger.components.values():
        own = tallies.get(OTHERS if c.workspace else c.side, tallies[OTHERS])
        assert c.tally in (own, tallies[OTHERS]), f"{c} is counted elsewhere"


# --- leases, waiters, sessions -----------------------------------------------------------


def _leases(ledger: Ledger) -> None:
    known = {(s, n) for s, session in ledger.sessions.items() for n in session.leases}
    _same("leases", set(ledger.leases), known)
    for key, lease in ledger.leases.items():
        assert key in ledger.holders.by_agent[lease.owner].leases, f"{lease} is not its agent's"
        for c in ledger.named(lease.names):
            assert key in c.leases, f"{lease} does not hold {c}"
    for c in ledger.components.values():
        _same("agents", c.agents, Counter(ledger.leases[key].owner for key in c.leases))
        _same("holders", c.holders, Counter(session for session, _ in c.leases))


def _agents(ledger: Ledger) -> None:
    agents: dict[Agent, dict[str, Component]] = defaultdict(dict)
    for lease in ledger.leases.values():
        agents[lease.owner].update({name: ledger.components[name] for name in lease.names})
    _same("agents with leases", ledger.holders.by_agent.keys(), agents.keys())
    for agent, components in agents.items():
        held = ledger.holders.by_agent[agent]
        _same(f"components of {agent}", held.components, components)
        _same(f"chunks of {agent}", held.chunks, sum(c.chunks for c in components.values()))


def _leased(ledger: Ledger) -> None:
    leased = [c for c in ledger.components.values() if c.leases]
    _same("leased", ledger.holders.leased, {c.name: c for c in leased})
    may_go = [c for c in leased if c.policy != "permanent"]
    may_go.sort(key=lambda c: (c.state is State.LOADING, c.resident_since, c.leased_seq))
    _same("the order of giving way", list(ledger.holders.to_give_way()), may_go)


def _idle(ledger: Ledger) -> None:
    order = list(ledger.idle)
    idle = [c.name for c in ledger.components.values() if c.name in ledger.idle]
    _same("idle", sorted(c.name for c in order), sorted(idle))
    _same("idle chunks", ledger.idle.chunks, sum(c.chunks for c in order))
    parts = _idle_parts(ledger)
    places = [_place(ledger, parts, c) for c in order]
    _same("the order of eviction", places, sorted(places))


def _idle_families(ledger: Ledger) -> None:
    for family in _idle_parts(ledger).values():
        since = [c.idle_since for c in family.values()]
        _same("the order in a family", since, sorted(since, reverse=True))


def _idle_parts(ledger: Ledger) -> dict[str, dict[str, Component]]:
    lasting = [c for c in ledger.idle if c.policy != "sequential"]
    return _by((c.part_of, c) for c in lasting if c.state is State.RESIDENT)


def _place(
    ledger: Ledger, parts: dict[str, dict[str, Component]], c: Component
) -> tuple[int, float]:
    if c.state is State.LOADING:
        return 4 if c.expected else -1, 0.0
    if c.policy == "sequential":
        return 0, 0.0
    if not c.part_of:
        return 1 if c.leaves_for_nothing else 2, c.idle_since
    in_use = any(part.leases for part in ledger.families[c.part_of].values())
    return 3 if in_use else 2, max(part.idle_since for part in parts[c.part_of].values())


def _waiters(ledger: Ledger) -> None:
    waiting, promised = defaultdict[str, set[Key]](set), defaultdict[str, set[Key]](set)
    for w in ledger.queue:
        assert w.session in ledger.sessions, f"{w} outlived its session"
        assert [w.queued, w.admitted, w.parked].count(True) == 1, f"{w}: several ways to wait"
        of = promised if w.admitted else waiting
        for name in () if w.parked else w.names:
            of[name].add(w.key)
    for c in ledger.components.values():
        _same(f"waiters for {c}", c.waiting.keys(), waiting[c.name])
        _same(f"waiters that have {c}", c.promised.keys(), promised[c.name])


def _queue(ledger: Ledger) -> None:
    queue = ledger.queue
    _same("queued", queue.queued, sorted((w for w in queue if w.queued), key=lambda w: w.order))
    for w in queue.queued:
        shares = sharing.may_share(ledger, w, ledger.named(w.names))
        assert not shares, f"{w} waits for what it may have"
    agents: dict[Agent, dict[Key, Waiter]] = {w.owner: {} for w in queue.queued}
    for w in sorted(queue.queued, key=lambda w: w.seq):
        agents[w.owner][w.key] = w
    _same("by agent", queue._of_agents, agents)
    _same("taking old", queue._taking_old, {w.key: w for w in queue.queued if w.takes_old})
    assert not queue._granted, "a grant led to nothing more"
    parked = {(name, w.key) for w in queue if w.parked for name in w.asked}
    _same("parked", {(name, key) for name, some in queue.parked.items() for key in some}, parked)


def _holding(ledger: Ledger) -> None:
    queue = ledger.queue
    holding = [(agent, w) for agent, some in queue.holding.items() for w in some.values()]
    assert all(w.queued and w.owner == agent for agent, w in holding), "who holds and waits"
    assert all(w.queued for w in queue.untold.values()), "a waiter that is gone is untold"


def _notices(ledger: Ledger) -> None:
    notices = ledger.notices
    told = notices.hurried.union(*notices.wanted.values())
    assert told <= ledger.sessions.keys(), "a session that is gone was told of a wait"
    assert ledger.queue.queued or not notices.hurried, "sessions hurry, and no acquire waits"
    holding = {number for number, session in ledger.sessions.items() if session.leases}
    _same("unhurried", notices.unhurried.keys(), holding - notices.hurried)
    for name in notices.wanted.keys() - notices.joined.keys():
        holders = ledger.components[name].holders
        assert holders.keys() <= notices.wanted[name], f"not all that hold {name} were told"


def _sessions(ledger: Ledger) -> None:
    for number, session in ledger.sessions.items():
        told = {name for name, sessions in ledger.notices.wanted.items() if number in sessions}
        _same(f"messages to session {number}", session.told, told)
        components = ledger.components.values()
        room = {c.generation: c for c in components if (c.evicting_for or (None,))[0] == number}
        _same(f"evictions for session {number}", session.makes_way, room)
        turn = ledger.named(session.turn)
        _same("chunks of a turn", session.turn_chunks, sum(c.chunks for c in turn))
        assert all(c.session == number for c in turn), "another session's component is in a turn"


def _expiries(ledger: Ledger) -> None:
    for name in ledger.expiries:
        assert ledger.components[name].expected, f"nobody expects {name}, and yet that ends"


def _predicted(ledger: Ledger) -> None:
    for after, followers in ledger.followers.items():
        assert followers, f"nothing follows {after}, and yet it is kept"
        for name, follower in followers.items():
            _same(f"what follows {after}", (follower.name, follower.after), (name, after))
            there = follower.session == OPERATOR or follower.session in ledger.sessions
            assert there, f"who said it of {after} is gone"
            known = ledger.predicted.get(name)
            assert known is follower or not follower.acted, f"{name} was predicted twice"
    for name, follower in ledger.predicted.items():
        said = ledger.followers.get(follower.after, {}).get(name)
        assert said is follower, f"nobody says that {name} comes"


def _debts(ledger: Ledger) -> None:
    _same("debts", set(ledger.debts), ledger.debt_causes.keys())
    for session, what in ledger.debts:
        known = ledger.sessions.get(session)
        assert known is not None, f"session {session}, which is gone, owes {what}"
        assert not known.fenced, f"session {session}, which is fenced, owes {what}"
    for session, request in ledger.starts:
        known = ledger.sessions.get(session)
        assert known is not None, "a session that is gone starts"
        assert request not in known.leases | known.waiters, "a start is an acquire as well"
    late = set(ledger.start_deadlines)
    assert late <= set(list(ledger.starts)[1:]), "who has the turn, or is not there, waits for it"


_CHECKS = (
    _chunks,
    _alike,
    _beside,
    _components,
    _leaving,
    _staying,
    _names,
    _owners,
    _groups,
    _host_copies,
    _counts,
    _leases,
    _agents,
    _leased,
    _idle,
    _idle_families,
    _waiters,
    _queue,
    _holding,
    _notices,
    _sessions,
    _expiries,
    _predicted,
    _debts,
)
