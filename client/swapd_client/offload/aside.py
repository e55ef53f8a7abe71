"""The hooks of a streamed component's blocks, out of the way of passes that need none of them.

A pair of hooks that do nothing still costs a call some 5 us, and several times that in a process
whose caches are cold: too much for blocks of 1 ms. So a pass that holds all of its component puts
the hooks of its blocks, and of single layers beside them, aside and back: a few entries in torch's
own dictionaries.

Compiled code has the hooks that were there when it was compiled, for good: torch looks no more
which there are. So while anything is compiled all of them are there.
"""

import sys
import threading
import weakref
from typing import Any

import torch

from swapd_client.offload import dynamo


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
        self.aside: Aside | None = None

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


class Aside:
    """The pairs of a component's blocks. They are there unless all passes hold all of it.

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
    callback = sys.modules.get("torch._dynamo.callback")
    handler: Any = getattr(callback, "callback_handler", None)
    if handler is not None and _compile_begins not in handler.start_callbacks:
        handler.register_start_callback(_compile_begins)
        handler.register_end_callback(_compile_ends)


dynamo.when_imported(_hear_of_compilations)
