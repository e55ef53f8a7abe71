"""Who waits, as the daemon is told, where a lease may outlast its release.

The daemon takes it that whoever waits gives nothing back meanwhile; that is how it finds those
who wait for each other. A lease that was released, and only waits for the GPU, is held up by
nobody: it must not count as held by a thread that has gone on to acquire something else. So a
thread is a new agent whenever it holds nothing, and what is still ending belongs to an older one.
Pure, and not thread-safe.
"""

import itertools


class Agent:
    """A thread or task, `who`, for as long as it holds leases."""

    __slots__ = ("ending", "held", "number", "who")

    def __init__(self, who: int, number: int) -> None:
        self.who = who
        #: What the daemon is told.
        self.number = number
        #: Its leases that it has not released.
        self.held = 0
        #: Those that it has, while it held others, and that wait for the GPU.
        self.ending = 0


class Agents:
    """The agents of one session."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        #: Those that hold a lease, by thread or task.
        self._holding: dict[int, Agent] = {}

    def __len__(self) -> int:
        """How many hold something."""
        return len(self._holding)

    def of(self, who: int) -> Agent:
        """Who `who` is in its next acquire: as long as it holds a lease, who it was."""
        return self._holding.get(who) or Agent(who, next(self._numbers))

    def took(self, agent: Agent) -> None:
        """It was granted a lease."""
        agent.held += 1
        self._holding[agent.who] = agent

    def released(self, agent: Agent, *, late: bool) -> None:
        """It has released one, which ends now, or later."""
        agent.held -= 1
        agent.ending += late
        if not agent.held and self._holding.get(agent.who) is agent:
            del self._holding[agent.who]

    def ended(self, agent: Agent) -> None:
        """What ended late has ended."""
        agent.ending -= 1
