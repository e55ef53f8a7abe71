"""Who waits, as the daemon is told, where a lease may outlast its release.

The daemon takes it that whoever waits gives nothing back meanwhile; that is how it finds those
who wait for each other. A lease that was released, and only waits for the GPU, is held up by
nobody: it must not count as held by a thread that has gone on to acquire something else. So a
thread is a new agent whenever it holds nothing, and what is still ending belongs to an older one.
"""

import itertools
import threading

from swapd_client.errors import AcquireTimeout


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
    """The agents of one session. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        #: Those that hold a lease, by thread or task.
        self._holding: dict[int, Agent] = {}
        #: By lease, until it has ended.
        self._of: dict[int, Agent] = {}

    def must_wait(self, who: int) -> bool:
        """Whether `enter` would block."""
        with self._changed:
            agent = self._holding.get(who)
            return agent is not None and agent.ending > 0

    def enter(self, who: int, timeout_s: float | None = None) -> Agent:
        """Who `who` is in its next acquire.

        Who holds a lease stays who it was; and as it then would seem to hold what it has
        released as well, this blocks until that has ended. Raises: AcquireTimeout.
        """
        with self._changed:
            agent = self._holding.get(who)
            if agent is None:
                return Agent(who, next(self._numbers))
            if not self._changed.wait_for(lambda: not agent.ending, timeout_s):
                raise AcquireTimeout(
                    "GPU work under a lease that was released does not end; until it has, who "
                    "holds another lease cannot acquire more"
                )
            return agent

    def took(self, agent: Agent, lease: int) -> None:
        """It was granted `lease`."""
        with self._changed:
            agent.held += 1
            self._holding[agent.who] = self._of[lease] = agent

    def released(self, lease: int, *, ended: bool) -> None:
        """The lease was released, and has `ended`, or will. Said of an unknown one is not said."""
        with self._changed:
            agent = self._of.pop(lease, None) if ended else self._of.get(lease)
            if agent is None:
                return
            agent.held -= 1
            agent.ending += not ended
            if ended:
                self._changed.notify_all()
            if not agent.held and self._holding.get(agent.who) is agent:
                del self._holding[agent.who]

    def is_ending(self, lease: int) -> bool:
        """Whether it was granted, and has not ended."""
        return lease in self._of

    def await_end(self, lease: int) -> None:
        """Block until what a released lease waits for on the GPU is done."""
        with self._changed:
            self._changed.wait_for(lambda: lease not in self._of)

    def ended(self, lease: int) -> None:
        """What a released lease waited for on the GPU is done."""
        with self._changed:
            if agent := self._of.pop(lease, None):
                agent.ending -= 1
                self._changed.notify_all()
