"""The shortcuts of the forward path: what a call costs that finds all of its component there.

Each does what a plain version does that is named beside it, for the calls that most are, and leaves
all others to that one; `tests/offload/test_shortcuts.py` and `tests/plugin/test_begin.py` have both
do the same histories. Python that was not run for a millisecond is slow, each function costs some
2 us while caches are cold: so what is done at every call is written in one piece here, and nowhere
else.

What each is worth is beside it: medians of one run of both sides, with cold caches, on a slow CPU
that others kept busy. The whole of what a forward costs more that has a component, acquire and
release included, was 115 us there, and 162 us if it is streamed.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from swapd_client.errors import SwapdError
from swapd_client.offload import dynamo
from swapd_client.offload.changing import changing, tell
from swapd_client.offload.dynamo import uncompiled
from swapd_client.offload.gate import Gate
from swapd_client.offload.ours import Ours
from swapd_client.offload.scope import CALL, Count, Entry, thread

_frame = sys._getframe
_is_grad_enabled = torch.is_grad_enabled
_is_traced = torch._C._get_tracing_state

#: Whether anything may be compiled or exported here: else torch need not be asked, at every call;
#: nor need modules have forwards of their own (`forwards.py`): 19 us for 17 of them.
_compiles = False


def _may_compile() -> None:
    global _compiles
    _compiles = True


dynamo.when_imported(_may_compile)


# --- hooks -------------------------------------------------------------------------------


class _Hook(Ours):
    """A hook of one module. A copy of it, or one that was pickled, has no gate."""

    __slots__ = ("_by", "_gate")

    def __init__(self, gate: Gate | None = None, by: object = None) -> None:
        self._gate = gate
        self._by = by

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return type(self), ()


#: Above a hook that torch calls: its `inner`, then the call. Looked at first: to search is slow.
_CALLER = 2
#: How much nearer than to `Scope.has`, by way of `Gate.begin`, a call is to the hook.
_NEARER = 2


@uncompiled
def _apart(hook: Callable[..., Any], *args: Any) -> Any:
    """What a hook does is no part of what is compiled. Where nothing is, this would cost most."""
    if isinstance(hook, Enter) and hook.pair is not None:
        hook.pair.have_leave()  # what is compiled next has it for good, or never
    return hook(*args)


class Enter(_Hook):
    """Before forward. In full: `Gate.begin`.

    Worth, with `Leave`, 25 us of 142 for a call that acquires, and 18 us for a layer's in it.
    """

    __slots__ = ("_far", "pair")

    def __init__(self, gate: Gate | None = None, by: object = None) -> None:
        super().__init__(gate, by)
        #: How far up the stack it last found the call that holds what this one needs.
        self._far = 1
        #: Itself and what leaves, if they are put aside at times.
        self.pair: Pair | None = None

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if _compiles and torch.compiler.is_dynamo_compiling():
            _apart(self, module, args)
            return
        gate = self._gate
        if gate is None:
            return
        scope = thread.scope
        counts = scope.counts
        if counts:
            if gate.held in counts or gate.all_of_it in counts:
                # by a `with` block, or the call that was found last time, if that is under way
                call = scope.entries[-1].frame if scope.entries else None
                try:
                    if call is None or _frame(self._far) is call:
                        return
                except ValueError:  # the stack is not that deep
                    pass
        elif (
            scope.kept is None
            and (gate.grown is None or not gate.grown.changed)
            and not _is_grad_enabled()
            and not _is_traced()
            and not (_compiles and torch.compiler.is_exporting())
            and (call := _frame(_CALLER)).f_code is CALL
        ):
            held = scope.begins = gate.held
            if changing.now is None:
                try:
                    counts[held] = Count(held.take())
                    scope.entries.append(Entry(held, call, self._by))
                except SwapdError as exc:
                    gate.refused(exc)
                finally:
                    scope.begins = None
                if self.pair is not None:
                    self.pair.have_leave()
                return
        found = gate.begin(self._by, self._far + _NEARER)
        if found:
            self._far = found - _NEARER
        elif self.pair is not None:
            self.pair.have_leave()


class Leave(_Hook):
    """After forward, also if it raised. In full: `Gate.end`."""

    __slots__ = ()

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if _compiles and torch.compiler.is_dynamo_compiling():
            return _apart(self, module, args, output)
        gate = self._gate
        if gate is None:
            return None
        scope, by = thread.scope, self._by
        entries, counts = scope.entries, scope.counts
        if (
            entries
            and (entry := entries[-1]).by is by
            and entry.frame is _frame(_CALLER)
            and (count := counts[gate.held]).n == 1
            and not _is_grad_enabled()
            and not gate.all_lent.may_be_in(output)
        ):
            entries.pop()
            del counts[gate.held]
            if count.give_back is not None:
                count.give_back()
            if changing.now is not None:
                tell()
            return None
        return gate.end(by, output)


# --- hooks that are out of the way -------------------------------------------------------
#
# The hooks of a streamed component's blocks, out of the way of passes that need none of them. A
# pair of hooks that do nothing still costs a call some 5 us, and several times that in a process
# whose caches are cold: too much for blocks of 1 ms. So a pass that holds all of its component puts
# the hooks of its blocks, and of single layers beside them, aside and back: a few entries in
# dictionaries of torch's. What is called of these by itself meanwhile, by another thread or after
# an interrupt, runs under the lease of that pass.
#
# Compiled code has the hooks that were there when it was compiled, for good: torch looks no more
# which there are. So while anything is compiled all of them are there.


class Pair:
    """A pre-hook and a forward hook of one module. Removed for good, or put aside for a while."""

    __slots__ = ("after", "always", "aside", "before", "enter", "first", "last", "leave")

    def __init__(self, module: torch.nn.Module, enter: Any, leave: Any) -> None:
        """Hook `module`: `enter` runs first, `leave` last, also if forward raises."""
        self.enter = enter
        self.leave = leave
        self.before: int = module.register_forward_pre_hook(enter, prepend=True).id
        self.after: int = module.register_forward_hook(leave, always_call=True).id
        self.first: Any = module._forward_pre_hooks
        self.last: Any = module._forward_hooks
        self.always: Any = module._forward_hooks_always_called
        #: Who puts it aside, if anybody does.
        self.aside: BlockHooks | None = None

    def leave_if_entered(self) -> None:
        """`leave` is there from the first call on that says `have_leave`, not before."""
        self.enter.pair = self
        self.last.pop(self.after)

    def have_leave(self) -> None:
        """A call was entered: it is to be left."""
        if self.aside is not None:
            self.aside.have_leave(self)
        elif self.after not in self.last:
            self.last[self.after] = self.leave

    def remove(self) -> None:
        if self.aside is not None:
            self.aside.discard(self)
        self.first.pop(self.before, None)
        self.last.pop(self.after, None)
        self.always.pop(self.after, None)


class BlockHooks:
    """The pairs of a component's blocks. They are there unless all passes hold all of it.

    Worth 116 us of 278 for 16 blocks and a layer.

    What is put aside and back goes straight to torch's dictionaries: their handles take ten times
    as long. That a hook is always called may stay said of one that is not there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Of each pair what enters: its dictionary, its key there, and the hook.
        self._enters: list[tuple[Any, int, Any]] = []
        #: The pairs whose other hook is there. Once put aside it comes back with a call that needs
        #: it: most passes hold all, so that would be twice the work for nothing.
        self._leaving: set[Pair] = set()
        #: Passes under way that go block by block, and blocks that were called by their hooks; and
        #: passes that hold all of it.
        self._by_block = self._whole = 0
        self._aside = False
        _all.add(self)

    def add(self, pair: Pair) -> None:
        """Have it put aside from now on; while no pass is under way."""
        pair.enter.pair = pair
        pair.aside = self
        with self._lock:
            self._leaving.add(pair)
            self._enters.append((pair.first, pair.before, pair.enter))

    def discard(self, pair: Pair) -> None:
        """It is being removed: it does not come back."""
        with self._lock:
            pair.aside = None
            self._leaving.discard(pair)
            self._enters = [one for one in self._enters if one[2] is not pair.enter]

    def have_leave(self, pair: Pair) -> None:
        """Said while a pass is under way that goes block by block: so it stays."""
        if pair not in self._leaving:
            with self._lock:
                if pair.aside is not None:
                    pair.last[pair.after] = pair.leave
                    self._leaving.add(pair)

    def begin(self, *, whole: bool) -> None:
        """A pass begins; its blocks are not called yet."""
        with self._lock:
            self._whole += whole
            self._by_block += not whole
            if self._aside != (self._whole > 0 and not self._by_block):
                self._turn()

    def end(self, *, whole: bool) -> None:
        with self._lock:
            self._whole -= whole
            self._by_block -= not whole
            if self._aside != (self._whole > 0 and not self._by_block):
                self._turn()

    def compile_begins(self) -> None:
        """Until `compile_ends` no hook goes aside, those that leave neither."""
        self.begin(whole=False)
        for _, _, enter in self._enters:  # `discard` makes a new list
            self.have_leave(enter.pair)

    def compile_ends(self) -> None:
        self.end(whole=False)

    def _turn(self) -> None:
        self._aside = not self._aside
        if self._aside:
            if _compiles:
                _hear_of_compilations()
            for first, before, _ in self._enters:
                first.pop(before, None)
            while self._leaving:
                pair = self._leaving.pop()
                pair.last.pop(pair.after, None)
            return
        for first, before, enter in self._enters:
            others = bool(first)
            first[before] = enter
            if others:  # it is the first to run, as it was
                first.move_to_end(before, last=False)


_all: "weakref.WeakSet[BlockHooks]" = weakref.WeakSet()
#: Those that were told, by compilation: one may begin in the midst of another.
_told: list[list[BlockHooks]] = []


def _compile_begins(*_: object) -> None:
    _told.append(list(_all))
    for aside in _told[-1]:
        aside.compile_begins()


def _compile_ends(*_: object) -> None:
    for aside in _told.pop() if _told else ():
        aside.compile_ends()


def _hear_of_compilations() -> None:
    """Looked at whenever hooks go aside: `torch.compiler.reset()` forgets who wants to hear."""
    callback = sys.modules.get("torch._dynamo.callback")
    handler: Any = getattr(callback, "callback_handler", None)
    if handler is not None and _compile_begins not in handler.start_callbacks:
        handler.register_start_callback(_compile_begins)
        handler.register_end_callback(_compile_ends)


dynamo.when_imported(_hear_of_compilations)


# --- a step of a stage -------------------------------------------------------------------


def begin_step(stage: Any, *, encoders: bool = False) -> None:
    """Before a step of a stage of vLLM: it has its lease, as most have. In full:
    `Stage.begin_in_full`, which says what is raised.

    Worth 7 us of 25, where caches are warm 6.4 of 7.9.
    """
    if not stage._stepping:
        stage._stepping = True
        gate = stage._gate
        with gate.lock:  # whoever is just giving the lease back has done so then
            if gate.shut:
                gate.await_open()
            gate.depth += 1
    turns, session = stage._turns, stage._connection.client.session
    if (
        turns._lease is None
        or not session.life.usable
        or session.told.wanted
        or stage._ranks is not None
        or (encoders and turns._held is not stage.components.all)
    ):
        stage.begin_in_full(encoders=encoders)
