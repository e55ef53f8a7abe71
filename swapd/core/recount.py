"""Computes every index and sum of the core from scratch. For `check.py`.

The indexes make events cheap however much there is. This module reads everything, and says what the
indexes must be.
"""

from collections import Counter

from swapd.core import policy
from swapd.core.admission import Admission
from swapd.core.chunks import count
from swapd.core.holdings import Beside, Holdings, is_plain
from swapd.core.ledger import Ledger
from swapd.core.records import Agent, Component, State


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
