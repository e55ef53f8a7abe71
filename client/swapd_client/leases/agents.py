"""Agents: the daemon's view of waiters, for leases that may outlast their release.

Deadlock detection assumes that a waiting agent gives nothing back meanwhile. But a released lease
that only waits for the GPU depends on no thread. It must not count as held by a thread that has
gone on to acquire something else. So a thread becomes a new agent whenever it holds nothing, and
its ending leases belong to an older agent. Pure, and not thread-safe.
"""

import itertools


class Agent:
    """A thread or task, for as long as it holds leases."""

    __slots__ = ("ending", "held", "number", "who")

    def __init__(self, who: int, number: int) -> None:
        self.who = who
        #: The agent's number for the daemon.
        self.number = number
        #: Number of leases not yet released.
        self.held = 0
        #: Number of leases released while it held others, which still wait for the GPU.
        self.ending = 0


class Agents:
    """The agents of one session."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        #: Agents that hold a lease, by thread or task.
        self._holding: dict[int, Agent] = {}

    def __len__(self) -> int:
        """Number of agents that hold a lease."""
        return len(self._holding)

    def of(self, who: int) -> Agent:
        """The agent for the next acquire of `who`: the same one while it holds a lease."""
        return self._holding.get(who) or Agent(who, next(self._numbers))

    def took(self, agent: Agent) -> None:
        """The agent was granted a lease."""
        agent.held += 1
        self._holding[agent.who] = agent

    def released(self, agent: Agent, *, late: bool) -> None:
        """The agent released a lease, which ends now, or later."""
        agent.held -= 1
        agent.ending += late
        if not agent.held and self._holding.get(agent.who) is agent:
            del self._holding[agent.who]

    def ended(self, agent: Agent) -> None:
        """A lease that ended late has ended."""
        agent.ending -= 1
