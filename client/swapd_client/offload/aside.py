"""The hooks of a streamed component's blocks, out of the way of passes that need none of them.

A pair of hooks that do nothing still costs a call some 5 us, and several times that in a process
whose caches are cold: too much for blocks of 1 ms. So a pass that holds all of its component puts
its blocks' hooks aside and back, which is a few entries in torch's own dictionaries.
"""

import threading
from typing import Any

import torch


class Pair:
    """A pre-hook and a forward hook of one module. Removed for good, or put aside for a while.

    What is put aside goes straight to torch's dictionaries: their handles take ten times as long.
    """

    __slots__ = ("_after", "_after_hook", "_always", "_before", "_before_hook", "_first", "_last")

    def __init__(self, module: torch.nn.Module, before: Any, after: Any) -> None:
        """Hook `module`: `before` runs first, `after` last, also if forward raises."""
        self._before_hook = before
        self._after_hook = after
        self._before: int = module.register_forward_pre_hook(before, prepend=True).id
        self._after: int = module.register_forward_hook(after, always_call=True).id
        self._first: Any = module._forward_pre_hooks
        self._last: Any = module._forward_hooks
        self._always: Any = module._forward_hooks_always_called

    def remove(self) -> None:
        self.put_aside()
        self._before_hook = None

    def put_aside(self) -> None:
        self._first.pop(self._before, None)
        self._last.pop(self._after, None)
        self._always.pop(self._after, None)

    def put_back(self) -> None:
        """In the places they had: the first to run, and the last."""
        if self._before_hook is None:
            return
        self._first[self._before] = self._before_hook
        self._first.move_to_end(self._before, last=False)
        self._last[self._after] = self._after_hook
        self._always[self._after] = True


class Aside:
    """The pairs of a component's blocks. They are there unless all passes hold all of it."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self._lock = threading.Lock()
        #: Passes under way that go block by block, and those that hold all of it.
        self._by_block = self._whole = 0
        self._aside = False

    def begin(self, *, whole: bool) -> None:
        """A pass begins; its blocks are not called yet."""
        self._count(whole, 1)

    def end(self, *, whole: bool) -> None:
        self._count(whole, -1)

    def _count(self, whole: bool, n: int) -> None:
        with self._lock:
            self._whole += n * whole
            self._by_block += n * (not whole)
            aside = self._whole > 0 and not self._by_block
            if aside == self._aside:
                return
            self._aside = aside
            for pair in self.pairs:
                pair.put_aside() if aside else pair.put_back()
