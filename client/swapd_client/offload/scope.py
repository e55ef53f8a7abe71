"""What each thread holds, counted: the first entry takes, the last gives back.

A call inside a call that holds the same needs no entry: it ends first. A thread's entries are given
back by whoever made them. Those made by a forward that ended by
KeyboardInterrupt or CancelledError are not, since torch then calls no hook: they are found at the
thread's next entry, by the frame of the call, which is not on the stack any more.
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

from swapd_client.errors import SwapdError
from swapd_client.lease import Lease, Lender
from swapd_client.offload.collected import give_back_later
from swapd_client.offload.stream import Stream

#: Every call of a module that has hooks passes through here.
CALL = torch.nn.Module._call_impl.__code__
#: Above who asks for a hook are at least its gate, the hook itself and torch's `inner`...
_NEAR = 3
#: ... then comes the call; what keeps a hook from being compiled is in between.
_SPARE = 6


class Holdable(Protocol):
    """Something that a thread holds or does not."""

    #: Whether what `take` gives may be given back by another thread, and taken twice by one.
    is_lease: bool
    #: How many `use` blocks hold it, in any thread: backward may run in one of torch's own.
    uses: int

    def take(self) -> Callable[[], None]:
        """Have it in this thread; what is returned gives it back. Raises as `Client.acquire`."""

    def has_any(self, client: Lender, names: Collection[str]) -> bool:
        """Whether it is of any of these components of a client."""


class Hooks(Protocol):
    """The hooks of a component's blocks, out of the way of passes that need none of them."""

    def add(self, pair: Any) -> None:
        """Have those of one module put aside from now on; while no pass is under way."""

    def begin(self, *, whole: bool) -> None:
        """A pass begins that holds all of it, or goes block by block."""

    def end(self, *, whole: bool) -> None:
        """It has ended."""


class Kept(Protocol):
    """What a thread has of things that it does not hold by any call."""

    def take(self, held: Holdable) -> Callable[[], None]:
        """As `held.take()`; what is returned may keep it instead."""

    def end(self) -> None:
        """Give all of it back. Raises what giving back raises."""


class Leased:
    """Components under one lease."""

    is_lease = True

    def __init__(self, client: Lender, names: list[str]) -> None:
        self.uses = 0
        self._client = client
        #: Of components, as the daemon knows them. May change while nobody holds it.
        self.names = names

    def __repr__(self) -> str:
        return f"<Leased {' + '.join(self.names)}>"

    def take(self) -> Callable[[], None]:
        if not self.names:  # as lease
            return _nothing
        lease = self._client.acquire(*self.names)
        lease._is_answered_for = True
        return lease.release

    def has_any(self, client: Lender, names: Collection[str]) -> bool:
        return client is self._client and not set(names).isdisjoint(self.names)

    def lease(self) -> Lease | None:
        """As `take`, for something that gives it back even when it is garbage; None if there is
        nothing to acquire, as all of it is in private memory again."""
        if not self.names:
            return None
        lease = self._client.acquire(*self.names)
        lease._is_answered_for = True
        return lease


class Passed:
    """A component that is streamed: what is in no block, for one pass through its blocks."""

    is_lease = False

    def __init__(
        self, stream: Stream, beside: Leased | None, everything: Leased, hooks: Hooks
    ) -> None:
        """`beside`: what it has that is in none of the stream's parts. `everything`: all of it."""
        self.uses = 0
        self.stream = stream
        self.everything = everything
        #: Those of its blocks.
        self.hooks = hooks
        self._beside = beside

    def __repr__(self) -> str:
        return f"<Passed {self.stream.family}>"

    def take(self) -> Callable[[], None]:
        beside = self._beside.take() if self._beside is not None else None
        try:
            lease = self.stream.whole()
            if lease is None:
                self.stream.enter()
        except BaseException:
            if beside is not None:
                beside()
            raise
        if lease is None:
            self.hooks.begin(whole=False)
            return partial(self._leave, beside)
        scope = thread.scope
        scope.lend(self.everything)  # then its blocks are nothing to hold
        self.hooks.begin(whole=True)
        return partial(self._leave_whole, scope, lease, beside)

    def has_any(self, client: Lender, names: Collection[str]) -> bool:
        return self.everything.has_any(client, names)

    def _leave(self, beside: Callable[[], None] | None) -> None:
        self.hooks.end(whole=False)
        try:
            self.stream.leave()
        finally:
            if beside is not None:
                beside()

    def _leave_whole(self, scope: "Scope", lease: Lease, beside: Callable[[], None] | None) -> None:
        self.hooks.end(whole=True)
        scope.count_down(self.everything)
        try:
            lease.release()
        finally:
            if beside is not None:
                beside()


class Block:
    """One block of a component that is streamed, and so the component's pass."""

    is_lease = False

    def __init__(self, whole: Passed, number: int | None) -> None:
        """`number`: which block; None: a layer beside them, which the pass alone is for."""
        self.uses = 0
        self._whole = whole
        self._number = number
        #: What it is beside the pass.
        self.names = () if number is None else (whole.stream.parts[number],)

    def __repr__(self) -> str:
        block = "A layer" if self._number is None else f"Block {self._number}"
        return f"<{block} of {self._whole.stream.family}>"

    def take(self) -> Callable[[], None]:
        scope, whole, number = here(), self._whole, self._number
        # it was called by its hooks, and is left by them: whatever is in, they stay
        whole.hooks.begin(whole=False)
        try:
            scope.count_up(whole)
            try:
                if number is not None and whole.everything in scope:
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


# These two are made at every forward, and by msgspec: no Python runs for it.


class Entry(msgspec.Struct, eq=False):
    """One call, or one `with` block, under something held."""

    held: Any
    #: The call; None if its end is sure to be heard of.
    frame: Any
    by: object
    #: Not a `with` block.
    is_call: bool = True


class Count(msgspec.Struct, eq=False):
    #: None if it was lent.
    give_back: Callable[[], None] | None = None
    n: int = 1


class Scope:
    """What one thread holds. Used by that thread alone."""

    def __init__(self) -> None:
        #: What is held, and how often.
        self.counts: dict[Holdable, Count] = {}
        #: The last is the innermost.
        self.entries: list[Entry] = []
        #: Through it things are taken, if there is one; see `between_calls.py`.
        self.kept: Kept | None = None
        #: What a call that begins is going to hold, until it is an entry; see `changing.py`.
        self.begins: Holdable | None = None
        self.thread = threading.get_ident()
        with _registering:
            _scopes.add(self)
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<Scope {self.counts}>"

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # `os` may be gone by then
        # the thread has ended, and left something behind. In a forked child all but one have: what
        # they held is the parent's
        if self._process == getpid() and self.counts:
            give_back_later(partial(_give_back, self.counts))

    def __contains__(self, held: Holdable) -> bool:
        return held in self.counts

    def has(self, held: Holdable, all_of_it: Holdable, far: int) -> int:
        """Whether one of them is held for longer than a call that begins now; 0 if not.

        Asked at every call. Else it is how far up the stack the call is that holds them, for the
        next time: `far` is where to look first.
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
        except ValueError:  # the stack is not that deep
            pass
        if found := _is_running(call):  # and so is what is below it
            return found
        self.reap()
        return far if held in counts or all_of_it in counts else 0

    def count_up(self, held: Holdable) -> None:
        """Hold once more. Raises as `Client.acquire`."""
        count = self.counts.get(held)
        if count is not None:
            count.n += 1
        else:
            kept = self.kept
            self.counts[held] = Count(held.take() if kept is None else kept.take(held))

    def lend(self, held: Holdable) -> None:
        """Hold once more what is there anyway, under a lease of the caller's."""
        count = self.counts.get(held)
        if count is not None:
            count.n += 1
        else:
            self.counts[held] = Count()

    def count_down(self, held: Holdable) -> None:
        """Hold once less. Raises what giving back raises; then it is given back all the same."""
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
        """Something that is held, and counted, is now by a call of `by`; to `leave`."""
        self.entries.append(Entry(held, None, by))
        return self.entries[-1]

    def renew(self, components: Mapping[Lender, Collection[str]]) -> None:
        """Hold anew what is held of these, which have new bytes. Raises as `Client.acquire`; then
        it is not held any more."""
        if self.kept is not None:
            self.kept.end()
        mine = [
            (held, count)
            for held, count in self.counts.items()
            if count.give_back is not None
            and any(held.has_any(client, names) for client, names in components.items())
        ]
        for held, count in reversed(mine):
            # what was taken for another of them goes, and comes, with that one
            if self.counts.get(held) is count and (give_back := count.give_back) is not None:
                count.give_back = None
                give_back()
        for held, count in mine:
            if self.counts.get(held) is count:
                count.give_back = held.take()

    def find(self, by: object) -> Entry | None:
        """The last entry of `by`; None if there is none."""
        for entry in reversed(self.entries):
            if entry.by is by:
                return entry
        return None

    def leave(self, entry: Entry) -> None:
        """A call, or a block, ends. Once: said again it is not said. Raises as `count_down`."""
        if self.entries and self.entries[-1] is entry:
            self.entries.pop()
        elif entry in self.entries:
            self.entries.remove(entry)
        else:
            return
        self.count_down(entry.held)

    def reap(self) -> None:
        """Leave what calls left behind that ended without a word."""
        if not self.entries:
            return
        for entry in reversed(self.entries):
            if entry.frame is None:
                continue
            if _is_running(entry.frame):  # and so are those below it
                return
            with suppress(SwapdError):  # it ended long ago
                self.leave(entry)


def _nothing() -> None:
    pass


def _give_back(counts: "dict[Holdable, Count]") -> None:
    while counts:  # the last first: giving it back counts down what it was taken in
        _, count = counts.popitem()
        if count.give_back is not None:
            with suppress(Exception):
                count.give_back()


def _is_running(call: FrameType) -> int:
    """How far above who asks this frame is on the stack; 0 if it is not."""
    far = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is call:
            return far
        far += 1
        frame = frame.f_back
    return 0


def calling() -> FrameType | None:
    """The call of a module that one of its hooks is run by; None if it cannot be told.

    In compiled code it cannot, if the call was made part of its caller's.
    """
    frame: FrameType | None = sys._getframe(_NEAR)
    for _ in range(_SPARE):
        if frame is None or frame.f_code is CALL:
            return frame
        frame = frame.f_back
    return None


#: Those of all threads.
_scopes: "weakref.WeakSet[Scope]" = weakref.WeakSet()
_registering = threading.Lock()


def scopes() -> list[Scope]:
    """What each thread holds that has asked for anything yet."""
    with _registering:
        return list(_scopes)


def _in_child() -> None:
    """Another thread of the parent may have held it."""
    global _registering
    _registering = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


class _Here(threading.local):
    def __init__(self) -> None:
        self.scope = Scope()


#: What the calling thread holds is its `scope`.
thread = _Here()


def here() -> Scope:
    """What the calling thread holds."""
    return thread.scope
