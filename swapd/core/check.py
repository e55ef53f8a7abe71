"""The self-check: does the state of a core contradict itself? For tests, and after a fault."""

from collections import Counter
from itertools import combinations
from math import inf

from swapd.core import policy
from swapd.core.admission import Admission
from swapd.core.chunks import count
from swapd.core.counts import HITS_MAX, OTHERS
from swapd.core.holdings import Beside, Holdings, is_plain
from swapd.core.ledger import Ledger
from swapd.core.records import Agent, Component, Key, Lease
from swapd.core.residency import Residency
from swapd.core.states import State


def check(core: Residency) -> None:
    """Raise AssertionError if the state contradicts itself."""
    _check_chunks(core.ledger)
    for c in core.ledger.components.values():
        _check_component(core, c)
    for key, lease in core.ledger.leases.items():
        _check_lease(core.ledger, key, lease)
    _check_debts(core.ledger)
    _check_starts(core.ledger)
    _check_masters(core.ledger)
    _check_totals(core.ledger)
    _check_waiters(core)
    _check_told(core)
    _check_groups(core.ledger)
    _check_families(core.ledger)
    _check_counts(core.ledger)
    recount(core.ledger, core.admission)


def _check_chunks(ledger: Ledger) -> None:
    on_device = (c for c in ledger.components.values() if c.on_device)
    occupied = [c.runs for c in on_device if c.generation not in ledger.moves]
    occupied += [move.runs for move in ledger.moves.values()]
    occupied += [runs for held in ledger.quarantined.values() for runs in held]
    numbers = [i for runs in occupied for first, n in runs for i in range(first, first + n)]
    numbers += [i for first, n in ledger.pool.runs() for i in range(first, first + n)]
    assert sorted(numbers) == list(range(ledger.pool.total)), "a chunk is lost or held twice"
    assert ledger.pool.free == count(ledger.pool.runs())


def _check_component(core: Residency, c: Component) -> None:
    ledger, queue = core.ledger, core.admission.queue
    assert c.session in ledger.sessions, f"{c} outlived its session"
    assert not c.leases or c.state in (State.RESIDENT, State.LOADING), f"{c} is leased and not in"
    if c.state is State.LOADING:
        assert all(s == c.session for s, _ in c.leases), f"{c} is lent to others before it is in"
    assert all(key in ledger.leases for key in c.leases), f"{c} is held by no lease"
    assert all(key in queue for key in c.promised | c.waiting), f"{c}: no waiter"
    assert not c.on_device or count(c.runs) == c.chunks, f"{c} is on the wrong chunks"
    idle = c.state is State.RESIDENT and not c.leases and not c.promised
    assert (c.name in ledger.idle) == (idle and c.policy != "permanent"), f"{c}: idle is wrong"
    moving = c.state in (State.LOADING, State.WRITING_BACK, State.RECLAIMING)
    assert (c.generation in ledger.moves) == moving, f"{c}: copy and state differ"
    if c.state is State.LOADING:
        assert c.runs == ledger.moves[c.generation].runs, f"{c}: chunks and copy differ"
    assert not c.scratch or c.mutable, f"{c} has no writer"
    assert c.scratch or (c.kept is None and c.to_save is None), f"{c} is saved in part"
    assert c.scratch != "dropped" or c.kept == c.to_save == (), f"{c} is saved"
    if c.workspace:
        assert not c.mapped, f"{c}: a workspace has no place"
        assert c.leases or c.promised or c.waiting or c.evicting, f"{c} has no owner"


def _check_lease(ledger: Ledger, key: Key, lease: Lease) -> None:
    assert key[0] in ledger.sessions, f"{lease} outlived its session"
    for name in lease.names:
        c = ledger.components.get(name)
        assert c is None or key in c.leases, f"{lease} does not hold {name}"


def _check_starts(ledger: Ledger) -> None:
    for session, request in ledger.starts:
        known = ledger.sessions.get(session)
        assert known is not None, "a session that is gone starts"
        assert request not in known.leases | known.waiters, "a start is an acquire as well"
    late = ledger.starts.late(inf)
    assert ledger.starts.turn not in late, "the session with the turn still waits for it"
    assert set(late) <= set(ledger.starts), "a start that is not there has a deadline"


def _check_debts(ledger: Ledger) -> None:
    for session, what in ledger.debts:
        known = ledger.sessions.get(session)
        assert known is not None, f"session {session}, which is gone, owes {what}"
        assert not known.fenced, f"session {session}, which is fenced, owes {what}"


def _check_masters(ledger: Ledger) -> None:
    """Each belongs to a component, to an update, to a copy in flight, or is being made."""
    read = {m.uid for m in ledger.moves.values()}
    needed = set(ledger.making)
    for c in (c for c in ledger.components.values() if not c.workspace):
        needed |= {c.uid} | ({c.renewal.uid} if c.renewal else set())
        assert not c.mutable or not c.renewal, f"{c} is written, not updated"
        assert c.superseded == (c.name in ledger.superseded), f"{c}: superseded is wrong"
        if c.superseded:
            assert c.state in (State.LOADING, State.RESIDENT), f"{c} is superseded"
            idle = c.state is State.RESIDENT and not c.leases and not c.promised
            assert not idle, f"{c} was updated, and stays without a holder"
    assert needed <= ledger.masters.keys() <= needed | read, "host copies are wrong"
    for uid in ledger.unordered:
        assert uid in ledger.contents, f"host copy {uid} is never ordered"
        assert uid not in ledger.making


def _check_totals(ledger: Ledger) -> None:
    components = ledger.components.values()
    on_their_way = [m.component for m in ledger.moves.values() if m.component.workspace]
    evicting = {id(c): c for c in (*components, *on_their_way) if c.evicting}.values()
    moves = ledger.moves
    held = (moves[c.generation].runs if c.generation in moves else c.runs for c in evicting)
    assert ledger.dying <= ledger.quarantined.keys(), "dying is wrong"
    dying = sum(count(runs) for s in ledger.dying for runs in ledger.quarantined[s])
    assert ledger.leaving == dying + sum(map(count, held)), "leaving is wrong"
    leased = {c.name for c in components if c.leases}
    assert set(ledger.holders.leased) == leased, "leased is wrong"
    known = {(s, n) for s, session in ledger.sessions.items() for n in session.leases}
    assert set(ledger.leases) == known


def _check_waiters(core: Residency) -> None:
    ledger, admission = core.ledger, core.admission
    for w in admission.queue:
        assert w.session in ledger.sessions, f"{w} outlived its session"
        ways = [w.queued, w.admitted, w.key in admission.parked.waiters]
        assert ways.count(True) == 1, f"{w} must be queued, admitted or parked"
        for c in (ledger.components[n] for n in w.names if not ways[2]):
            assert w.key in (c.promised if w.admitted else c.waiting), f"{c} forgot {w}"


def _check_told(core: Residency) -> None:
    ledger = core.ledger
    told = ledger.hurried.union(*ledger.wanted.values())
    assert told <= ledger.sessions.keys(), "a session that is gone was told of a wait"
    assert core.admission.queue.queued or not ledger.hurried, "sessions hurry, and no acquire waits"


def _check_groups(ledger: Ledger) -> None:
    members = [c for c in ledger.components.values() if c.group is not None and c.on_device]
    for a, b in combinations(members, 2):
        assert not a.excludes(b), f"{a} and {b} exclude each other"


def _check_families(ledger: Ledger) -> None:
    parts = {c.name: c for family in ledger.families.values() for c in family.values()}
    assert parts == {c.name: c for c in ledger.components.values() if c.part_of}
    assert not ledger.families.keys() & ledger.components.keys(), "a name has two meanings"
    assert ledger.automatic.keys() <= ledger.families.keys(), "a family that is gone keeps room"
    for name, family in ledger.families.items():
        assert {c.part_of for c in family.values()} == {name}, f"{family} are not of {name}"
        assert len({c.session for c in family.values()}) == 1, f"{name} has several owners"
    for c in ledger.components.values():
        streamed = c.part_of and c.policy == "sequential"
        assert c.policy == c.own_policy or c.workspace or streamed, f"{c}: policy is wrong"


def _check_counts(ledger: Ledger) -> None:
    """The counts by name and the totals agree, and every name with counts is registered."""
    tallies, tallied = ledger.counts.of, ledger.counts.of.values()
    assert sum(tally.loads for tally in tallied) == ledger.loads
    assert sum(tally.evictions for tally in tallied) == ledger.evictions
    hits = sum(tally.hits for tally in tallied)
    assert min(hits, HITS_MAX) == min(ledger.hits, HITS_MAX)
    names = {c.part_of or c.name for c in ledger.components.values() if not c.workspace}
    assert tallies.keys() - {OTHERS} <= names, "counts of a component that is gone"
    for c in ledger.components.values():
        own = tallies.get(OTHERS if c.workspace else c.part_of or c.name, tallies[OTHERS])
        assert c.tally in (own, tallies[OTHERS]), f"{c} is counted elsewhere"


def recount(ledger: Ledger, admission: Admission) -> None:
    """Raise AssertionError if an index or sum differs from one made now."""
    _recount_order(ledger)
    _recount_sums(ledger)
    _recount_turns(ledger)
    _recount_groups(ledger)
    _recount_copies(ledger)
    _recount_holders(ledger)
    _recount_agents(ledger)
    _recount_told(ledger)
    _recount_waiting(ledger, admission)
    by_length = sorted(((n, -first) for first, n in ledger.pool.runs()))
    assert ledger.pool.by_length() == tuple((n, -minus) for n, minus in by_length)


def _recount_order(ledger: Ledger) -> None:
    idle = ledger.idle.as_they_came()
    in_use = {c.part_of for c in ledger.holders.leased.values() if c.part_of}
    assert ledger.idle.in_use() == in_use, "which families are in use is wrong"
    in_vain = [c.name for c in reversed(idle) if c.policy == "sequential"]
    others = [c for c in idle if c.policy != "sequential"]
    for_nothing = [c for c in others if c.leaves_for_nothing and not c.part_of]
    used = [(c.name, c.part_of) for c in others if c not in for_nothing]
    turns = in_vain + [c.name for c in for_nothing] + policy.eviction_order(used, in_use)
    assert [c.name for c in ledger.idle] == turns, "the order of eviction is wrong"
    assert ledger.idle.chunks == sum(c.chunks for c in idle), "idle chunks are wrong"


def _recount_sums(ledger: Ledger) -> None:
    components = ledger.components.values()
    names = [*ledger.families, *(c.name for c in components if not c.workspace)]
    assert ledger.names == sorted(names), "names are wrong"
    staying = [c for c in components if c.policy == "permanent"]
    fixed = [c for c in staying if c.on_device and not c.unregistering]
    for c in components:
        assert c.fixed == (c.chunks if c in fixed else 0), f"{c}: fixed is wrong"
    pinned = {c.name: c for c in components if c.pinned}
    assert ledger.pinned == pinned, "pinned is wrong"
    quarantined, dying = ledger.quarantined, ledger.dying
    lost = sum(count(runs) for s, held in quarantined.items() if s not in dying for runs in held)
    assert ledger.staying == sum(c.chunks for c in staying), "staying is wrong"
    assert ledger.fixed == lost + sum(c.chunks for c in fixed), "fixed is wrong"


def _recount_turns(ledger: Ledger) -> None:
    for number, session in ledger.sessions.items():
        turn = ledger.named(session.turn)
        assert session.turn_chunks == sum(c.chunks for c in turn), "chunks of a turn are wrong"
        assert all(c.session == number for c in turn), "another session's component is in a turn"


def _recount_groups(ledger: Ledger) -> None:
    groups: dict[str, dict[str, Component]] = {}
    for c in ledger.components.values():
        if c.group is not None and c.on_device:
            groups.setdefault(c.group, {})[c.name] = c
    assert ledger.groups_in == groups, "which of a group are in is wrong"


def _recount_copies(ledger: Ledger) -> None:
    back = [m.component for m in ledger.moves.values() if m.component.state is State.RECLAIMING]
    assert ledger.reclaiming == sum(c.chunks for c in back), "reclaiming is wrong"
    for number, session in ledger.sessions.items():
        room = {c.generation: c for c in ledger.components.values() if _for(c) == number}
        assert session.makes_way == room, f"evictions for session {number} are wrong"


def _for(c: Component) -> int | None:
    return c.evicting_for[0] if c.evicting_for else None


def _recount_holders(ledger: Ledger) -> None:
    for c in ledger.components.values():
        owners = Counter(ledger.leases[key].owner for key in c.leases)
        assert c.agents == owners, f"{c}: its agents are wrong"
        assert c.holders == Counter(s for s, _ in c.leases), f"{c}: its holders are wrong"
    leased = ledger.holders.leased.values()
    may_go = [c for c in leased if c.policy != "permanent"]
    may_go.sort(key=lambda c: (c.state is State.LOADING, c.resident_since))
    assert list(ledger.holders.to_give_way()) == may_go, "the order of giving way is wrong"


def _recount_agents(ledger: Ledger) -> None:
    holdings: dict[Agent, Holdings] = {}
    for key, lease in ledger.leases.items():
        held = holdings.setdefault(lease.owner, Holdings())
        held.leases[key] = lease
        for name in lease.names:
            held.special[name] = ledger.components[name]
    assert ledger.holders.by_agent.keys() == holdings.keys(), "agents with leases are wrong"
    for agent, held in holdings.items():
        kept = ledger.holders.by_agent[agent]
        plain = [c for c in held.special.values() if is_plain(c)]
        special = {c.name: c for c in held.special.values() if not is_plain(c)}
        assert kept.leases == held.leases, f"{agent}: leases are wrong"
        assert kept.special == special, f"{agent}: special is wrong"
        assert kept.plain_chunks == sum(c.chunks for c in plain), f"{agent}: chunks are wrong"


def _recount_told(ledger: Ledger) -> None:
    for number, session in ledger.sessions.items():
        told = {name for name, sessions in ledger.wanted.items() if number in sessions}
        assert session.told == told, f"messages to session {number} are wrong"
    holding = {number for number, session in ledger.sessions.items() if session.leases}
    assert ledger.unhurried.keys() == holding - ledger.hurried, "unhurried is wrong"
    for name in ledger.wanted.keys() - ledger.joined.keys():
        holders = ledger.components[name].holders
        assert holders.keys() <= ledger.wanted[name], f"not all that hold {name} were told"


def _recount_waiting(ledger: Ledger, admission: Admission) -> None:
    queued = {w.key: w for w in admission.queue.queued}
    for w in queued.values():
        asked = [ledger.components[name] for name in w.names]
        assert w.chunks == sum(c.chunks for c in asked), f"{w}: its chunks are wrong"
        assert w.grouped == any(c.group is not None for c in asked), f"{w}: its groups are wrong"
    largest = sorted(queued.values(), key=lambda w: (-w.chunks, w.seq))
    assert list(admission.largest) == [w.key for w in largest], "largest is wrong"
    for c in ledger.components.values():
        waiting = {key for key, w in queued.items() if c.name in w.names}
        assert c.waiting.keys() == waiting, f"{c}: waiting is wrong"
    parked: dict[str, set[tuple[int, int]]] = {}
    for key, w in admission.parked.waiters.items():
        for name in w.asked:
            parked.setdefault(name, set()).add(key)
    assert {n: set(found) for n, found in admission.parked.by_name.items()} == parked
    _recount_those_that_hold(ledger, admission)


def _recount_those_that_hold(ledger: Ledger, admission: Admission) -> None:
    agents: dict[Agent, set[tuple[int, int]]] = {}
    for key, w in admission.entangled.waiters.items():
        assert w.queued, f"{w} is not queued"
        agents.setdefault(w.owner, set()).add(key)
    assert {a: set(found) for a, found in admission.entangled.by_agent.items()} == agents
    assert set(admission.entangled.needs) == agents.keys(), "whose needs are known is wrong"
    beside = Beside()
    for agent in agents:
        beside.add(agent, ledger.holders.by_agent.get(agent, Holdings()))
        assert agent in ledger.holders.waiting, f"{agent} holds and waits"
    assert ledger.holders.waiting.content() == beside.content(), "waiting holdings are wrong"
