"""Waiters whose agent holds a lease: they may be in the way of others, or of each other.

Lives here: which of them can never be granted, and which must run before others can. The algorithm
is in `deadlock.py`; `admission.py` and `planner.py` act on the result.
"""

from collections.abc import Iterable
from itertools import takewhile
from operator import attrgetter

from swapd.core import verdict
from swapd.core.deadlock import deadlocked, must_run_first
from swapd.core.holdings import Beside, Holdings, Wish
from swapd.core.ledger import Ledger
from swapd.core.orders import Ranked
from swapd.core.records import Agent, Key, Waiter

_seq = attrgetter("seq")


class HoldAndWait:
    """Queued waiters whose agent held a lease when they were queued."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.waiters: dict[Key, Waiter] = {}
        #: The same by agent; and the agents, those that need most first.
        self.by_agent: dict[Agent, dict[Key, Waiter]] = {}
        self.needs: Ranked[Agent] = Ranked()

    def add(self, w: Waiter) -> None:
        self.waiters[w.key] = w
        self.by_agent.setdefault(w.owner, {})[w.key] = w
        self._ledger.holders.wait(w.owner)
        self._rank(w.owner)

    def drop(self, w: Waiter) -> None:
        """Forget a waiter that is queued no more."""
        if self.waiters.pop(w.key, None) is None:
            return
        del self.by_agent[w.owner][w.key]
        if not self.by_agent[w.owner]:
            del self.by_agent[w.owner]
            self._ledger.holders.wait_no_more(w.owner)
        self._rank(w.owner)

    def _rank(self, agent: Agent) -> None:
        """Sort the agent in by its largest need; a group needs more than chunks, so it ranks
        first."""
        waiters = self.by_agent.get(agent, {}).values()
        if not waiters:
            return self.needs.drop(agent)
        grouped = any(w.grouped for w in waiters)
        need = self._ledger.pool.total + 1 if grouped else sum(w.chunks for w in waiters)
        self.needs.put(agent, (-need, next(iter(waiters)).seq))

    def that_could_take_old(self, stuck: list[Waiter]) -> Waiter | None:
        """The newest waiter that may get old bytes instead, and does not yet."""
        ledger = self._ledger
        could = (
            w
            for w in stuck
            for c in ledger.named(w.names)
            if verdict.must_leave_first(c, w) and w.session in c.holders
        )
        return max(could, key=_seq, default=None)

    def deadlocked(self) -> list[Waiter]:
        agents = self._in_doubt()
        if not agents:
            return []
        stuck = deadlocked(agents, self._pool(Beside(), agents))
        return self._waiters_of(stuck)

    def _in_doubt(self) -> list[Agent]:
        """The agents that hold and wait, except those that can run regardless of the others."""
        ledger, holders = self._ledger, self._ledger.holders
        room = ledger.pool.total - ledger.fixed - holders.waiting.chunks
        large = takewhile(lambda r: -r[0][0] > room, self.needs.ranked())
        agents = dict.fromkeys(agent for _, agent in large)
        for c in ledger.superseded.values():
            agents.update((w.owner, None) for key in c.waiting if (w := self.waiters.get(key)))
        return [agent for agent in agents if agent in holders.by_agent]

    def overtakers(self, head: Waiter) -> list[Waiter]:
        """The waiters that must be admitted before `head`: agents that hold components it needs,
        and wait."""
        if not self.waiters or self._fits_beside_all(head):
            return []
        holders = self._ledger.holders
        agents = list(dict.fromkeys(w.owner for w in self.waiters.values()))
        others = [a for a in agents if a != head.owner and a in holders.by_agent]
        beside = Beside()
        beside.add(head.owner, holders.by_agent.get(head.owner, Holdings()))
        wishes = self._wishes([head])
        fits = lambda pool: pool.fits(wishes)  # noqa: E731
        return self._waiters_of(must_run_first(others, self._pool(beside, others), fits))

    def _fits_beside_all(self, head: Waiter) -> bool:
        """Whether `head` has room even if no other agent that holds and waits ever runs.

        A quick check that may wrongly return False.
        """
        ledger, holders = self._ledger, self._ledger.holders
        if head.grouped or ledger.superseded:
            return False
        own = holders.by_agent.get(head.owner)
        chunks = head.chunks + holders.waiting.chunks
        if own is not None and head.owner not in holders.waiting:
            chunks += own.plain_chunks + sum(c.chunks for c in own.special.values())
        return chunks <= ledger.pool.total - ledger.fixed

    def _waiters_of(self, agents: set[Agent]) -> list[Waiter]:
        """Those of `agents` that hold and wait, by arrival."""
        return sorted((w for a in agents for w in self.by_agent[a].values()), key=_seq)

    def _pool(self, beside: Beside, agents: list[Agent]) -> "_Pool":
        """The holdings of `agents`, on top of `beside`."""
        ledger = self._ledger
        held = {agent: ledger.holders.by_agent[agent] for agent in agents}
        for agent in agents:
            beside.add(agent, held[agent])
        wishes = {agent: self._wishes(self.by_agent[agent].values()) for agent in agents}
        return _Pool(beside, ledger.pool.total - ledger.fixed, held, wishes)

    def _wishes(self, waiters: Iterable[Waiter]) -> list[Wish]:
        """The components that they wait for, and whether each must be loaded anew for them."""
        ledger = self._ledger
        wishes: dict[str, Wish] = {}
        for w in waiters:
            for name in w.names:
                c = ledger.components[name]
                wishes[name] = c, verdict.must_leave_first(c, w)
        return list(wishes.values())


class _Pool:
    """Holdings of agents that wait: see `deadlock.Pool`."""

    def __init__(
        self,
        beside: Beside,
        room: int,
        held: dict[Agent, Holdings],
        wishes: dict[Agent, list[Wish]],
    ) -> None:
        self._beside = beside
        self._room = room
        self._held = held
        self._wishes = wishes

    def copy(self) -> "_Pool":
        return _Pool(self._beside.copy(), self._room, self._held, self._wishes)

    def fits(self, wishes: list[Wish]) -> bool:
        return self._beside.fits(wishes, self._room)

    def can_run(self, agent: Agent) -> bool:
        return self.fits(self._wishes[agent])

    def run(self, agent: Agent) -> None:
        self._beside.remove(agent, self._held[agent])
