"""The leases that each thread holds, counted: the first entry acquires, the last one releases.

A call inside a call that holds the same needs no entry: it ends first. Each entry is left by its
creator. There is one exception: if KeyboardInterrupt or CancelledError ends a forward, torch calls
no hook. The thread's next entry finds such entries, because the frame of the call is no longer on
the stack.
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Protocol

import msgspec
import torch

from swapd_client.errors import SwapdError, UnknownComponent
from swapd_client.lease import Lease
from swapd_client.leases.collected import give_back_later
from swapd_client.offload.lender import Lender
from swapd_client.offload.stream import Stream

#: Every call of a module that has hooks passes through here.
CALL = torch.nn.Module._call_impl.__code__
#: Frames between `calling` and the call of the module: a gate, the hook, torch's `inner`...
_NEAR = 3
#: ... and frames that keep a hook from being compiled, at most.
_SPARE = 6


class Holdable(Protocol):
    """A thing that a thread holds or does not hold."""

    #: Whether another thread may release it, and one thread may take it twice.
    is_lease: bool
    #: The number of `use` blocks that hold it, in any thread: backward may run in a thread of
    #: torch's.
    uses: int

    def take(self) -> Callable[[], None]:
        """Hold it in this thread; returns the release. Raises as `Client.acquire`."""

    def has_any(self, client: Lender, names: Collection[str]) -> bool:
        """Whether it holds any of these components of a client."""


class Hooks(Protocol):
    """Hooks inside a component, removed during calls that hold all of it."""

    def add(self, pair: Any) -> None:
        """Manage the hooks of one more module. Call it while no pass is under way."""

    def begin(self, *, whole: bool) -> None:
        """A pass begins that holds the whole component, or goes block by block."""

    def end(self, *, whole: bool) -> None:
        """The pass has ended."""


class Kept(Protocol):
    """Leases that a thread keeps between calls."""

    def take(self, held: Holdable) -> Callable[[], None]:
        """As `held.take()`; the returned function may keep the lease instead."""

    def end(self) -> None:
        """Release all of them. Raises as a release."""


class Leased:
    """Components under one lease."""

    is_lease = True

    def __init__(self, client: Lender, names: list[str]) -> None:
        self.uses = 0
        self._client = client
        #: Components, by their names in the daemon. One that is private memory by now is dropped by
        #: the next `take`.
        self.names = names

    def __repr__(self) -> str:
        return f"<Leased {' + '.join(self.names)}>"

    def take(self) -> Callable[[], None]:
        if not self.names:  # as in `lease`
            return _nothing
        try:
            lease = self._client.acquire(*self.names)
        except UnknownComponent:
            self._drop_private()
            return self.take()
        lease.answered_for()
        return lease.release

    def has_any(self, client: Lender, names: Collection[str]) -> bool:
        return client is self._client and not set(names).isdisjoint(self.names)

    def lease(self) -> Lease | None:
        """As `take`, for callers that release it even when they are collected.

        None if all of it is private again.
        """
        if not self.names:
            return None
        try:
            lease = self._client.acquire(*self.names)
        except UnknownComponent:
            self._drop_private()
            return self.lease()
        lease.answered_for()
        return lease

    def _drop_private(self) -> None:
        """Handle UnknownComponent: raises it again if all of them are registered."""
        registered = self.registered()
        if len(registered) == len(self.names):
            raise
        self.names[:] = registered

    def registered(self) -> list[str]:
        """The names of those that are not private memory by now."""
        components = self._client.session.components
        return [name for name in self.names if name in components]


class Passed:
    """A streamed component: the tensors outside its blocks, for one pass through the blocks."""

    is_lease = False

    def __init__(
        self, stream: Stream, beside: Leased | None, everything: Leased, hooks: Hooks
    ) -> None:
        """`beside`: its components outside the stream. `everything`: all of it."""
        self.uses = 0
        self.stream = stream
        self.everything = everything
        #: The hooks of its blocks.
        self.hooks = hooks
        self._beside = beside

    def __repr__(self) -> str:
        return f"<Passed {self.stream.family}>"

    def take(self) -> Callable[[], None]:
        beside = self._beside.take() if self._beside is not None else None
        is_private = False
        try:
            lease = self.stream.whole()
            if lease is None and not (is_private := self.stream.is_private):
                self.stream.enter()
        except BaseException:
            if beside is not None:
                beside()
            raise
        if lease is None and not is_private:
            self.hooks.begin(whole=False)
            return partial(self._leave, beside)
        scope = thread.scope
        scope.lend(self.everything)  # then its blocks need no lease
        whole = not torch.is_grad_enabled()  # in grad mode the hooks check each forward
        self.hooks.begin(whole=whole)
        return partial(self._leave_whole, scope, lease, beside, whole)

    def has_any(self, client: Lender, names: Collection[str]) -> bool:
        return self.everything.has_any(client, names)

    def _leave(self, beside: Callable[[], None] | None) -> None:
        self.hooks.end(whole=False)
        try:
            self.stream.leave()
        finally:
            if beside is not None:
                beside()

    def _leave_whole(
        self, scope: "Scope", lease: Lease | None, beside: Callable[[], None] | None, whole: bool
    ) -> None:
        self.hooks.end(whole=whole)
        scope.count_down(self.everything)
        try:
            if lease is not None:
                lease.release()
        finally:
            if beside is not None:
                beside()


class Block:
    """One block of a streamed component, and the component's pass."""

    is_lease = False

    def __init__(self, whole: Passed, number: int | None) -> None:
        """`number`: of the block; None: a layer outside the blocks, which needs `whole` only."""
        self.uses = 0
        self._whole = whole
        self._number = number
        #: The component that it holds beside the pass.
        self.names = () if number is None else (whole.stream.parts[number],)

    def __repr__(self) -> str:
        return (
            f"<{'A layer' if self._number is None else f'Block {self._number}'} of {self._whole}>"
        )

    def take(self) -> Callable[[], None]:
        scope, whole, number = here(), self._whole, self._number
        # its hooks called it and will leave it, so they stay installed in any case
        whole.hooks.begin(whole=False)
        try:
            scope.count_up(whole)
            try:
                if whole.everything in scope:
                    number = None
                if number is not None:
                    whole.stream.need(number)
            except BaseException:
                scope.count_down(whole)
                raise
        except BaseException:
            whole.hooks.end(whole=False)
            raise

        def give_back() -> None:
            try:
                if number is not None:
                    whole.stream.done(number)
            finally:
                try:
                    scope.count_down(whole)
                finally:
                    whole.hooks.end(whole=False)

        return give_back

    def has_any(self, client: Lender, names: Collection[str]) -> bool:
        return self._whole.has_any(client, names)


# msgspec makes these two at every forward: no Python runs for it.


class Entry(msgspec.Struct, eq=False):
    """One call, or one `with` block, that holds something."""

    held: Any
    #: The call's frame; None if its end cannot go unnoticed.
    frame: Any
    by: object
    #: False for a `with` block.
    is_call: bool = True


class Count(msgspec.Struct, eq=False):
    #: None if the caller lent it.
    give_back: Callable[[], None] | None = None
    n: int = 1


class Scope:
    """The leases of one thread. Used by that thread alone."""

    def __init__(self) -> None:
        #: The holdables, and how often each is held.
        self.counts: dict[Holdable, Count] = {}
        #: The last is the innermost.
        self.entries: list[Entry] = []
        #: If set, leases are taken through it; see `between_calls.py`.
        self.kept: Kept | None = None
        #: The holdable of a call that begins, until the call is an entry; see `changing.py`.
        self.begins: Holdable | None = None
        self.thread = threading.get_ident()
        with _registering:
            _scopes.add(self)
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<Scope {self.counts}>"

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # `os` may be gone by then
        # the thread ended while it held something. In a forked child all other threads have ended:
        # their leases belong to the parent
        if self._process == getpid() and self.counts:
            give_back_later(partial(_give_back, self.counts))

    def __contains__(self, held: Holdable) -> bool:
        return held in self.counts

    def has(self, held: Holdable, all_of_it: Holdable, far: int) -> int:
        """How far up the stack the call is that holds one of them; 0 if no call does.

        Runs at every call. Nonzero means that the lease outlasts a call that begins now. The search
        starts at `far`, which is the result of the last search. A `with` block counts as found at
        `far`.
        """
        counts = self.counts
        if held not in counts and all_of_it not in counts:
            return 0
        call = self.entries[-1].frame if self.entries else None
        if call is None:
            return far
        try:
            if sys._getframe(far) is call:
                return far
        except ValueError:  # the stack is shallower
            pass
        if found := _is_running(call):  # and so are the calls below it
            return found
        self.reap()
        return far if held in counts or all_of_it in counts else 0

    def count_up(self, held: Holdable) -> None:
        """Hold it once more. Raises as `Client.acquire`."""
        count = self.counts.get(held)
        if count is not None:
            count.n += 1
        else:
            kept = self.kept
            self.counts[held] = Count(held.take() if kept is None else kept.take(held))

    def lend(self, held: Holdable) -> None:
        """Count something once more that the caller holds already, under its own lease."""
        count = self.counts.get(held)
        if count is not None:
            count.n += 1
        else:
            self.counts[held] = Count()

    def count_down(self, held: Holdable) -> None:
        """Hold it once less. Raises as a release; it is released all the same."""
        count = self.counts[held]
        count.n -= 1
        if not count.n:
            del self.counts[held]
            if count.give_back is not None:
                count.give_back()

    def enter(
        self, held: Holdable, frame: FrameType | None, by: object, is_call: bool = True
    ) -> None:
        """A call of `by`, or a `with` block, begins. Raises as `Client.acquire`."""
        self.count_up(held)
        self.entries.append(Entry(held, frame, by, is_call))

    def add(self, held: Holdable, by: object) -> Entry:
        """Make an entry of `by` for something already counted; end it with `leave`."""
        self.entries.append(Entry(held, None, by))
        return self.entries[-1]

    def renew(self, components: Mapping[Lender, Collection[str]]) -> None:
        """Acquire again all that this thread holds of these components, which have new bytes.

        Raises as `Client.acquire`; then the thread no longer holds them.
        """
        if self.kept is not None:
            self.kept.end()
        mine = [
            (held, count)
            for held, count in self.counts.items()
            if count.give_back is not None
            and any(held.has_any(client, names) for client, names in components.items())
        ]
        for held, count in reversed(mine):
            # taking one may take others, which go and come with it
            if self.counts.get(held) is count and (give_back := count.give_back) is not None:
                count.give_back = None
                give_back()
        for held, count in mine:
            if self.counts.get(held) is count:
                count.give_back = held.take()

    def find(self, by: object) -> Entry | None:
        """The last entry of `by`, or None."""
        for entry in reversed(self.entries):
            if entry.by is by:
                return entry
        return None

    def leave(self, entry: Entry) -> None:
        """A call, or a block, ends. A second time does nothing. Raises as `count_down`."""
        if self.entries and self.entries[-1] is entry:
            self.entries.pop()
        elif entry in self.entries:
            self.entries.remove(entry)
        else:
            return
        self.count_down(entry.held)

    def reap(self) -> None:
        """Leave the entries of calls that ended unnoticed."""
        if not self.entries:
            return
        for entry in reversed(self.entries):
            if entry.frame is None:
                continue
            if _is_running(entry.frame):  # and so are the calls below it
                return
            with suppress(SwapdError):  # it ended long ago
                self.leave(entry)


def _nothing() -> None:
    pass


def _give_back(counts: "dict[Holdable, Count]") -> None:
    while counts:  # the last first: its release counts down the one that it was taken in
        _, count = counts.popitem()
        if count.give_back is not None:
            with suppress(Exception):
                count.give_back()


def _is_running(call: FrameType) -> int:
    """How far above the caller this frame is on the stack; 0 if it is not."""
    far = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is call:
            return far
        far += 1
        frame = frame.f_back
    return 0


def calling() -> FrameType | None:
    """The frame of the module's call that runs a hook; None if unknown.

    It is unknown in compiled code that inlined the call.
    """
    frame: FrameType | None = sys._getframe(_NEAR)
    for _ in range(_SPARE):
        if frame is None or frame.f_code is CALL:
            return frame
        frame = frame.f_back
    return None


#: The scopes of all threads.
_scopes: "weakref.WeakSet[Scope]" = weakref.WeakSet()
_registering = threading.Lock()


def scopes() -> list[Scope]:
    """The scope of each thread that has held something."""
    with _registering:
        return list(_scopes)


def _in_child() -> None:
    """Another thread of the parent may have held the lock."""
    global _registering
    _registering = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


class _Here(threading.local):
    def __init__(self) -> None:
        self.scope = Scope()


#: Its `scope` has the leases of the calling thread.
thread = _Here()


def here() -> Scope:
    """The scope of the calling thread."""
    return thread.scope
