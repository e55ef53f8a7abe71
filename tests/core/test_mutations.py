"""Seeded bugs: each breaks one rule of the core, and the scenarios must notice every one.

A bug is a replacement of text in one module. If the text is not there (any more), its test
fails: mend the list with the code.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from swapd.core import Residency, chunks, deadlock, policy, queue, residency
from tests.core import test_residency
from tests.core.driver import drive
from tests.core.test_residency import Make
from tests.core.world import World

pytestmark = pytest.mark.slow


class Bug(NamedTuple):
    name: str
    module: ModuleType
    text: str
    instead: str


BUGS = [
    Bug(
        "a leased component becomes idle",
        residency,
        "is not State.RESIDENT or c.leases or c.promised:",
        "is not State.RESIDENT or c.promised:",
    ),
    Bug(
        "a component loaded for a waiter becomes idle before its grant",
        residency,
        "is not State.RESIDENT or c.leases or c.promised:",
        "is not State.RESIDENT or c.leases:",
    ),
    Bug(
        "what was promised to a cancelled waiter never becomes idle",
        residency,
        "                c.promised.pop(w.key, None)\n                self._settle(c)\n",
        "                c.promised.pop(w.key, None)\n",
    ),
    Bug(
        "a waiter that joins a load starts another",
        residency,
        "            if c.state is State.ABSENT:\n                self._load(c)\n",
        "            if c.state in (State.ABSENT, State.LOADING):\n                self._load(c)\n",
    ),
    Bug(
        "most recently used goes first",
        residency,
        "            self.idle[c.name] = c\n",
        "            self.idle = {c.name: c, **self.idle}\n",
    ),
    Bug(
        "what the owner wrote is not written back",
        residency,
        "c.dirty = c.mutable",
        "c.dirty = False",
    ),
    Bug(
        "a failed write-back forgets that it is still to be done",
        residency,
        "            self._leaving -= c.chunks\n            c.state = State.RESIDENT\n",
        "            self._leaving -= c.chunks\n            c.state = State.RESIDENT\n"
        "            c.dirty = False\n",
    ),
    Bug(
        "strict does not wait for the acknowledgement",
        residency,
        "ack = c.mapped and (self.rules.strict or c.mutable)",
        "ack = c.mapped and c.mutable",
    ),
    Bug(
        "a mutable component is written back while its worker may write",
        residency,
        "ack = c.mapped and (self.rules.strict or c.mutable)",
        "ack = c.mapped and self.rules.strict",
    ),
    Bug(
        "anybody may acknowledge",
        residency,
        "if pending is None or pending[1].session != event.session:",
        "if pending is None:",
    ),
    Bug(
        "a worker that does not acknowledge is waited for forever",
        residency,
        "            if deadline > event.now:\n                break\n",
        "            break\n",
    ),
    Bug(
        "the chunks of a copy that nobody wants any more are lost",
        residency,
        "        self.pool.give(move.runs)\n        self._drop_master(move.component)\n",
        "        self._drop_master(move.component)\n",
    ),
    Bug(
        "the chunks of a copy in flight are reused when its session goes",
        residency,
        "        if c.on_device and not copying:\n",
        "        if c.on_device:\n",
    ),
    Bug(
        "what a living process may still write is reused",
        residency,
        "            if alive and c.mutable and c.mapped:\n",
        "            if False:\n",
    ),
    Bug(
        "a master is dropped before it is made, and again when it is",
        residency,
        "        if not copying and not being_made:\n",
        "        if not copying:\n",
    ),
    Bug(
        "a session that goes keeps its leases",
        residency,
        "        for request in list(session.leases):\n            self._drop_lease",
        "        for request in ():\n            self._drop_lease",
    ),
    Bug(
        "a session that goes is remembered by what was evicted for it",
        residency,
        "            if c.evicting_for is not None and c.evicting_for[0] == event.session:\n",
        "            if False:\n",
    ),
    Bug(
        "rivals of a group are on the device together",
        residency,
        "if chosen is None or len(idle_rivals) + len(leaving) < len(rivals):",
        "if chosen is None:",
    ),
    Bug(
        "rivals asked at once wait forever",
        residency,
        "        if len(set(groups)) < len(groups):\n",
        "        if False:\n",
    ),
    Bug(
        "what is leaving already is not counted, and more is evicted",
        residency,
        "        short = missing - self.pool.free - self._leaving  # 3\n",
        "        short = missing - self.pool.free\n",
    ),
    Bug(
        "superfluous victims are not spared",
        policy,
        "        if short + chunks <= 0:\n",
        "        if False:\n",
    ),
    Bug(
        "victims that are too few are evicted all the same",
        policy,
        "    if short > 0:\n        return None\n",
        "",
    ),
    Bug(
        "busy components are not protected",
        policy,
        "    if not is_busy(gap_s, swap_in_s):\n",
        "    if True:\n",
    ),
    Bug(
        "idle components are protected though nobody comes back",
        policy,
        "    if not is_busy(gap_s, swap_in_s):\n",
        "    if False:\n",
    ),
    Bug(
        "a sequential component goes though a waiter names it",
        residency,
        'c.policy == "sequential" and c.used and not c.waiting',
        'c.policy == "sequential" and c.used',
    ),
    Bug(
        "resident components are evicted",
        residency,
        '        if c.policy != "resident":\n            self.idle',
        "        if True:\n            self.idle",
    ),
    Bug(
        "new holders join what is wanted",
        residency,
        "            if c.name in self._wanted and all(s != w.session for s, _ in c.leases):\n",
        "            if False:\n",
    ),
    Bug(
        "what was given way to a waiter is lent again",
        residency,
        "        for c in idle + leased:\n",
        "        for c in leased:\n",
    ),
    Bug(
        "holders are not told that nobody waits any more",
        residency,
        "            self._unwant(name)\n            self._share",
        "            self._wanted.pop(name)\n            self._share",
    ),
    Bug(
        "nobody looks who waits when a copy ends",
        residency,
        "        self._settle(c)\n        self._share_with_queued(c)\n"
        "        self._replan = True\n",
        "        self._settle(c)\n        self._share_with_queued(c)\n",
    ),
    Bug(
        "a holder does not overtake who waits for it",
        residency,
        "            if w.queued and w.owner in self._held and self._make_room(w, wanted):\n",
        "            if False:\n",
    ),
    Bug(
        "deadlocks are not looked for",
        residency,
        "            self._holding[w.key] = w\n            self._refuse_deadlocked()\n",
        "            self._holding[w.key] = w\n",
    ),
    Bug(
        "who holds and does not wait counts as stuck",
        deadlock,
        "        stuck.difference_update(able)\n",
        "        return stuck\n",
    ),
    Bug(
        "deadlines are not kept",
        residency,
        "        for w in self.queue.expired(event.now):\n",
        "        for w in ():\n",
    ),
    Bug(
        "who waits for a name is not woken",
        residency,
        "        self._unpark(c.name)\n",
        "",
    ),
    Bug(
        "who can never fit any more is not refused",
        residency,
        "            self._room_shrank = self._replan = True\n",
        "            pass\n",
    ),
    Bug(
        "patience has no end",
        queue,
        "        return oldest if now >= oldest.arrived + self._patience_s else self._queued[0]\n",
        "        return self._queued[0]\n",
    ),
    Bug(
        "priority is ignored",
        queue,
        "else self._queued[0]\n",
        "else oldest\n",
    ),
    Bug(
        "chunks that somebody has are handed out because they are preferred",
        chunks,
        "and all(self._is_free(*run) for run in prefer)",
        "and True",
    ),
    Bug(
        "of two runs that are taken, one stays free",
        chunks,
        "        for first, n in chosen:\n",
        "        for first, n in chosen[:1]:\n",
    ),
]

SCENARIOS: list[Callable[[Make], None]] = [
    function
    for name, function in vars(test_residency).items()
    if name.startswith("test_") and list(inspect.signature(function).parameters) == ["make"]
]


def mutated(bug: Bug) -> Callable[..., Residency]:
    """The class Residency, made anew from sources in which `bug` is."""
    source = inspect.getsource(bug.module)
    assert source.count(bug.text) == 1, f"found {source.count(bug.text)} times: {bug.text!r}"
    changed = load(bug.module, source.replace(bug.text, bug.instead))
    if bug.module is residency:
        made = changed
    else:
        made = load(residency, inspect.getsource(residency))
        if bug.module is policy:
            vars(made)["policy"] = changed
        else:
            shared = vars(made).keys() & vars(changed).keys() & OWN
            assert shared
            for name in shared:
                vars(made)[name] = vars(changed)[name]
    core: Callable[..., Residency] = vars(made)["Residency"]
    return core


#: What `residency` imports by name from the other modules that are changed here.
OWN = {"ChunkPool", "count", "WaitQueue", "deadlocked"}


def load(module: ModuleType, source: str) -> ModuleType:
    made = ModuleType(module.__name__)
    exec(compile(source, f"<{module.__name__}, changed>", "exec"), vars(made))
    return made


def play(core: Callable[..., Residency]) -> None:
    """Everything quick that tells whether a core keeps the rules."""
    make: Any = partial(World, core=core)
    for scenario in SCENARIOS:
        scenario(make)
    for seed in range(10):
        drive(core, seed, steps=150, strict=bool(seed % 2))


def test_the_core_as_it_is_passes() -> None:
    assert len(SCENARIOS) > 100
    play(mutated(Bug("none", residency, "class Residency:", "class Residency:")))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_noticed(bug: Bug) -> None:
    core = mutated(bug)
    with pytest.raises((AssertionError, ValueError, LookupError, StopIteration)):
        play(core)


def test_a_bug_that_no_longer_applies_is_noticed() -> None:
    with pytest.raises(AssertionError, match="found 0 times"):
        mutated(Bug("stale", residency, "no such text", ""))
