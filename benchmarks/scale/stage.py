"""A core with any number of components and waiters, and every event that can happen to it.

`Stage.play` makes each event of the core happen at least once, and leaves the stage about
unchanged. A meter is called for each: it calls `handle` and keeps its cost.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from swapd.core import Residency, Rules, actions, events
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.core.records import Key
from swapd.shared import protocol

#: meter(kind, act) calls `act`, and returns its result.
Meter = Callable[[str, Callable[[], Any]], Any]

#: Parts of each family, and members of each group.
FAMILY = GROUP = 5
AGENTS_MAX = 30
#: Name of the figure for one step of a large session's end.
A_STEP = "SessionEnds, a step"


class Stage:
    """`components` components, a fifth of them held by agents, and `waiters` waiters.

    Half are parts of families and a tenth are members of groups; the device has room for 6 in 10.
    Some agents hold and wait; the other waiters hold nothing. Without waiters some idle components
    can be evicted; with them one more session holds all that the agents do not.
    """

    def __init__(
        self, components: int, waiters: int, meter: Meter, *, strict: bool = False
    ) -> None:
        self._meter = meter
        self._waiters = waiters
        self._now = 0.0
        self._request = 0
        self._session = 0
        self._due: deque[AnyEvent] = deque()
        self._actions: list[AnyAction] = []
        self.leases: deque[Key] = deque()
        self.waiting: dict[Key, None] = {}
        self._turn = 0
        rules = Rules(strict=strict, residency_factor=0.0)
        self.core = Residency(components * 6 // 10, 1, rules)
        self._build(components)
        self._crowd()

    # --- the state -----------------------------------------------------------------------

    def _build(self, count: int) -> None:
        owners = [self._open() for _ in range(max(1, count // 100))]
        self._plain = [f"plain-{i}" for i in range(count * 4 // 10)]
        self._parts = [f"family-{i // FAMILY}/{i % FAMILY}" for i in range(count * 5 // 10)]
        self._members = [f"member-{i}" for i in range(count // 10)]
        for i, name in enumerate(self._plain):
            self._register(owners[i % len(owners)], name)
        for i, name in enumerate(self._parts):
            owner = owners[i // FAMILY % len(owners)]
            self._register(owner, name, part_of=name.partition("/")[0])
        for i, name in enumerate(self._members):
            group = f"group-{i // GROUP}"
            self._register(owners[i % len(owners)], name, policy="alternating", group=group)
        self._register(owners[0], "mutable", mutable=True)
        for name in ("this", "that"):
            self._register(owners[0], name, 0, "alternating", "this or that")
        self._owners = owners
        self._hold(self._plain[: count // 5])
        self._acquire((self._open(), 0), "this")
        if self._waiters:
            self._fill()

    def _hold(self, names: list[str]) -> None:
        """Agents hold these, which are then on the device."""
        agents = min(AGENTS_MAX, len(names))
        self._agents = [(self._open(), 0) for _ in range(agents)]
        for i, name in enumerate(names):
            self._acquire(self._agents[i % agents], name)
        self._held, self._absent = names, self._plain[len(names) :]
        self._somebody = self._open()

    def _fill(self) -> None:
        """One more session holds all free memory, so that nothing is idle."""
        somebody = self._somebody
        for i, name in enumerate(self._parts[: self.core.ledger.pool.free]):
            self._acquire((somebody, i), name)

    def _crowd(self) -> None:
        """Add waiters up to the wanted number: some agents, and others that hold nothing."""
        self._watchers = [self._open() for _ in range(min(100, self._waiters))]
        while len(self.waiting) < self._waiters:
            i = len(self.waiting)
            name = self._absent[i % len(self._absent)]
            waits = self._agents[i] if i < len(self._agents) // 2 else None
            self._acquire(waits or (self._watchers[i % len(self._watchers)], i), name)

    # --- what happens --------------------------------------------------------------------

    def play(self) -> None:
        """Let every event happen once."""
        self._turn += 1
        for act in (
            self._hit,
            self._miss,
            self._wait,
            self._give_way,
            self._try,
            self._misspell,
            self._while_holding,
            self._family,
            self._workspace,
            self._come_and_go,
            self._renew,
            self._prefetch,
            self._resize,
            self._save,
            self._park,
            self._session_of_one,
            self._owe,
            self._fail,
        ):
            act()
        self._do("Tick", events.Tick(self._next()))

    def _some(self, names: list[str]) -> str:
        return names[self._turn * 7 % len(names)]

    def _hit(self) -> None:
        key = self._acquire((self._owners[0], 1), self._some(self._held), "Acquire, hit")
        self._end(key, "Release, others hold it")
        key = self._acquire(self._agents[0], self._some(self._held), "Acquire, hit while holding")
        self._end(key, "Release, others hold it")

    def _miss(self) -> None:
        key = self._acquire((self._owners[0], 1), self._some(self._absent), "Acquire, miss")
        self._end(key)

    def _wait(self) -> None:
        """Wait for a component that excludes a held one."""
        self._end(self._acquire((self._owners[0], 1), "that", "Acquire, has to wait"))

    def _give_way(self) -> None:
        """The extra session releases, and the next waiter is granted; then another one waits."""
        if not self._waiters:
            return
        others = {self._somebody, *self._watchers}
        key = next(key for key in self.leases if key[0] in others)
        self._release(key, "Release, somebody waits")
        watcher = self._watchers[self._turn % len(self._watchers)]
        name = self._parts[self._turn % (len(self._parts) // 2)]
        self._acquire((watcher, self._turn + self._waiters), name)

    def _end(self, key: Key, kind: str = "Release") -> None:
        if key in self.waiting:
            del self.waiting[key]
            self._ask("Cancel", key[0], protocol.Cancel(self._id(), key[1]))
        elif key in self.leases:
            self._release(key, kind)

    def _try(self) -> None:
        name = self._some(self._members)
        self._acquire((self._owners[0], 1), name, "Acquire, timeout=0", timeout_s=0.0)

    def _misspell(self) -> None:
        self._acquire((self._owners[0], 1), "plan-77", "Acquire, misspelt")

    def _while_holding(self) -> None:
        agent = self._agents[-1 - self._turn % ((len(self._agents) + 1) // 2)]
        self._end(self._acquire(agent, self._some(self._absent), "Acquire while holding"))
        self._end(self._acquire(agent, self._some(self._members), "Acquire while holding"))

    def _family(self) -> None:
        name = self._some(self._parts).partition("/")[0]
        self._end(self._acquire((self._owners[0], 1), name, f"Acquire, family of {FAMILY}"))

    def _workspace(self) -> None:
        key = self._key(self._owners[0])
        self.waiting[key] = None
        self._ask("AcquireWorkspace", key[0], protocol.AcquireWorkspace(key[1], 1, 1))
        self._end(key)

    def _come_and_go(self) -> None:
        owner = self._owners[-1]
        kinds = (("lru", None, ""), ("alternating", "a group", ""), ("lru", None, "a family"))
        for policy, group, part_of in kinds:
            self._register(owner, "new", 1, policy, group, part_of=part_of, metered=True)
            self._ask("Unregister", owner, protocol.Unregister(self._id(), "new"))
        self._register(owner, "nothing", 0, "permanent", metered=True)
        self._ask("Unregister", owner, protocol.Unregister(self._id(), "nothing"))

    def _renew(self) -> None:
        name = self._some(self._members)
        owner = self.core.ledger.components[name].session
        for _ in range(2):
            update = self._id()
            self._ask("Update", owner, protocol.Update(update, name))
            self._ask("GiveUp", owner, protocol.GiveUp(self._id(), name, update))
        self._ask("Update", owner, protocol.Update(self._id(), name))
        self._ask("Commit", owner, protocol.Commit(self._id(), name))

    def _prefetch(self) -> None:
        self.prefetch((self._some(self._absent),), None, "Prefetch")

    def _resize(self) -> None:
        name = self._some(self._parts).partition("/")[0]
        for size in (3, FAMILY):
            asked = protocol.Resize(self._id(), name, size)
            self._ask(f"Resize, {FAMILY} parts", self._owners[0], asked)

    def _save(self) -> None:
        """A mutable component is held by its owner, and evicted for another one."""
        if self._waiters:
            return
        owner = self._owners[0]
        self._end(self._acquire((owner, 1), "mutable"))
        self._ask("Unregister", owner, protocol.Unregister(self._id(), "mutable"))
        self._register(owner, "mutable", mutable=True)

    def _park(self) -> None:
        agent = self._owners[0], 1
        key = self._acquire(agent, "to come", "Acquire, parked", await_registration=True)
        self._register(self._owners[-1], "to come", metered=True)
        self._end(key)
        self._ask("Unregister", self._owners[-1], protocol.Unregister(self._id(), "to come"))

    def _session_of_one(self) -> None:
        session = self._open(metered=True)
        self._register(session, "its own")
        self._acquire((session, 0), self._some(self._held))
        self._acquire((session, 0), "its own")
        self.leases = deque(key for key in self.leases if key[0] != session)
        self.waiting = {key: None for key in self.waiting if key[0] != session}
        self._do("SessionGone, of one", events.SessionGone(self._next(), session))
        self._do("ProcessExited", events.ProcessExited(self._next(), session))

    def _owe(self) -> None:
        """A session does not read for a while, and must unmap memory that others need."""
        session = self._owners[0]
        for count in (3, 0):
            self._do("Unread", events.Unread(self._next(), session, "lifeline", count))
        self._do("Dropping", events.Dropping(self._next(), 1, (session,)))
        self._do("Dropped", events.DropAck(self._next(), session, 1))

    def _fail(self) -> None:
        """A copy fails."""
        if self._waiters:
            return
        key = self._acquire((self._owners[0], 1), self._some(self._absent), fail=True)
        self._end(key)

    def long_end(self, count: int, step: int) -> None:
        """End a session that owns `count` components, some of which others wait for."""
        session = self._open()
        for i in range(count):
            self._register(session, f"long {i}")
        for i in range(0, count, 10):
            self._acquire((session, 0), f"long {i}")
            self._acquire((self._owners[0], 7), f"long {i}")
        self.leases = deque(key for key in self.leases if key[0] != session)
        self.waiting = {key: None for key in self.waiting if key[0] != session}
        self.core.handle(events.Tick(self._next()))
        while self.core.has_more(session, step):
            event = events.SessionEnds(self._next(), session, step)
            self._do(A_STEP, event)
        self._do(A_STEP, events.SessionGone(self._next(), session))

    def prefetch(self, names: tuple[str, ...], over: tuple[str, ...] | None, kind: str) -> None:
        asked = protocol.Prefetch(self._id(), names, over=over)
        self._ask(kind, self._owners[0], asked)

    # --- sending -------------------------------------------------------------------------

    def _next(self) -> float:
        self._now += 0.001
        return self._now

    def _id(self) -> int:
        self._request += 1
        return self._request

    def _key(self, session: int) -> Key:
        return session, self._id()

    def _open(self, *, metered: bool = False) -> int:
        self._session += 1
        event = events.SessionOpened(self._next(), self._session, f"worker-{self._session}")
        self._do("SessionOpened" if metered else "", event)
        return self._session

    def _register(
        self,
        session: int,
        name: str,
        nbytes: int = 1,
        policy: Any = "lru",
        group: str | None = None,
        *,
        mutable: bool = False,
        part_of: str = "",
        metered: bool = False,
    ) -> None:
        kind = policy if not part_of else "part of a family"
        asked = protocol.Register(
            self._id(),
            name,
            nbytes,
            policy=policy,
            group=group,
            mutable=mutable,
            part_of=part_of,
        )
        self._ask(f"Register, {kind}" if metered else "", session, asked)
        self._ask("Commit" if metered else "", session, protocol.Commit(self._id(), name))

    def _acquire(
        self,
        agent: tuple[int, int],
        name: str,
        kind: str = "",
        *,
        timeout_s: float | None = None,
        await_registration: bool = False,
        fail: bool = False,
    ) -> Key:
        key = self._key(agent[0])
        self.waiting[key] = None
        asked = protocol.Acquire(
            key[1], (name,), agent[1], timeout_s, await_registration=await_registration
        )
        self._ask(kind, key[0], asked, fail=fail)
        return key

    def _release(self, key: Key, kind: str) -> None:
        self.leases.remove(key)
        self._ask(kind, key[0], protocol.Release(self._id(), key[1]))

    def _ask(
        self, kind: str, session: int, asked: protocol.AnyOrder, *, fail: bool = False
    ) -> None:
        self._do(kind, events.SessionRequest(self._next(), session, asked), fail=fail)

    def _do(self, kind: str, event: AnyEvent, *, fail: bool = False) -> None:
        """Handle an event, and all events that follow from it."""
        self._handle(kind, event, fail=fail)
        while self._due:
            following = self._due.popleft()
            self._handle(type(following).__name__ if kind or fail else "", following, fail=False)

    def _handle(self, kind: str, event: AnyEvent, *, fail: bool) -> None:
        if kind:
            done = self._meter(kind, lambda: self.core.handle(event))
        else:
            done = self.core.handle(event)
        for action in done:
            self._note(action, fail=fail)

    def _note(self, action: AnyAction, *, fail: bool) -> None:
        match action:
            case actions.MakeHostCopy():
                self._due.append(events.HostCopyMade(self._next(), action.uid))
            case actions.SealHostCopy():
                self._due.append(events.HostCopySealed(self._next(), action.uid))
            case actions.CopyIn() if fail:
                failed = events.CopyFailed(self._next(), action.generation, "injected")
                self._due.append(failed)
            case actions.CopyIn():
                self._due.append(events.CopiedIn(self._next(), action.generation))
            case actions.CopyOut():
                self._due.append(events.CopiedOut(self._next(), action.generation))
            case actions.Lend():
                self._due.append(events.Lent(self._next(), action.generation))
            case actions.Reclaim():
                self._due.append(events.Reclaimed(self._next(), action.generation))
            case actions.SendRevoke(ack=True):
                revoked = events.RevokeAck(
                    self._next(), action.session, action.name, action.generation
                )
                self._due.append(revoked)
            case actions.Grant():
                self.waiting.pop((action.session, action.request), None)
                self.leases.append((action.session, action.request))
            case actions.Refuse():
                self.waiting.pop((action.session, action.request), None)
