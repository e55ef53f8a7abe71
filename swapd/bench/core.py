"""The core alone: the mean time of `Residency.handle` over a mixed trace."""

import random
import time
from collections import deque

import msgspec

from swapd.bench.machine import Loop
from swapd.core import Residency, actions, events
from swapd.core.events import AnyEvent
from swapd.shared import protocol

EVENTS = 20_000
#: Events between runs of the plain loop, which take as long.
BATCH = 200
SEED = 7


class Handle(msgspec.Struct, frozen=True):
    mean_us: float
    #: Mean time of a pass of the plain loop.
    loop_us: float
    components: int
    waiters: int


class MixedTrace:
    """Threads that acquire, hold and release, so that about `waiters` acquires always wait.

    Components differ in size, and the device holds a third of them. Some acquires take two
    components, some have a deadline or a priority, some are cancelled.
    """

    def __init__(self, components: int, waiters: int) -> None:
        self._random = random.Random(SEED)
        sizes = [self._random.randint(1, 8) for _ in range(components)]
        self.core = Residency(max(sum(sizes) // 3, 8 * 2), 1)
        self._names = [f"component-{i}" for i in range(components)]
        self._waiters = waiters
        self._now = 0.0
        self._request = 2
        self._due: deque[AnyEvent] = deque()
        self._waiting: dict[tuple[int, int], None] = {}
        self._held: deque[tuple[int, int]] = deque()
        self.times_s: list[float] = []
        for session, (name, size) in enumerate(zip(self._names, sizes, strict=True)):
            self._feed(events.SessionOpened(0.0, session, f"worker-{session}"))
            self._feed(events.SessionRequest(0.0, session, protocol.Register(1, name, size)))
            self._feed(events.SessionRequest(0.0, session, protocol.Commit(2, name)))

    def run(self, count: int) -> None:
        until = len(self.times_s) + count
        while len(self.times_s) < until:
            self._feed(self._next())

    def fill(self) -> None:
        """Add waiting acquires up to `waiters`, untimed."""
        while len(self._waiting) < self._waiters:
            self._feed(self._acquire())
        self.times_s.clear()

    def _next(self) -> AnyEvent:
        if self._due:
            return self._due.popleft()
        if len(self._waiting) < self._waiters:
            return self._acquire()
        if self._held and self._random.random() < 0.9:
            session, lease = self._held.popleft()
            return events.SessionRequest(self._tick(), session, protocol.Release(lease, lease))
        if self._random.random() < 0.3:
            session, request = next(iter(self._waiting))
            del self._waiting[session, request]
            return events.SessionRequest(self._tick(), session, protocol.Cancel(request, request))
        return events.Tick(self._tick())

    def _acquire(self) -> AnyEvent:
        rnd = self._random
        self._request += 1
        session = rnd.randrange(len(self._names))
        names = rnd.sample(self._names, 2 if rnd.random() < 0.2 else 1)
        self._waiting[session, self._request] = None
        timeout_s = rnd.uniform(10, 1000) if rnd.random() < 0.3 else None
        request, priority = self._request, rnd.choice((0, 0, 0, 1))
        asked = protocol.Acquire(request, tuple(names), request, timeout_s, priority)
        return events.SessionRequest(self._tick(), session, asked)

    def _tick(self) -> float:
        self._now += 0.001
        return self._now

    def _feed(self, event: AnyEvent) -> None:
        started = time.thread_time()  # CPU time: excludes waits on a busy machine
        done = self.core.handle(event)
        self.times_s.append(time.thread_time() - started)
        for action in done:
            match action:
                case actions.MakeHostCopy():
                    self._feed(events.HostCopyMade(self._now, action.uid))
                case actions.SealHostCopy():
                    self._feed(events.HostCopySealed(self._now, action.uid))
                case actions.CopyIn():
                    self._due.append(events.CopiedIn(self._now + 0.001, action.generation))
                case actions.Grant():
                    self._waiting.pop((action.session, action.request), None)
                    self._held.append((action.session, action.request))
                case actions.Refuse():
                    self._waiting.pop((action.session, action.request), None)


def measure(components: int, waiters: int, count: int = EVENTS) -> Handle:
    trace, loop = MixedTrace(components, waiters), Loop()
    trace.fill()
    paces = []
    while (done := len(trace.times_s)) < count:
        trace.run(BATCH)
        paces.append(loop.run(sum(trace.times_s[done:])))
    times, passes = trace.times_s, sum(pace.passes for pace in paces)
    return Handle(
        mean_us=sum(times) / len(times) * 1e6,
        loop_us=sum(pace.seconds for pace in paces) / passes * 1e6,
        components=components,
        waiters=waiters,
    )
