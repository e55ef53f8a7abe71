"""Seeded bugs: each breaks one rule of the core, and the scenarios must notice every one.

A bug is a replacement of text in one module. If the text is no longer there, its test fails: fix
the list together with the code.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import pytest

from swapd.core import (
    Residency,
    admission,
    chunks,
    contents,
    deadlock,
    fences,
    hold_and_wait,
    holdings,
    leases,
    ledger,
    orders,
    planner,
    policy,
    queue,
    records,
    registry,
    requests,
    residency,
    starts,
    telling,
    transfers,
    updates,
    verdict,
    workspaces,
)
from swapd.core.handlers import (
    copying,
    families,
    leasing,
    pins,
    registration,
    sessions,
    starting,
)
from tests.core import noticed
from tests.core.driver import BOTH_WAYS, drive
from tests.core.rules import test_minimum_residency
from tests.core.world import Make, World


class Bug(NamedTuple):
    name: str
    module: ModuleType
    text: str
    instead: str


BUGS = [
    Bug(
        "a pin has a request of another refused",
        admission,
        "if self._lets_pins_go(w, found, asked):",
        "if False:",
    ),
    Bug(
        "a pin has a request refused that waited before it",
        admission,
        "if problem and not self._lets_pins_go(w, problem, asked):",
        "if problem:",
    ),
    Bug(
        "pins are let go for what would not fit without them, either",
        verdict,
        "return going if short <= 0 else []",
        "return going",
    ),
    Bug(
        "what is pinned keeps others from being registered",
        ledger,
        "if pins:\n            return staying",
        "if True:\n            return staying",
    ),
    Bug(
        "what a session needs at once is what it held last",
        leases,
        "if chunks > session.turn_chunks:",
        "if chunks:",
    ),
    Bug(
        "what another registered is what a session needs at once",
        leases,
        "if c.session == w.session and not c.workspace]",
        "if not c.workspace]",
    ),
    Bug(
        "what a session borrows it needs again",
        leases,
        "if c.session == w.session and not c.workspace]",
        "if c.session == w.session]",
    ),
    Bug(
        "what is registered no more is needed",
        registry,
        "            session.turn_chunks -= c.chunks\n",
        "",
    ),
    Bug(
        "one that waited in vain is no refusal",
        admission,
        "return w.deadline == w.arrived",
        "return True",
    ),
    Bug(
        "two start at once",
        starting,
        "if starts.turn == key:\n        ledger.out",
        "if True:\n        ledger.out",
    ),
    Bug(
        "the next one is not told that it has the turn to start",
        starting,
        "if had_turn and (following",
        "if not had_turn and (following",
    ),
    Bug(
        "the turn to start stays with a session that is gone",
        sessions,
        "    starting.end_all(ledger, event.session)\n",
        "",
    ),
    Bug(
        "one that has the turn to start is refused when its wait is over",
        starts,
        "self._until.drop(key)\n        return",
        "return",
    ),
    Bug(
        "a session waits for the turn to start with what others wait for",
        starting,
        "if known.leases or starts",
        "if starts",
    ),
    Bug(
        "a leased component becomes idle",
        transfers,
        "is not State.RESIDENT or c.leases or c.promised:",
        "is not State.RESIDENT or c.promised:",
    ),
    Bug(
        "a component loaded for a waiter becomes idle before its grant",
        transfers,
        "is not State.RESIDENT or c.leases or c.promised:",
        "is not State.RESIDENT or c.leases:",
    ),
    Bug(
        "what was promised to a cancelled waiter never becomes idle",
        admission,
        "                c.promised.pop(w.key, None)\n"
        "                transfers.settle(ledger, c)\n",
        "                c.promised.pop(w.key, None)\n",
    ),
    Bug(
        "who waits for a family gets parts that are registered later",
        admission,
        "        w.admitted = True\n        for name in w.names:\n",
        "        w.admitted = True\n        w.names = ledger.expand(w.asked)\n"
        "        for name in w.names:\n",
    ),
    Bug(
        "a waiter that joins a load starts another",
        admission,
        "if c.state is State.ABSENT:\n                transfers.load(ledger, c)\n",
        "if c.state in (State.ABSENT, State.LOADING):\n                transfers.load(ledger, c)\n",
    ),
    Bug(
        "most recently used goes first",
        orders,
        "if c.leaves_for_nothing else _IDLE, self._stamp",
        "if c.leaves_for_nothing else _IDLE, -self._stamp",
    ),
    Bug(
        "who gives back what is promised to others is not told that it is wanted no more",
        leases,
        "            if c.name in ledger.wanted:\n",
        "            if False:\n",
    ),
    Bug(
        "what the owner wrote is not written back",
        leases,
        "c.dirty = c.mutable",
        "c.dirty = False",
    ),
    Bug(
        "a failed write-back forgets that it is still to be done",
        transfers,
        "    ledger.leaving -= c.chunks\n    c.state = State.RESIDENT\n",
        "    ledger.leaving -= c.chunks\n    c.state = State.RESIDENT\n    c.dirty = False\n",
    ),
    Bug(
        "strict does not wait for the acknowledgement",
        transfers,
        "ack = c.mapped and (ledger.rules.strict or c.mutable)",
        "ack = c.mapped and c.mutable",
    ),
    Bug(
        "a mutable component is written back while its worker may write",
        transfers,
        "ack = c.mapped and (ledger.rules.strict or c.mutable)",
        "ack = c.mapped and ledger.rules.strict",
    ),
    Bug(
        "anybody may acknowledge",
        copying,
        "if pending is None or pending[1].session != event.session:",
        "if pending is None:",
    ),
    Bug(
        "a worker that does not acknowledge is waited for forever",
        sessions,
        "        if deadline > ledger.now:\n            break\n",
        "        break\n",
    ),
    Bug(
        "who does not let go of what is lent is waited for forever",
        sessions,
        "for session, why in ledger.debts.overdue(ledger.now):",
        "for session, why in ():",
    ),
    Bug(
        "who has let go of what is lent is fenced",
        sessions,
        "    ledger.debts.settle(event.session, event.generation)\n",
        "    pass\n",
    ),
    Bug(
        "who reads again is fenced",
        sessions,
        "        return ledger.debts.settle(event.session, what)\n",
        "        return\n",
    ),
    Bug(
        "who reads one channel need not read the other",
        sessions,
        'fences.LIFELINE if event.channel == "lifeline" else fences.REPLIES',
        "fences.LIFELINE",
    ),
    Bug(
        "who does not read has as long as who does not acknowledge",
        sessions,
        "    timeout_s = ledger.rules.unread_timeout_s\n",
        "    timeout_s = ledger.rules.ack_timeout_s\n",
    ),
    Bug(
        "who takes some now and then is fenced",
        fences,
        "        self._until.set((session, what), until)\n",
        "        if what not in self._why.get(session, {}):\n"
        "            self._until.set((session, what), until)\n",
    ),
    Bug(
        "what is owed for one lending is owed for none",
        fences,
        "            self._until.drop((session, what))\n            if not owed:\n",
        "            for other in (what, *owed):\n"
        "                self._until.drop((session, other))\n"
        "            if not owed:\n",
    ),
    Bug(
        "who waits keeps the patience it came with",
        sessions,
        "    admission.queue.patience_s = event.patience_s\n",
        "",
    ),
    Bug(
        "who is to let go of what is lent keeps the time it was given",
        sessions,
        "    ledger.debts.retime(timeout_s, fences.kept_what_is_lent(timeout_s))\n",
        "",
    ),
    Bug(
        "who does not read has as long as is said for those who do not let go",
        fences,
        "                if what not in (LIFELINE, REPLIES):\n",
        "                if True:\n",
    ),
    Bug(
        "who must acknowledge keeps the time it was given",
        sessions,
        "        ack_timeout_s=event.ack_timeout_s,\n",
        "",
    ),
    Bug(
        "what stays for its minimum residency stays though the rule has changed",
        sessions,
        "        residency_bound_s=event.residency_bound_s,\n",
        "",
    ),
    Bug(
        "nobody looks again when the rules have changed",
        sessions,
        "timeout_s))\n    ledger.replan = True\n",
        "timeout_s))\n",
    ),
    Bug(
        "nobody looks when what is owed is due",
        residency,
        "            self.ledger.debts.next_deadline(),\n",
        "",
    ),
    Bug(
        "who is fenced goes on owing",
        sessions,
        "        ledger.debts.forget(number)\n",
        "",
    ),
    Bug(
        "who is gone owes",
        sessions,
        "    ledger.debts.forget(event.session)\n",
        "",
    ),
    Bug(
        "what is owed by who is gone is noted",
        sessions,
        "    if known is not None and not known.fenced:\n",
        "    if known is None or not known.fenced:\n",
    ),
    Bug(
        "a session is fenced for each thing it owes",
        sessions,
        "    if not session.fenced:\n",
        "    if True:\n",
    ),
    Bug(
        "the chunks of a copy that nobody wants any more are lost",
        sessions,
        "    _free(ledger, move.runs, move.writer)\n    registry.drop_master(ledger, move.uid)\n",
        "    registry.drop_master(ledger, move.uid)\n",
    ),
    Bug(
        "the chunks of a copy in flight are reused when its session goes",
        sessions,
        "    elif c.on_device:\n",
        "    if c.on_device:\n",
    ),
    Bug(
        "what a living process may still write is reused",
        sessions,
        "writer = c.session if alive and c.mutable and (c.mapped or unsaved) else None",
        "writer = None",
    ),
    Bug(
        "what could not be saved is reused though its process may go on with it",
        sessions,
        "unsaved = c.dirty and c.state is State.RESIDENT",
        "unsaved = False",
    ),
    Bug(
        "a master is dropped before it is made, and again when it is",
        registry,
        "    ledger.making.add(due.uid)\n",
        "",
    ),
    Bug(
        "a session that goes keeps its leases",
        sessions,
        "    for request in list(session.leases):\n        leases.take_back",
        "    for request in ():\n        leases.take_back",
    ),
    Bug(
        "a session that goes is remembered by what was evicted for it",
        sessions,
        "    for c in session.makes_way.values():\n",
        "    for c in ():\n",
    ),
    Bug(
        "rivals of a group are on the device together",
        verdict,
        "    if len(idle_rivals) + sum(r.evicting for r in rivals) < len(rivals):  # 2\n",
        "    if False:\n",
    ),
    Bug(
        "rivals asked at once wait forever",
        verdict,
        "    if len({group for group, _ in sides}) < len(sides):\n",
        "    if False:\n",
    ),
    Bug(
        "what is leaving already is not counted, and more is evicted",
        verdict,
        "    short = missing - ledger.pool.free - ledger.leaving  # 3\n",
        "    short = missing - ledger.pool.free\n",
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
        policy,
        "if c.waiting or down or c.policy",
        "if down or c.policy",
    ),
    Bug(
        "permanent components are evicted",
        transfers,
        '    if c.policy != "permanent":\n        ledger.idle',
        "    if True:\n        ledger.idle",
    ),
    Bug(
        "new holders join what is wanted",
        verdict,
        "if c.name in ledger.wanted and not _may_take_again(ledger, c, w):",
        "if False:",
    ),
    Bug(
        "leases of one session that overlap keep others out",
        verdict,
        "return w.session in c.holders and c.closed_until <= ledger.now",
        "return w.session in c.holders",
    ),
    Bug(
        "an agent waits for ever for one of its session that waits for it",
        verdict,
        "return w.session in c.holders and c.closed_until <= ledger.now",
        "return False",
    ),
    Bug(
        "an agent may not take again what it holds and what is wanted",
        verdict,
        "    if w.owner in c.agents:\n        return True",
        "    if False:\n        return True",
    ),
    Bug(
        "other sessions are let in with those of the session that holds it",
        verdict,
        "return w.session in c.holders and c.closed_until <= ledger.now",
        "return c.closed_until <= ledger.now",
    ),
    Bug(
        "leases that overlap and are longer than that are let in as often for ever",
        planner,
        "2 * c.closed_s",
        "c.closed_s",
    ),
    Bug(
        "who was held off is let in when something else happens",
        planner,
        "        self._look_again(c.closed_until)",
        "",
    ),
    Bug(
        "what was given way to a waiter is lent again",
        verdict,
        "else ledger.named(names)",
        "else [c for c in ledger.named(names) if c.name not in ledger.idle]",
    ),
    Bug(
        "holders are not told that nobody waits any more",
        planner,
        "            telling.unwant(ledger, name)\n            self._admission.share",
        "            ledger.wanted.pop(name)\n            self._admission.share",
    ),
    Bug(
        "nobody is told at once that somebody waits",
        planner,
        "            self._held_up = True\n",
        "",
    ),
    Bug(
        "who hurries is not told that nobody waits any more",
        planner,
        "        elif ledger.hurried:\n            telling.take_time(ledger)\n",
        "",
    ),
    Bug(
        "those that hold nothing are told to hurry",
        telling,
        "for number in ledger.unhurried:",
        "for number in ledger.sessions.keys() - ledger.hurried:",
    ),
    Bug(
        "a session that is gone hurries",
        sessions,
        "    ledger.hurried.discard(event.session)\n",
        "",
    ),
    Bug(
        "nobody looks who waits when a copy ends",
        copying,
        "    transfers.settle(ledger, c)\n    admission.share(c)\n    ledger.replan = True\n",
        "    transfers.settle(ledger, c)\n    admission.share(c)\n",
    ),
    Bug(
        "a holder does not overtake who waits for it",
        planner,
        "in admission.entangled.overtakers(head) if head else ():",
        "in ():",
    ),
    Bug(
        "a holder overtakes though nobody needs what it holds",
        hold_and_wait,
        "if not self.waiters or self._fits_beside_all(head):\n            return []\n",
        "if not self.waiters or self._fits_beside_all(head):\n"
        "            return list(self.waiters.values())\n",
    ),
    Bug(
        "more overtake than need to",
        deadlock,
        "        while low < high:\n",
        "        low = high\n        while False:\n",
    ),
    Bug(
        "deadlocks are not looked for",
        admission,
        "            self._hold_on(w)\n            self._refuse_deadlocked()\n",
        "            self._hold_on(w)\n",
    ),
    Bug(
        "who holds and does not wait counts as stuck",
        deadlock,
        "        left.difference_update(able)\n",
        "        return left\n",
    ),
    Bug(
        "deadlines are not kept",
        admission,
        "        for w in self.queue.expired(self._ledger.now):\n",
        "        for w in ():\n",
    ),
    Bug(
        "who only tries waits until the next tick",
        admission,
        "        if verdict.is_late(ledger, w):\n            return",
        "        if False:\n            return",
    ),
    Bug(
        "who only tries joins a load",
        verdict,
        "enough = (State.RESIDENT,) if is_late(ledger, w) else",
        "enough =",
    ),
    Bug(
        "who comes to be let in early waits for the copy",
        admission,
        "if not (w.early and c.session == w.session):",
        "if True:",
    ),
    Bug(
        "everybody is let in before the copy has ended",
        admission,
        "if not (w.early and c.session == w.session):",
        "if not (c.session == w.session):",
    ),
    Bug(
        "another's component is lent before it is in",
        admission,
        "if not (w.early and c.session == w.session):",
        "if not w.early:",
    ),
    Bug(
        "who was let in early is not told that the load failed",
        leases,
        "        ledger.out.append(Broken(session, c.name, c.generation, why))\n",
        "        pass\n",
    ),
    Bug(
        "a load that failed stays in the leases",
        leases,
        "        take_from_all(ledger, c)\n        c.last_used",
        "        c.leases.clear()\n        c.last_used",
    ),
    Bug(
        "the chunks of a load that failed are reused while its worker may use them",
        transfers,
        "    if c.mapped:\n        return evict",
        "    if False:\n        return evict",
    ),
    Bug(
        "what was written beside a load that failed is written back",
        transfers,
        "    c.dirty = False  # the worker's writes during the load are not worth keeping\n",
        "",
    ),
    Bug(
        "what a living process may write is reused when the copy ends",
        sessions,
        "        move.writer = writer\n",
        "        pass\n",
    ),
    Bug(
        "nobody hears that the process of a copy has ended",
        sessions,
        "        ledger.quarantined.setdefault(writer, [])",
        "        pass",
    ),
    Bug(
        "holders are asked to give way before the copy has ended",
        planner,
        "        if c.state is State.LOADING:\n            return False\n",
        "",
    ),
    Bug(
        "of two holders the one that loads is asked to give way",
        holdings,
        "rank = (c.state is State.LOADING, c.resident_since, c.leased_seq)",
        "rank = (False, c.resident_since, c.leased_seq)",
    ),
    Bug(
        "the chunks of a workspace are reused before they are back",
        workspaces,
        "    ledger.moves[c.generation] = Move(c, c.uid, c.runs)\n    ledger.out.append(Reclaim(",
        "    ledger.moves[c.generation] = Move(c, c.uid, c.runs)\n"
        "    ledger.pool.give(c.runs)\n"
        "    ledger.out.append(Reclaim(",
    ),
    Bug(
        "what is on its way back is not counted, and more is evicted",
        workspaces,
        "        c.state = State.RECLAIMING\n        ledger.leaving += c.chunks\n",
        "        c.state = State.RECLAIMING\n",
    ),
    Bug(
        "a workspace that nobody waits for any more is lent for ever",
        admission,
        "            if c is not None and c.workspace:\n",
        "            if False:\n",
    ),
    Bug(
        "what is back of a workspace is taken for its rest as well",
        workspaces,
        "    c.runs = move.runs = without(move.runs, runs)\n",
        "",
    ),
    Bug(
        "what is back of a workspace is counted as on its way",
        workspaces,
        "    ledger.reclaiming -= chunks\n    ledger.replan = True\n",
        "    ledger.replan = True\n",
    ),
    Bug(
        "a workspace that nobody waits for any more is not taken back",
        copying,
        "    if c.state is State.RECLAIMING:\n        return workspaces.reclaim(ledger, c)\n",
        "",
    ),
    Bug(
        "the workspace of a session that is gone stays lent",
        sessions,
        "        workspaces.close(ledger, c)\n        if ledger.is_current(c):\n",
        "        if ledger.is_current(c):\n",
    ),
    Bug(
        "a workspace can be acquired by its name",
        ledger,
        "        if c is None or c.workspace:\n            return False\n",
        "        if c is None:\n            return False\n",
    ),
    Bug(
        "a component may be named like a workspace",
        requests,
        "if is_workspace(name) or is_workspace(family)",
        "if is_workspace(family)",
    ),
    Bug(
        "a family may be named like a workspace",
        requests,
        "is_workspace(name) or is_workspace(family):",
        "is_workspace(name):",
    ),
    Bug(
        "a part stands for itself",
        requests,
        "    if family == name:\n",
        "    if False:\n",
    ),
    Bug(
        "a member of a group excludes nobody",
        requests,
        '    if (request.policy == "alternating") != (request.group is not None):\n',
        "    if False:\n",
    ),
    Bug(
        "a timeout runs from the start of the daemon",
        requests,
        "else now + timeout_s",
        "else timeout_s",
    ),
    Bug(
        "bytes that are laid out otherwise are shared",
        requests,
        'f"{request.content} {request.layout}" if',
        "request.content if",
    ),
    Bug(
        "the lease of a cancelled acquire is held on",
        leasing,
        "    else:\n        _take_back(ledger, admission, key)\n",
        "",
    ),
    Bug(
        "a workspace is granted a place",
        leases,
        "if c.session == w.session and not c.workspace:",
        "if c.session == w.session:",
    ),
    Bug(
        "a lending that failed leaves the workspace behind",
        workspaces,
        "    if ledger.is_current(c) and not c.promised:\n        registry.remove(ledger, c)\n",
        "",
    ),
    Bug(
        "what is expected pushes out what was brought in for another",
        policy,
        "if c.expected or (c.part_of and",
        "if (c.part_of and",
    ),
    Bug(
        "what was used is expected for ever",
        leases,
        "c.used, c.expected = True, False",
        "c.used = True",
    ),
    Bug(
        "what is held is expected",
        leasing,
        "c.expected = not c.leases",
        "c.expected = True",
    ),
    Bug(
        "a part that is expected pushes out another of its family",
        policy,
        "if c.expected or (c.part_of and c.part_of == expected.part_of):",
        "if c.expected:",
    ),
    Bug(
        "a rival goes for what is expected though it may not",
        policy,
        "    return over is None or c.name in over or c.part_of in over\n",
        "    return True\n",
    ),
    Bug(
        "what was used last goes first for what is expected",
        orders,
        "sorted(ranks):",
        "sorted(ranks, reverse=True):",
    ),
    Bug(
        "all that is expected comes in at once",
        planner,
        "if over is not None and ledger.ahead in ledger.moves:",
        "if False:",
    ),
    Bug(
        "a part that finds no room holds up smaller ones",
        planner,
        "if c.part_of and c.chunks >= in_vain.get(c.part_of, c.chunks + 1):",
        "if c.part_of and c.part_of in in_vain:",
    ),
    Bug(
        "what is expected and not there is refused",
        leasing,
        "    if asked.over is not None:\n",
        "    if asked.over is None:\n",
    ),
    Bug(
        "a prefetch of what is gone holds back others",
        registry,
        "        ledger.replan = True  # others may have been held back for it\n",
        "",
    ),
    Bug(
        "a mate is loaded while its rival is still being saved",
        planner,
        "if any(r.evicting for r in found.excluded):",
        "if False:",
    ),
    Bug(
        "who found room elsewhere is refused when a write-back fails",
        copying,
        "    if waiter and waiter.queued:",
        "    if waiter:",
    ),
    Bug(
        "who was parked is not woken when the write-back fails",
        copying,
        "    admission.unpark(c)\n",
        "",
    ),
    Bug(
        "who waits for a name is not woken",
        registration,
        "    admission.unpark(c)\n",
        "",
    ),
    Bug(
        "who waits for a family is not woken",
        queue,
        "for name in names for key",
        "for name in names[:1] for key",
    ),
    Bug(
        "who is not parked any more is still found by name",
        queue,
        "            del self.by_name[name][w.key]\n",
        "            self.by_name[name].get(w.key)\n",
    ),
    Bug(
        "who can never fit any more is not refused",
        transfers,
        "        ledger.room_shrank = ledger.replan = True\n",
        "        pass\n",
    ),
    Bug(
        "a family has several owners",
        registration,
        "    if any(c.session != session for c in parts.values()):",
        "    if False:",
    ),
    Bug(
        "parts of one family exclude each other",
        ledger,
        "for m in mates if c.excludes(m))",
        "for m in mates if m is not c)",
    ),
    Bug(
        "parts of one family cannot be asked for at once",
        verdict,
        "(c.group, c.part_of or c.name)",
        "(c.group, c.name)",
    ),
    Bug(
        "a rival of two that are asked for is evicted twice",
        ledger,
        "        return list(rivals.values())\n",
        "        return [r for c in asked for r in rivals.values() if c.excludes(r)]\n",
    ),
    Bug(
        "a family that comes late is not looked for",
        admission,
        "            w.names = self._ledger.expand(w.asked)\n",
        "",
    ),
    Bug(
        "a family is not prefetched by its name",
        leasing,
        "    names = ledger.expand(asked.names)\n",
        "    names = asked.names\n",
    ),
    Bug(
        "the grant of a family does not name its parts",
        admission,
        "names = () if w.asked == w.names else w.names",
        "names = ()",
    ),
    Bug(
        "what passes through is not said to",
        leases,
        'transient = c.policy == "sequential"',
        "transient = False",
    ),
    Bug(
        "what is in no block is not kept",
        families,
        "        transfers.set_kept(ledger, c, True)\n",
        "        transfers.set_kept(ledger, c, False)\n",
    ),
    Bug(
        "what is in no block takes no room",
        families,
        "asked = resident_bytes - sum(c.nbytes for c in first)",
        "asked = resident_bytes",
    ),
    Bug(
        "there is no room left for what is copied",
        policy,
        "else room - beside * max(sizes, default=0)",
        "else room",
    ),
    Bug(
        "who never leaves is not counted when a family is given its room",
        families,
        "room = ledger.pool.total - ledger.never_leaving(family.values())",
        "room = ledger.pool.total",
    ),
    Bug(
        "more is kept than leaves room for what passes through",
        families,
        "kept if sum(sizes[i] for i in kept) <= most else policy.spread(sizes, most)",
        "kept",
    ),
    Bug(
        "a part that passes through counts as never leaving",
        registry,
        '"sequential" if asked.transient else asked.policy',
        "asked.policy",
    ),
    Bug(
        "what is in no block and does not fit is kept for good",
        families,
        "if least + fixed <= ledger.pool.total:",
        "if True:",
    ),
    Bug(
        "the part that is needed next goes first",
        orders,
        "return reversed(parts.values())",
        "return iter(list(parts.values()))",
    ),
    Bug(
        "a family goes while it is in use",
        orders,
        "_USED if family in self._used else _IDLE, stamp",
        "_IDLE, stamp",
    ),
    Bug(
        "scratch that costs no copy goes when its turn comes",
        orders,
        "_FOR_NOTHING if c.leaves_for_nothing else _IDLE",
        "_IDLE",
    ),
    Bug(
        "scratch that has to be saved goes first",
        records,
        "(self.to_save if self.dirty else self.kept) == ()",
        "not self.kept",
    ),
    Bug(
        "what comes to stay is not counted by those that keep what there is room for",
        registry,
        '    ledger.room_differs |= c.policy == "permanent"\n    insort(',
        "    insort(",
    ),
    Bug(
        "the room of what stayed is not given to those that keep what there is room for",
        registry,
        "        ledger.automatic.pop(c.part_of, None)\n"
        '    ledger.room_differs |= c.policy == "permanent"\n',
        "        ledger.automatic.pop(c.part_of, None)\n",
    ),
    Bug(
        "a family that was told how much to keep is spread anew",
        families,
        "ledger.automatic.pop(asked.name, None)",
        "pass",
    ),
    Bug(
        "the first parts are kept, not spread ones",
        policy,
        "chosen = {(2 * i + 1) * len(sizes) // (2 * n) for i in range(n)}",
        "chosen = set(range(n))",
    ),
    Bug(
        "what is not kept any more stays while it is idle",
        policy,
        '        return "resized"\n',
        "        return None\n",
    ),
    Bug(
        "what is not kept any more leaves only once it was used",
        transfers,
        "c.kept_no_more = is_idle and not kept",
        "c.kept_no_more = False",
    ),
    Bug(
        "what is not kept any more leaves though it cannot come back",
        policy,
        "if c.waiting or down or c.policy",
        "if c.waiting or c.policy",
    ),
    Bug(
        "what never leaves is evicted",
        transfers,
        "        ledger.idle.drop(c)\n        make_idle(ledger, c)\n",
        "        pass\n",
    ),
    Bug(
        "what is pinned is evicted as ever",
        transfers,
        'c.unpinned_policy, c.own_policy = c.own_policy, "permanent"',
        "c.unpinned_policy = c.own_policy",
    ),
    Bug(
        "what is unpinned stays for ever",
        transfers,
        "c.own_policy, c.unpinned_policy = c.unpinned_policy, None",
        "c.unpinned_policy = None",
    ),
    Bug(
        "a part that passes through stays because its family is pinned",
        transfers,
        "    kept = c.policy == c.own_policy\n",
        "    kept = True\n",
    ),
    Bug(
        "what is pinned takes the room of another component",
        pins,
        "if fixed + beside([c]) > ledger.pool.total:",
        "if False:",
    ),
    Bug(
        "what is pinned takes the room of one that waits",
        pins,
        "for w in waiters:",
        "for w in ():",
    ),
    Bug(
        "a member of an alternating group is pinned",
        pins,
        "if c.group is not None:",
        "if False:",
    ),
    Bug(
        "what is leaving is pinned",
        pins,
        "        if c.evicting:\n",
        "        if False:\n",
    ),
    Bug(
        "a name that is registered anew is pinned still",
        registry,
        "    ledger.pinned.pop(c.name, None)\n",
        "",
    ),
    Bug(
        "what is leased is said to have been evicted",
        pins,
        'if c.policy != "permanent" and c.name not in ledger.idle:',
        "if False:",
    ),
    Bug(
        "what somebody waits for is evicted because another asks",
        pins,
        "        if c.waiting:\n",
        "        if False:\n",
    ),
    Bug(
        "what could not come back is evicted because somebody asks",
        pins,
        "    if ledger.down:\n",
        "    if False:\n",
    ),
    Bug(
        "what was read ahead in vain outlasts what is kept",
        orders,
        "        yield from reversed(self._in_vain.values())\n        for name in self._places:\n",
        "        for name in self._places:\n",
    ),
    Bug(
        "what is kept goes for what is read ahead",
        verdict,
        'if w is None and any(c.policy == "sequential" for c in asked):',
        "if False:",
    ),
    Bug(
        "nobody looks who fits beside what never leaves from now on",
        transfers,
        '    ledger.room_shrank |= c.policy == "permanent"\n',
        "",
    ),
    Bug(
        "a family is there when its parts are gone",
        registry,
        "    drop_member(ledger.families, c.part_of, c)\n",
        "",
    ),
    Bug(
        "patience has no end",
        queue,
        "        return oldest if now >= oldest.arrived + self.patience_s else self._queued[0]\n",
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
    Bug(
        "who comes after an update is given the old bytes",
        verdict,
        "return w.owner not in c.agents",
        "return False",
    ),
    Bug(
        "who holds the old bytes may not take them again",
        verdict,
        "return w.owner not in c.agents",
        "return True",
    ),
    Bug(
        "old bytes stay when they are released",
        policy,
        "    if c.superseded:\n",
        "    if False:\n",
    ),
    Bug(
        "the old master is dropped while a copy reads it",
        updates,
        "    if not (move and move.uid == old):\n",
        "    if True:\n",
    ),
    Bug(
        "the old master is kept for good once a copy has read it",
        updates,
        "    if move.uid != move.component.uid:\n",
        "    if False:\n",
    ),
    Bug(
        "the new master of one that is gone stays",
        sessions,
        "    if c.renewal is not None:\n        registry.drop_master",
        "    if False:\n        registry.drop_master",
    ),
    Bug(
        "a master is dropped in the making",
        registry,
        "    if uid not in ledger.making:\n",
        "    if True:\n",
    ),
    Bug(
        "of several updates each takes place when it is sealed",
        updates,
        "    if all(r is not None and r.sealed for r in renewals):\n",
        "    if True:\n",
    ),
    Bug(
        "of several updates the others take place if one fails",
        updates,
        "    for one in renewal.together or (c,):\n",
        "    for one in (c,):\n",
    ),
    Bug(
        "an update that was given up takes place",
        registration,
        "if ledger.is_current(c) and uid == wanted:",
        "if ledger.is_current(c):",
    ),
    Bug(
        "what came back is still counted as old",
        ledger,
        "        c.superseded = False\n",
        "",
    ),
    Bug(
        "an update does not look for waits that it makes hopeless",
        hold_and_wait,
        "wishes[name] = c, verdict.must_leave_first(c, w)",
        "wishes[name] = c, False",
    ),
    Bug(
        "threads of a session that holds old bytes are given them",
        verdict,
        "return w.owner not in c.agents",
        "return w.session not in c.holders",
    ),
    Bug(
        "holders of old bytes are not told",
        planner,
        "if self._may_be_asked_for(c)}",
        "if False}",
    ),
    Bug(
        "a prefetch is settled by old bytes",
        planner,
        "(c.on_device and not c.evicting and not c.superseded)",
        "(c.on_device and not c.evicting)",
    ),
    Bug(
        "what is being updated is unregistered",
        registration,
        "if c.leases or c.answer is not None or c.renewal is not None:",
        "if c.leases or c.answer is not None:",
    ),
    Bug(
        "a family stays where it was when one of its parts is used again",
        orders,
        "            self._parts.setdefault(c.part_of, OrderedDict())[c.name] = c\n"
        "            self._place(c.part_of)\n",
        "            self._parts.setdefault(c.part_of, OrderedDict())[c.name] = c\n",
    ),
    Bug(
        "what two agents hold is counted twice",
        holdings,
        "elif len(c.agents) == 1:  # then one agent alone no longer holds it\n",
        "elif False:\n",
    ),
    Bug(
        "what one of two agents gives back is its own no more",
        holdings,
        "elif len(c.agents) == 2:  # then one agent alone holds it again\n",
        "elif False:\n",
    ),
    Bug(
        "what never comes free is counted as long as it is registered",
        transfers,
        "    ledger.recount(c)\n    leave_room(ledger, c)\n    c.evictions += 1\n",
        "    leave_room(ledger, c)\n    c.evictions += 1\n",
    ),
    Bug(
        "who would not fit beside what never leaves is taken for one that can run",
        hold_and_wait,
        "room = ledger.pool.total - ledger.fixed - holders.waiting.chunks",
        "room = ledger.pool.total - holders.waiting.chunks",
    ),
    Bug(
        "those that came to hold what is wanted are not told",
        leases,
        "            ledger.joined[name] = None\n",
        "            pass\n",
    ),
    Bug(
        "a mutable component is updated beside its worker's writes",
        registration,
        "    if c.mutable:\n        return ledger.refuse(key",
        "    if False:\n        return ledger.refuse(key",
    ),
    Bug(
        "who shares a master does not pass it on before it is sealed",
        contents,
        "        content.filled[uid] = None\n        return Due(uid, original)\n",
        "        return Due(uid, original)\n",
    ),
    Bug(
        "a master that is gone is shared",
        contents,
        "        content.filled.pop(uid, None)\n",
        "",
    ),
    Bug(
        "whoever waits for one that is gone waits on",
        registry,
        "    for due in ledger.contents.gone(uid):\n        order(ledger, due)\n",
        "    ledger.contents.gone(uid)\n",
    ),
    Bug(
        "whoever waits for a seal is not told of it",
        registration,
        "    for due in ledger.contents.sealed(event.uid):\n        registry.order(ledger, due)\n",
        "",
    ),
    Bug(
        "one that is never filled is waited for without end",
        sessions,
        "    for due in ledger.contents.expired(event.now):\n        registry.order(ledger, due)\n",
        "",
    ),
    Bug(
        "a master that waits is dropped as if it was made",
        registry,
        "        if ledger.unordered.pop(uid, None) is None:\n",
        "        if True:\n",
    ),
    Bug(
        "two sessions wait for each other's contents",
        contents,
        "            return Due(uid)\n        if self._waits_for(content.filler, session):",
        "            return Due(uid)\n        if False:",
    ),
    Bug(
        "who gave back the old bytes stays wanted",
        leases,
        "            if c.name in ledger.wanted:\n                ledger.replan = True",
        "            if False:\n                ledger.replan = True",
    ),
    Bug(
        "what is dropped is copied out",
        transfers,
        "    if c.unsaved:\n        _save(ledger, c)\n",
        "    if c.dirty:\n        _save(ledger, c)\n",
    ),
    Bug(
        "all of scratch is saved whatever is used of it",
        transfers,
        "c.nbytes, c.runs, c.to_save))",
        "c.nbytes, c.runs))",
    ),
    Bug(
        "all of scratch comes in though a part was saved",
        transfers,
        "        c.kept = c.to_save\n",
        "        c.kept = None\n",
    ),
    Bug(
        "what was saved of scratch is forgotten",
        transfers,
        "    if c.scratch:\n        c.kept = c.to_save\n",
        "",
    ),
    Bug(
        "what was saved of scratch comes back though none of it is used any more",
        transfers,
        "        c.kept, c.dirty = (), False\n",
        "        c.dirty = False\n",
    ),
    Bug(
        "what was dropped is still to be saved",
        transfers,
        "        c.kept, c.dirty = (), False\n",
        "        c.kept = ()\n",
    ),
    Bug(
        "what was saved is dropped if nobody wrote to it since",
        transfers,
        "    if c.dirty and c.scratch:\n",
        "    if c.scratch:\n",
    ),
    Bug(
        "what is no scratch is dropped",
        transfers,
        "    if c.dirty and c.scratch:\n",
        "    if True:\n",
    ),
    Bug(
        "scratch that leaves keeps its contents in name",
        transfers,
        "    else:\n        forget(c)\n        vacate",
        "    else:\n        vacate",
    ),
    Bug(
        "nobody is told that the contents of scratch are lost",
        transfers,
        "    ledger.out.append(Lost(c.name, c.generation, why))\n    forget(c)\n",
        "    forget(c)\n",
    ),
    Bug(
        "after a save that failed what was saved before comes back",
        transfers,
        "    ledger.out.append(Lost(c.name, c.generation, why))\n    forget(c)\n",
        "    ledger.out.append(Lost(c.name, c.generation, why))\n    c.dirty = False\n",
    ),
    Bug(
        "a save of scratch that fails refuses who waits",
        copying,
        "elif c.scratch and not ledger.down:",
        "elif False:",
    ),
    Bug(
        "scratch is dropped though the device is down, and could not come in again",
        copying,
        "elif c.scratch and not ledger.down:",
        "elif c.scratch:",
    ),
    Bug(
        "bytes are counted that were zeroed",
        copying,
        "ledger.bytes_in += c.bytes_in",
        "ledger.bytes_in += c.nbytes",
    ),
    Bug(
        "bytes are counted that were not saved",
        copying,
        "    nbytes = c.bytes_back\n",
        "    nbytes = c.nbytes\n",
    ),
    Bug(
        "new contents are said to be the old ones",
        transfers,
        "        if c.kept == ():\n",
        "        if c.kept == () and not c.contents:\n",
    ),
    Bug(
        "contents that came back are said to be new",
        transfers,
        "        if c.kept == ():\n",
        "        if c.kept is not None:\n",
    ),
    Bug(
        "what is no scratch has contents that begin",
        transfers,
        "        if c.kept == ():\n",
        "        if not c.kept:\n",
    ),
    Bug(
        "scratch comes in as what its host copy has",
        transfers,
        "c.runs, c.kept, in_use)",
        "c.runs, None, in_use)",
    ),
    Bug(
        "a load counts its own chunks only as in use",
        transfers,
        "in_use = ledger.pool.total - ledger.pool.free",
        "in_use = c.chunks",
    ),
    Bug(
        "no grant says when contents began",
        leases,
        "c.runs, transient, c.contents))",
        "c.runs, transient))",
    ),
    Bug(
        "anybody says what is used of scratch",
        leasing,
        "c is None or c.session != session or",
        "c is None or",
    ),
    Bug(
        "what is dropped, or no scratch, is saved in part",
        leasing,
        'c.scratch != "saved" or',
        "False or",
    ),
    Bug(
        "what is said while it is saved counts",
        leasing,
        'c.scratch != "saved" or not c.leases:',
        'c.scratch != "saved":',
    ),
    Bug(
        "what was said earlier and comes later counts",
        leasing,
        "used.number > c.used_number and",
        "True and",
    ),
    Bug(
        "it is not remembered when it was said",
        leasing,
        "c.used_number, c.to_save = used.number, used.ranges",
        "c.to_save = used.ranges",
    ),
    Bug(
        "what is used is beyond the end",
        leasing,
        "sum(used.ranges[-1]) <= c.nbytes",
        "True",
    ),
    Bug(
        "the last byte is beyond the end",
        leasing,
        "sum(used.ranges[-1]) <= c.nbytes",
        "sum(used.ranges[-1]) < c.nbytes",
    ),
    Bug(
        "of scratch that was never saved its host copy comes in",
        registry,
        "kept=() if asked.scratch",
        "kept=None if asked.scratch",
    ),
    Bug(
        "what scratch was filled with does not come in",
        registry,
        "asked.scratch and not asked.filled else None",
        "asked.scratch else None",
    ),
    Bug(
        "what is dropped is to be saved",
        registry,
        'to_save=() if asked.scratch == "dropped" else None',
        "to_save=None",
    ),
    Bug(
        "what is saved is dropped unless something is said of it",
        registry,
        'to_save=() if asked.scratch == "dropped" else None',
        "to_save=() if asked.scratch else None",
    ),
    Bug(
        "what is dropped takes host memory",
        registry,
        'empty=c.scratch == "dropped"',
        "empty=False",
    ),
    Bug(
        "what is saved has no host memory",
        registry,
        'empty=c.scratch == "dropped"',
        'empty=c.scratch != ""',
    ),
    Bug(
        "what is dropped is called lost",
        sessions,
        "    for c in owned:\n        if c.unsaved:\n",
        "    for c in owned:\n        if c.dirty:\n",
    ),
    Bug(
        "what is dropped is called lost, of a session that has much",
        sessions,
        "        return most\n    if c.unsaved:\n",
        "        return most\n    if c.dirty:\n",
    ),
    Bug(
        "who waits for what is being dropped waits on with the device down",
        verdict,
        "(c.evicting and c.unsaved)",
        "(c.evicting and c.dirty)",
    ),
    Bug(
        "scratch is registered that its worker may not write to",
        requests,
        'not (request.mutable and request.content == "")',
        'request.content != ""',
    ),
    Bug(
        "scratch comes in in segments",
        requests,
        "if request.scratch and request.segments:",
        "if False:",
    ),
    Bug(
        "ranges of scratch overlap",
        requests,
        "start < end or nbytes < 1",
        "start < 0 or nbytes < 1",
    ),
    Bug(
        "ranges of scratch are empty",
        requests,
        "start < end or nbytes < 1",
        "start < end or nbytes < 0",
    ),
    Bug(
        "any number of ranges is kept",
        requests,
        "len(used.ranges) > protocol.RANGES_MAX",
        "False",
    ),
    Bug(
        "what comes in is said to be all of it",
        records,
        "return self.nbytes if self.kept is None else",
        "return self.nbytes if True else",
    ),
    Bug(
        "what leaves is said to be all of it",
        records,
        "return self.nbytes if self.to_save is None else",
        "return self.nbytes if True else",
    ),
    Bug(
        "what nobody needs is saved",
        records,
        "return self.dirty and self.to_save != ()",
        "return self.dirty",
    ),
    Bug(
        "what was saved is saved again",
        records,
        "return self.dirty and self.to_save != ()",
        "return self.to_save != ()",
    ),
]

SCENARIOS: list[Callable[[Make], None]] = [
    function
    for found in sorted(path.stem for path in (Path(__file__).parent / "rules").glob("test_*.py"))
    for name, function in vars(import_module(f"tests.core.rules.{found}")).items()
    if name.startswith("test_") and list(inspect.signature(function).parameters) == ["make"]
]

#: The scenarios that take a hundred times as long as the others come last.
LONG = {
    test_minimum_residency.test_two_busy_agents_do_not_swap_at_every_step,
    test_minimum_residency.test_a_plain_pipeline_is_not_delayed,
}
SCENARIOS.sort(key=lambda scenario: scenario in LONG)


#: The scenario that noticed each bug, by name: playing it first takes a tenth of the time.
LIKELY = noticed.read()
#: The errors that a scenario raises on a core that breaks a rule.
NOTICED = (AssertionError, ValueError, LookupError, StopIteration)


#: The modules that a bug may be in, each after those that it imports.
CHAIN = (
    *(policy, requests, chunks, orders, contents, fences, starts, queue, deadlock, holdings),
    *(ledger, telling, registry, workspaces, transfers, leases, updates),
    *(verdict, hold_and_wait, admission, planner),
    *(starting, sessions, copying, families, pins, leasing, registration, residency),
)


def mutated(bug: Bug) -> Callable[..., Residency]:
    """The class Residency, built anew from sources that contain `bug`."""
    source = inspect.getsource(bug.module)
    assert source.count(bug.text) == 1, f"found {source.count(bug.text)} times: {bug.text!r}"
    with pytest.MonkeyPatch.context() as patch:
        if bug.module is records:
            remake_component(source.replace(bug.text, bug.instead), patch)
        for module in CHAIN:
            code = compiled(module)
            if module is bug.module:
                code = compile(source.replace(bug.text, bug.instead), module.__name__, "exec")
            made = load(module.__name__, code, patch)
    core: Callable[..., Residency] = vars(made)["Residency"]
    return core


def remake_component(source: str, patch: pytest.MonkeyPatch) -> None:
    """Replace one class of the records, so that all modules share the enum of states."""
    begin, end = (
        source.index("@dataclass(slots=True, eq=False)\nclass Component:"),
        source.index("@dataclass(slots=True, eq=False)\nclass Move:"),
    )
    names = dict(vars(records))
    exec(compile(source[begin:end], records.__name__, "exec"), names)
    patch.setattr(records, "Component", names["Component"])


@cache
def compiled(module: ModuleType) -> CodeType:
    return compile(inspect.getsource(module), module.__name__, "exec")


def load(name: str, code: CodeType, patch: pytest.MonkeyPatch) -> ModuleType:
    """Replace the module of that name by one of this code."""
    made = ModuleType(name)
    package, _, last = name.rpartition(".")
    patch.setitem(sys.modules, name, made)
    patch.setattr(sys.modules[package], last, made)
    exec(code, vars(made))
    return made


def play(core: Callable[..., Residency], first: str = "") -> None:
    """Every quick check that a core keeps the rules, the scenario `first` before all others.

    The next core meets the scenarios from the file of the last noticing one first: bugs of a kind
    are next to each other.
    """
    make: Any = partial(World, core=core)
    for scenario in sorted(SCENARIOS, key=lambda one: one.__name__ != first):
        try:
            scenario(make)
        except Exception:
            beside = scenario.__module__
            SCENARIOS.sort(key=lambda one: (one in LONG, one.__module__ != beside))
            raise
    for seed in range(10):
        drive(core, seed, steps=150, strict=bool(seed % 2))
        drive(core, seed, steps=150, strict=bool(seed % 2), moves=BOTH_WAYS)


def noticed_by(bug: Bug) -> str:
    """The name of the first scenario that notices it; "" if only random moves do."""
    make: Any = partial(World, core=mutated(bug))
    for scenario in SCENARIOS:
        try:
            scenario(make)
        except NOTICED:
            return scenario.__name__
    return ""


def test_the_core_as_it_is_passes() -> None:
    assert len(SCENARIOS) > 100
    play(mutated(Bug("none", residency, "class Residency:", "class Residency:")))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_noticed(bug: Bug) -> None:
    core = mutated(bug)
    with pytest.raises(NOTICED):
        play(core, LIKELY.get(bug.name, ""))


def test_a_bug_that_no_longer_applies_is_noticed() -> None:
    with pytest.raises(AssertionError, match="found 0 times"):
        mutated(Bug("stale", residency, "no such text", ""))
