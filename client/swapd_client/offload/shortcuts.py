"""The shortcuts of the forward path: fast code for calls whose component is on the device.

Each does the same as a plain version, named beside it, for the most frequent calls, and leaves all
others to that version. `tests/offload/test_shortcuts.py` runs both with the same histories. Python
code that has not run for a millisecond is slow: each function costs about 2 us while caches are
cold. So the work of every call is written in one piece here, and nowhere else.

The gain of each is beside it: medians of one run of both versions, with cold caches, on a slow CPU
under load. There a forward with a component, acquire and release included, cost 115 us more than a
plain one, and 162 us if streamed.
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
from swapd_client.offload.scope import CALL, Count, Entry, Scope, thread

_frame = sys._getframe
_is_grad_enabled = torch.is_grad_enabled
_is_traced = torch._C._get_tracing_state

#: Whether code may be compiled or exported in this process. If not, the hooks need not ask torch at
#: every call, and modules need no forwards of their own (`forwards.py`): 19 us for 17 of them.
_compiles = False


def _may_compile() -> None:
    global _compiles
    _compiles = True


dynamo.when_imported(_may_compile)


# --- hooks -------------------------------------------------------------------------------


class _Hook(Ours):
    """A hook of one module. Its copy or pickle has no gate."""

    __slots__ = ("_by", "_compiled", "_gate")

    def __init__(
        self, gate: Gate | None = None, by: object = None, *, compiled: bool = True
    ) -> None:
        """Unless `compiled`, compiled code is without this hook."""
        self._gate = gate
        self._by = by
        self._compiled = compiled

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return type(self), ()


#: The call is two frames above its hook, after torch's `inner`. Checked first: a search is slow.
_CALLER = 2
#: The call is so much nearer to the hook than to `Scope.has`, which `Gate.begin` calls.
_NEARER = 2


@uncompiled
def _apart(hook: Callable[..., Any], *args: Any) -> Any:
    """Run a hook outside of compiled code. Too slow for use without compilation."""
    if isinstance(hook, Enter) and hook.pair is not None:
        hook.pair.have_leave()  # code compiled next keeps this hook for good, or never has it
    return hook(*args)


class Enter(_Hook):
    """Runs before forward. In full: `Gate.begin`.

    Gain, with `Leave`: 25 us of 142 for a call that acquires, and 18 us for a layer's call in it.
    """

    __slots__ = ("_far", "pair")

    def __init__(
        self, gate: Gate | None = None, by: object = None, *, compiled: bool = True
    ) -> None:
        super().__init__(gate, by, compiled=compiled)
        #: How far up the stack the last search found the call that holds the component.
        self._far = 1
        #: The pair of this hook, if the pair is removed at times.
        self.pair: Pair | None = None

    def is_held_by(self, scope: Scope) -> bool:
        """Whether a thread holds what a call of the module would hold."""
        gate = self._gate
        return gate is not None and (gate.held in scope or gate.all_of_it in scope)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if _compiles and torch.compiler.is_dynamo_compiling():
            if self._compiled:
                _apart(self, module, args)
            return
        gate = self._gate
        if gate is None:
            return
        scope = thread.scope
        counts = scope.counts
        if counts:
            if gate.held in counts or gate.all_of_it in counts:
                # a `with` block holds it, or the call found last time does, if that is under way
                call = scope.entries[-1].frame if scope.entries else None
                try:
                    if not _is_grad_enabled() if call is None else _frame(self._far) is call:
                        return
                except ValueError:  # the stack is shallower
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
    """Runs after forward, also if forward raised. In full: `Gate.end`."""

    __slots__ = ()

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if _compiles and torch.compiler.is_dynamo_compiling():
            return _apart(self, module, args, output) if self._compiled else None
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
# The hooks of a streamed component's blocks are removed during passes that need none of them. A
# pair of hooks that do nothing still costs a call about 5 us, and several times that with cold
# caches: too much for blocks of 1 ms. So a pass that holds the whole component removes the hooks of
# its blocks, and of single layers beside them, and puts them back: a few entries in torch's
# dictionaries. Direct calls of these modules meanwhile, by another thread or after an interrupt,
# run under the lease of that pass.
#
# Compiled code keeps the hooks of the time of its compilation: torch does not check them again. So
# all hooks of blocks are installed during a compilation.


class Pair:
    """A pre-hook and a forward hook of one module. Removed for good, or for a while."""

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
        #: The manager that removes the pair at times, if there is one.
        self.aside: BlockHooks | None = None

    def leave_if_entered(self) -> None:
        """Install `leave` at the first call that says `have_leave`, not before."""
        self.enter.pair = self
        self.last.pop(self.after)

    def have_leave(self) -> None:
        """A call entered, so `leave` must run."""
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
    """The pairs of a component's blocks, installed unless all calls hold all of it.

    Gain: 116 us of 278 for 16 blocks and a layer.

    Hooks are removed from torch's dictionaries directly, and put back: their handles take ten times
    as long. torch may list a removed hook as always called.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The pre-hook of each pair: its dictionary, its key there, and the hook.
        self._enters: list[tuple[Any, int, Any]] = []
        #: The pairs whose forward hook is installed. Once removed, it returns with a call that
        #: needs it: most passes hold the whole component, so it is not worth the work for each.
        self._leaving: set[Pair] = set()
        #: Counts of passes under way: those that go block by block, with direct calls of blocks;
        #: and those that hold the whole component.
        self._by_block = self._whole = 0
        self._aside = False
        _all.add(self)

    def add(self, pair: Pair) -> None:
        """Manage a pair from now on. Call it while no pass is under way."""
        pair.enter.pair = pair
        pair.aside = self
        with self._lock:
            self._leaving.add(pair)
            self._enters.append((pair.first, pair.before, pair.enter))

    def discard(self, pair: Pair) -> None:
        """The pair is removed for good."""
        with self._lock:
            pair.aside = None
            self._leaving.discard(pair)
            self._enters = [one for one in self._enters if one[2] is not pair.enter]

    def have_leave(self, pair: Pair) -> None:
        """Called during a pass that goes block by block, so the hook stays."""
        if pair not in self._leaving:
            with self._lock:
                if pair.aside is not None:
                    pair.last[pair.after] = pair.leave
                    self._leaving.add(pair)

    def begin(self, *, whole: bool) -> None:
        """A pass begins; it has called no block yet."""
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
        """Install all hooks, and keep them until `compile_ends`."""
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
            if others:  # it must run first again
                first.move_to_end(before, last=False)


_all: "weakref.WeakSet[BlockHooks]" = weakref.WeakSet()
#: The managers told of each compilation; one may begin inside another.
_told: list[list[BlockHooks]] = []


def _compile_begins(*_: object) -> None:
    _told.append(list(_all))
    for aside in _told[-1]:
        aside.compile_begins()


def _compile_ends(*_: object) -> None:
    for aside in _told.pop() if _told else ():
        aside.compile_ends()


def _hear_of_compilations() -> None:
    """Runs whenever hooks are removed: `torch.compiler.reset()` drops its callbacks."""
    callback = sys.modules.get("torch._dynamo.callback")
    handler: Any = getattr(callback, "callback_handler", None)
    if handler is not None and _compile_begins not in handler.start_callbacks:
        handler.register_start_callback(_compile_begins)
        handler.register_end_callback(_compile_ends)


dynamo.when_imported(_hear_of_compilations)
