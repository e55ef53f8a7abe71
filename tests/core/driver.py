"""All possible events of a `World`, as moves to choose from; and its required end.

`test_machine.py` lets Hypothesis choose, `drive` a seeded random generator.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from hypothesis import settings

from swapd.core import Residency
from swapd.core.actions import Lend
from swapd.core.records import Key, workspace_name
from swapd.shared.protocol import Policy, Ranges, Scratch, UsedRanges
from tests.core.world import Channel, World

T = TypeVar("T")

#: A hundred in every run, and twenty times as many with `make deep`.
EXAMPLES = settings().max_examples

#: Names, with size, policy, group and family; a few are sometimes registered as mutable.
KINDS: dict[str, tuple[int, Policy, str | None, str]] = {
    "a": (2, "lru", None, ""),
    "b": (3, "lru", None, ""),
    "c": (5, "lru", None, ""),
    "d": (8, "lru", None, ""),
    "r": (2, "permanent", None, ""),
    "s": (3, "sequential", None, ""),
    "t": (4, "sequential", None, ""),
    "x": (2, "alternating", "g", ""),
    "y": (6, "alternating", "g", ""),
    "z": (3, "alternating", "h", ""),
    "nil": (0, "lru", None, ""),
    "e/1": (2, "alternating", "g", "e"),
    "e/2": (3, "alternating", "g", "e"),
    "f/1": (2, "lru", None, "f"),
    "f/2": (3, "lru", None, "f"),
}


SCRATCH: tuple[Scratch, ...] = ("dropped", "saved")

#: Ranges worth saving: none, some, all of most components, and more than most have.
RANGES: tuple[Ranges, ...] = ((), ((0, 1),), ((1, 1),), ((0, 2),), ((0, 1), (2, 3)), ((1, 7),))

CHANNELS: tuple[Channel, ...] = ("lifeline", "replies")


class Choices(ABC):
    """Makes choices among options; a subclass decides how."""

    @abstractmethod
    def pick(self, options: Sequence[T]) -> T:
        """One of `options`."""

    def chance(self, one_in: int) -> bool:
        return self.pick(range(one_in)) == 0


class RandomChoices(Choices):
    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def pick(self, options: Sequence[T]) -> T:
        return self._random.choice(options)


# Each move does one thing if it is possible, and returns whether it did.


def open_session(w: World, choose: Choices) -> bool:
    if len(w.sessions) >= 4:
        return False
    w.open()
    return True


def leave(w: World, choose: Choices) -> bool:
    if len(w.sessions) < 2:
        return False
    w.leave(choose.pick(sorted(w.sessions)), alive=choose.chance(2), ending=choose.chance(2))
    return True


def exit_process(w: World, choose: Choices) -> bool:
    if not w.still_running:
        return False
    w.exit(choose.pick(sorted(w.still_running)), lets_go=choose.chance(2))
    return True


def register(w: World, choose: Choices) -> bool:
    if not w.sessions:
        return False
    session, name = choose.pick(sorted(w.sessions)), choose.pick(list(KINDS))
    nbytes, policy, group, part_of = KINDS[name]
    mutable = choose.chance(w.mutable_one_in)
    scratch = choose.pick(SCRATCH) if mutable and choose.chance(w.scratch_one_in) else ""
    content = "the same" if not mutable and choose.chance(w.twin_one_in) else ""
    kind = (policy, group, mutable, part_of)
    filled = scratch == "saved" and choose.chance(3)
    made = w.ask_register(
        session,
        name,
        nbytes,
        *kind,
        content=content,
        scratch=scratch,
        filled=filled,
        certain=content != "" and choose.chance(2),
    )
    if made not in w.answers and w.newest.get(name) in w.making and not choose.chance(5):
        w.make_master(w.newest[name])
        w.commit(session, name)
        if w.newest[name] in w.making and not choose.chance(5):
            w.make_master(w.newest[name])
    return True


def commit(w: World, choose: Choices) -> bool:
    if not w.owner:
        return False
    name = choose.pick(sorted(w.owner))
    owner = w.owner[name]
    also = [n for n in sorted(w.owner) if w.owner[n] == owner] if choose.chance(2) else []
    w.commit(owner, name, *([choose.pick(also)] if also else []))
    return True


def update_several(w: World, choose: Choices) -> bool:
    """Begin updates of several components of one session, and commit them together."""
    if not w.owner:
        return False
    owner = w.owner[choose.pick(sorted(w.owner))]
    names = [n for n in sorted(w.owner) if w.owner[n] == owner and n not in w.mutable]
    for name in names:
        w.update(owner, name)
        if w.newest[name] in w.making:
            w.make_master(w.newest[name])
    if names:
        w.commit(owner, *names[: choose.pick((1, 2, 3))])
    return True


def unregister(w: World, choose: Choices) -> bool:
    if not w.owner:
        return False
    name = choose.pick(sorted(w.owner))
    w.unregister(w.owner[name], name)
    return True


def update(w: World, choose: Choices) -> bool:
    if not w.owner:
        return False
    name = choose.pick(sorted(w.owner))
    session = choose.pick(sorted(w.sessions)) if choose.chance(20) else w.owner[name]
    w.update(session, name)
    new = w.newest[name]
    if new in w.making and not choose.chance(4):
        w.make_master(new)
        w.commit(session, name)
        if new in w.making and not choose.chance(4):
            w.make_master(new)
    return True


def give_up(w: World, choose: Choices) -> bool:
    if not w.owner:
        return False
    name = choose.pick(sorted(w.owner))
    w.give_up(w.owner[name], name)
    return True


def acquire(w: World, choose: Choices) -> bool:
    if not w.sessions or not w.owner:
        return False
    there = sorted(w.owner.keys() | {f for n in w.owner if (f := w.part_of[n])})
    names = [choose.pick(there) for _ in range(choose.pick((1, 1, 1, 2, 3)))]
    if choose.chance(8):
        names[0] = choose.pick(list(KINDS))
    w.acquire(
        choose.pick(sorted(w.sessions)),
        *names,
        agent=choose.pick((0, 1, 2)),
        priority=choose.pick((0, 0, 0, 1, 5)),
        timeout=choose.pick((None, None, None, 0.0, 0.5, 60.0)),
        await_registration=choose.chance(3),
        early=choose.chance(2),
        overtake=choose.pick((None, None, None, 0, 1)),
        due=choose.pick((None, None, None, 0.0, 5.0)),
    )
    return True


def acquire_own(w: World, choose: Choices) -> bool:
    """An owner acquires its own component, and may have written to it when it releases it."""
    if not w.owner:
        return False
    name = choose.pick(sorted(w.owner))
    w.acquire(w.owner[name], name, agent=choose.pick((0, 1, 2)), early=choose.chance(3))
    return True


def acquire_workspace(w: World, choose: Choices) -> bool:
    if not w.sessions:
        return False
    w.workspace(
        choose.pick(sorted(w.sessions)),
        choose.pick((1, 3, 5, 10, 11, 0)),
        agent=choose.pick((0, 1, 2)),
        priority=choose.pick((0, 0, 0, 1, 5)),
        timeout=choose.pick((None, None, 0.0, 0.5, 60.0)),
    )
    return True


def used(w: World, choose: Choices, key: Key) -> tuple[UsedRanges, ...]:
    """The ranges of scratch to save after this release; sometimes wrong in owner or number."""
    known = [n for n in sorted(w.owner) if n in w.scratch]
    own = [n for n in known if n in w.leases[key] and w.owner[n] == key[0]]
    if not known or choose.chance(3):
        return ()
    name = choose.pick(sorted(w.owner) if choose.chance(8) else own or known)
    before = w.scratch[name].number if name in w.scratch else 0
    return (
        UsedRanges(name, max(before + choose.pick((1, 1, 1, 2, 0, -1)), 0), choose.pick(RANGES)),
    )


def start(w: World, choose: Choices) -> bool:
    if not w.sessions:
        return False
    w.start(choose.pick(sorted(w.sessions)), timeout=choose.pick((None, 0.0, 0.5, 60.0)))
    return True


def end_start(w: World, choose: Choices) -> bool:
    """A start ends, or is given up."""
    if not w.starters:
        return False
    end = choose.pick((w.release, w.cancel))
    end(choose.pick(w.starters))
    return True


def release(w: World, choose: Choices) -> bool:
    if not w.leases:
        return False
    key = choose.pick(sorted(w.leases))
    w.release(key, used=used(w, choose, key))
    return True


def come_back(w: World, choose: Choices) -> bool:
    """Release, and acquire the same again at once: a busy worker."""
    if not w.leases:
        return False
    key = choose.pick(sorted(w.leases))
    names, agent = sorted(w.leases[key]), w.asked[key].agent
    w.release(key, used=used(w, choose, key))
    if names == [workspace_name(*key)]:
        w.workspace(key[0], 3, agent=agent)
        return True
    w.acquire(key[0], *names, agent=agent)
    return True


def give_way(w: World, choose: Choices) -> bool:
    """A holder whose component is wanted releases it."""
    told = [key for key in sorted(w.leases) if any((key[0], n) in w.wanted for n in w.leases[key])]
    if not told:
        return False
    key = choose.pick(told)
    w.release(key, used=used(w, choose, key))
    return True


def cancel(w: World, choose: Choices) -> bool:
    keys: list[Key] = sorted(w.waiting) + sorted(w.leases)[:1]
    if not keys:
        return False
    w.cancel(choose.pick(keys))
    return True


def prefetch(w: World, choose: Choices) -> bool:
    if not w.sessions or not w.owner:
        return False
    names = sorted({*w.owner, *(f for n in w.owner if (f := w.part_of[n]))})
    over = choose.pick((None, (), (choose.pick(names),)))
    timeout = choose.pick((None, None, None, 0.0, 5.0))
    w.prefetch(choose.pick(sorted(w.sessions)), choose.pick(names), over=over, timeout=timeout)
    return True


def follow(w: World, choose: Choices) -> bool:
    if not w.sessions or not w.owner:
        return False
    names = sorted({*w.owner, *(f for n in w.owner if (f := w.part_of[n]))})
    after = choose.pick(names)
    said = {choose.pick(names), choose.pick(names)} - {after}
    session = choose.pick(sorted(w.sessions))
    w.follows(session, *sorted(said), after=after, seen=choose.chance(2))
    return True


def resize(w: World, choose: Choices) -> bool:
    families = sorted({f for n in w.owner if (f := w.part_of[n])})
    if not w.sessions or not families:
        return False
    size = choose.pick((None, 0, 2, 3, 5))
    w.resize(choose.pick(sorted(w.sessions)), choose.pick(families), size)
    return True


def pin(w: World, choose: Choices) -> bool:
    """Pin or unpin; unpin twice as often, so that there is room for the rest."""
    if not w.sessions or not w.owner:
        return False
    names = sorted({*w.owner, *(f for n in w.owner if (f := w.part_of[n]))})
    w.pin(choose.pick(sorted(w.sessions)), choose.pick(names), choose.chance(3))
    return True


def evict_now(w: World, choose: Choices) -> bool:
    if not w.sessions or not w.owner:
        return False
    names = sorted({*w.owner, *(f for n in w.owner if (f := w.part_of[n]))})
    w.evict_now(choose.pick(sorted(w.sessions)), choose.pick(names))
    return True


def forget(w: World, choose: Choices) -> bool:
    if not (w.sessions and w.kept):
        return False
    w.forget(choose.pick(sorted(w.sessions)), *choose.pick(((), ("the same",), ("a",))))
    return True


def end_master(w: World, choose: Choices) -> bool:
    if not w.making:
        return False
    w.make_master(choose.pick(sorted(w.making)), "host_memory" if choose.chance(4) else None)
    return True


def end_move(w: World, choose: Choices) -> bool:
    if not w.moves:
        return False
    fail = "injected" if choose.chance(6) else None
    w.end_move(choose.pick(sorted(w.moves)), fail)
    return True


def step(w: World, choose: Choices) -> bool:
    """A copy advances a little."""
    return bool(w.moves) and w.step(choose.pick(sorted(w.moves)))


def end_ack(w: World, choose: Choices) -> bool:
    if not w.acks:
        return False
    w.end_ack(choose.pick(sorted(w.acks)))
    return True


def ask_to_drop(w: World, choose: Choices) -> bool:
    """Tell some sessions to let go of memory that is being lent."""
    lending = [m for m in w.moves.values() if isinstance(m, Lend)]
    told = {what for _, what in w.owes}
    lending = [m for m in lending if m.generation not in told]
    if not (lending and w.sessions):
        return False
    some = [session for session in sorted(w.sessions) if choose.chance(2)]
    w.ask_to_drop(choose.pick(lending).name, *some)
    return True


def drop(w: World, choose: Choices) -> bool:
    asked = [(s, g) for s, g in w.owes if isinstance(w.moves.get(g), Lend)]  # type: ignore[arg-type]
    if not asked:
        return False
    session, generation = choose.pick(asked)
    w.drop(session, int(generation))
    return True


def hear(w: World, choose: Choices) -> bool:
    """A session stops reading for a while, or reads again."""
    if not w.sessions:
        return False
    session, channel = choose.pick(sorted(w.sessions)), choose.pick(CHANNELS)
    w.hear(session, choose.pick((0, 0, 3)), channel, choose.pick(("", "no descriptor")))
    return True


def fenced_leave(w: World, choose: Choices) -> bool:
    fenced = [s for s in w.fenced if s in w.sessions]
    if not fenced:
        return False
    w.leave(choose.pick(fenced), alive=choose.chance(2), ending=choose.chance(2))
    return True


def sleep(w: World, choose: Choices) -> bool:
    w.sleep(choose.pick((0.01, 0.1, 0.6, 3.0, 40.0)))
    return True


Move = Callable[[World, Choices], bool]

#: With the frequency of each.
MOVES: dict[Move, int] = {
    open_session: 2,
    leave: 1,
    exit_process: 1,
    register: 6,
    commit: 1,
    unregister: 2,
    update: 4,
    update_several: 2,
    give_up: 1,
    acquire: 14,
    acquire_workspace: 4,
    start: 1,
    end_start: 1,
    release: 6,
    come_back: 4,
    give_way: 3,
    cancel: 2,
    prefetch: 2,
    follow: 2,
    resize: 2,
    pin: 2,
    evict_now: 1,
    forget: 1,
    end_master: 2,
    end_move: 10,
    step: 6,
    end_ack: 6,
    ask_to_drop: 4,
    drop: 4,
    hear: 3,
    fenced_leave: 1,
    sleep: 4,
}


def change_rules(w: World, choose: Choices) -> bool:
    w.change_rules(
        ack_timeout_s=choose.pick((2.0, 60.0)),
        residency_factor=choose.pick((0.0, 8.0)),
        residency_bound_s=choose.pick((0.5, 2.0)),
        patience_s=choose.pick((0.5, 30.0)),
        overtake=choose.pick((0, 16)),
        turn_s=choose.pick((0.5, 600.0)),
    )
    return True


#: The moves that concern write-backs, and the loads after them, most.
BOTH_WAYS: dict[Move, int] = {
    leave: 1,
    open_session: 1,
    register: 4,
    unregister: 1,
    acquire_own: 30,
    acquire_workspace: 1,
    release: 30,
    cancel: 3,
    prefetch: 2,
    follow: 2,
    end_move: 16,
    step: 20,
    end_ack: 20,
    sleep: 2,
}


def seeds(percent: int) -> range:
    """As many as this share of the examples."""
    return range(EXAMPLES * percent // 100)


def drive(
    core: Callable[..., Residency],
    seed: int,
    steps: int,
    *,
    strict: bool = False,
    moves: dict[Move, int] = MOVES,
    twin_one_in: int = 2,
    **rules: float,
) -> World:
    """Play `steps` random moves over a new world, and end it."""
    one_in = 1 + seed % 2 if moves is BOTH_WAYS else 3
    scratch_one_in = 1 if moves is BOTH_WAYS and seed % 5 == 4 else 3
    order = (("a", "e", "x", "b"),) if seed % 3 == 0 else ()
    fixed = {"strict": strict, "residency_bound_s": 0.5, "order": order}
    w = World(10, core, one_in, scratch_one_in, twin_one_in, **fixed, **rules)
    choose = RandomChoices(seed)
    bag = [move for move, often in moves.items() for _ in range(often)]
    if seed % 2:
        w.find("before", 1 + seed % 3, "the same")
    if seed % 7 == 1:
        w.lack(((4, 2), (8, 2)))
    for _ in range(2):
        w.open()
    for _ in range(6):
        register(w, choose)
    for _ in range(steps):
        choose.pick(bag)(w, choose)
    wind_up(w)
    return w


def wind_up(w: World) -> None:
    """Let all slow actions finish and all leases end: then every wait ends, and nothing is left.

    Only a waiter for a name that nobody registers may wait on; fenced sessions are gone.
    """
    for _ in range(200):
        for session in [s for s in w.fenced if s in w.sessions]:
            w.leave(session)
        for session in sorted(w.still_running):
            w.exit(session)
        w.settle()
        for key in [*sorted(w.leases), *w.starters]:
            w.release(key)
        if not (w.moves or w.acks or w.making or w.leases):
            if not (waiting_for_memory(w) or w.ledger.host.unordered):
                break
            w.sleep(60.0)
    assert not waiting_for_memory(w), f"{waiting_for_memory(w)} would wait forever"
    assert w.unanswered == set(w.waiting), "a request has no answer"
    assert w.core.ledger.queue.queued == []
    assert w.core.quiet
    for session in sorted(w.sessions):
        w.leave(session)
    w.settle()
    w.change_rules(keep_host=0)
    assert w.ledger.components == {}
    assert w.ledger.pool.free == w.ledger.pool.total, "chunks are lost"
    assert w.dropped == w.masters, "a master is never dropped"
    assert not w.ledger.host.owners
    assert not w.ledger.host.contents
    assert len(w.ledger.starts) == 0
    assert w.core.next_deadline() is None
    assert len(w.core.ledger.queue) == 0


def waiting_for_memory(w: World) -> set[Key]:
    """The acquires without an answer that are not parked for a name."""
    return {w_.key for w_ in w.ledger.queue if not w_.parked}
