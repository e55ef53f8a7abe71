"""The hooks of a streamed component's blocks, out of the way of passes that need none of them.

A pair of hooks that do nothing still costs a call some 5 us, and several times that in a process
whose caches are cold: too much for blocks of 1 ms. So a pass that holds all of its component puts
its blocks' hooks aside and back, which is a few entries in torch's own dictionaries.

Compiled code has the hooks that were there when it was compiled, for good: torch looks no more
which there are. So while anything is compiled all of them are there.
"""

import threading
import weakref
from typing import Any

import torch
from torch._dynamo.callback import callback_handler


class Pair:
    """A pre-hook and a forward hook of one module. Removed for good, or put aside for a while."""

    __slots__ = ("after", "always", "before", "enter", "first", "last", "leave", "leaves")

    def __init__(self, module: torch.nn.Module, enter: Any, leave: Any) -> None:
        """Hook `module`: `enter` runs first, `leave` last, also if forward raises."""
        #: None once they are removed.
        self.enter: Any = enter
        self.leave: Any = leave
        self.before: int = module.register_forward_pre_hook(enter, prepend=True).id
        self.after: int = module.register_forward_hook(leave, always_call=True).id
        self.first: Any = module._forward_pre_hooks
        self.last: Any = module._forward_hooks
        self.always: Any = module._forward_hooks_always_called
        #: Whether `leave` is there. After it was put aside it is put back by the call that needs
        #: it: most passes hold all, so that would be twice the work for nothing.
        self.leaves = True

    def have_leave(self) -> None:
        """A call was entered: it is to be left."""
        if not self.leaves and self.enter is not None:
            self.last[self.after] = self.leave
            self.leaves = True

    def remove(self) -> None:
        self.enter = None
        self.first.pop(self.before, None)
        self.last.pop(self.after, None)
        self.always.pop(self.after, None)


class Aside:
    """The pairs of a component's blocks. They are there unless all passes hold all of it.

    What is put aside and back goes straight to torch's dictionaries: their handles take ten times
    as long. That a hook is always called may stay said of one that is not there.
    """

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self._lock = threading.Lock()
        #: Passes under way that go block by block, and blocks that were called by their hooks; and
        #: passes that hold all of it.
        self._by_block = self._whole = 0
        self._aside = False
        _all.add(self)

    def add(self, pair: Pair) -> None:
        pair.enter.pair = pair
        self.pairs.append(pair)

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
        for pair in self.pairs:
            pair.have_leave()

    def compile_ends(self) -> None:
        self.end(whole=False)

    def _turn(self) -> None:
        self._aside = not self._aside
        if self._aside:
            _hear_of_compilations()
            for pair in self.pairs:
                pair.first.pop(pair.before, None)
                if pair.leaves:
                    pair.last.pop(pair.after, None)
                    pair.leaves = False
            return
        for pair in self.pairs:
            if pair.enter is not None:
                pair.first[pair.before] = pair.enter
                if len(pair.first) > 1:  # it is the first to run, as it was
                    pair.first.move_to_end(pair.before, last=False)


_all: "weakref.WeakSet[Aside]" = weakref.WeakSet()
#: Those that were told, by compilation: one may begin in the midst of another.
_told: list[list[Aside]] = []


def _compile_begins(*_: object) -> None:
    _told.append(list(_all))
    for aside in _told[-1]:
        aside.compile_begins()


def _compile_ends(*_: object) -> None:
    for aside in _told.pop() if _told else ():
        aside.compile_ends()


def _hear_of_compilations() -> None:
    """Looked at whenever hooks go aside: `torch.compiler.reset()` forgets who wants to hear."""
    if _compile_begins not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_compile_begins)
    if _compile_ends not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_compile_ends)
