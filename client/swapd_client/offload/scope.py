"""What each thread holds, counted: the first entry takes, the last gives back.

A call inside a call that holds the same needs no entry: it ends first. A thread's entries are given
back by whoever made them. Those made by a forward that ended by
KeyboardInterrupt or CancelledError are not, since torch then calls no hook: they are found at the
thread's next entry, by the frame of the call, which is not on the stack any more.
"""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Protocol

import torch

from swapd_client.client import Client, Lease
from swapd_client.errors import SwapdError
from swapd_client.offload.aside import Aside
from swapd_client.offload.stream import Stream

#: Every call of a module that has hooks passes through here.
_CALL = torch.nn.Module._call_impl.__code__
#: Above who asks in a hook are at least the hook itself and what keeps it from being compiled...
_NEAR = 3
#: ... then come torch's `inner`, and the call.
_SPARE = 4


class Held(Protocol):
    """Something that a thread holds or does not."""

    #: Whether what `take` gives may be given back by another thread, and taken twice by one.
    is_lease: bool
    #: How many `use` blocks hold it, in any thread: backward may run in one of torch's own.
    uses: int

    def take(self) -> Callable[[], None]:
        """Have it in this thread; what is returned gives it back. Raises as `Client.acquire`."""


class Kept(Protocol):
    """What a thread has of things that it does not hold by any call."""

    def take(self, held: Held) -> Callable[[], None]:
        """As `held.take()`; what is returned may keep it instead."""

    def end(self) -> None:
        """Give all of it back. Raises what giving back raises."""


class Leased:
    """Components under one lease."""

    is_lease = True

    def __init__(self, client: Client, names: list[str]) -> None:
        self.uses = 0
        self._client = client
        #: Of components, as the daemon knows them. May change while nobody holds it.
        self.names = names

    def __repr__(self) -> str:
        return f"<Leased {' + '.join(self.names)}>"

    def take(self) -> Callable[[], None]:
        lease = self.lease()
        return _nothing if lease is None else lease.release

    def lease(self) -> Lease | None:
        """Acquire them. None: all of it is in private memory again. Raises as `Client.acquire`."""
        return self._client.acquire(*self.names) if self.names else None


class Passed:
    """A component that is streamed: what is in no block, for one pass through its blocks."""

    is_lease = False

    def __init__(self, stream: Stream, beside: Leased | None, everything: Leased) -> None:
        """`beside`: what it has that is in none of the stream's parts. `everything`: all of it."""
        self.uses = 0
        self.stream = stream
        self.everything = everything
        #: The hooks of its blocks.
        self.hooks = Aside()
        self._beside = beside

    def __repr__(self) -> str:
        return f"<Passed {self.stream.family}>"

    def take(self) -> Callable[[], None]:
        give_back = self._beside.take() if self._beside is not None else _nothing
        try:
            self.stream.enter()
        except BaseException:
            give_back()
            raise

        has_all, scope = self.stream.has_all(), here()
        if has_all:  # then its blocks are nothing to hold
            scope.lend(self.everything)
        self.hooks.begin(whole=has_all)

        def leave() -> None:
            self.hooks.end(whole=has_all)
            if has_all:
                scope.count_down(self.everything)
            try:
                self.stream.leave()
            finally:
                give_back()

        return leave


class Block:
    """One block of a component that is streamed, and so the component's pass."""

    is_lease = False

    def __init__(self, whole: Passed, number: int) -> None:
        self.uses = 0
        self._whole = whole
        self._number = number

    def __repr__(self) -> str:
        return f"<Block {self._number} of {self._whole.stream.family}>"

    def take(self) -> Callable[[], None]:
        scope = here()
        scope.count_up(self._whole)
        try:
            self._whole.stream.need(self._number)
        except BaseException:
            scope.count_down(self._whole)
            raise

        def give_back() -> None:
            try:
                self._whole.stream.done(self._number)
            finally:
                scope.count_down(self._whole)

        return give_back


class Entry:
    """One call, or one `with` block, under something held."""

    __slots__ = ("by", "frame", "held")

    def __init__(self, held: Held, frame: FrameType | None, by: object) -> None:
        self.held = held
        #: The call; None if its end is sure to be heard of.
        self.frame = frame
        self.by = by


class _Count:
    __slots__ = ("give_back", "n")

    def __init__(self, give_back: Callable[[], None]) -> None:
        self.n = 1
        self.give_back = give_back


class Scope:
    """What one thread holds. Used by that thread alone."""

    def __init__(self) -> None:
        self._counts: dict[Held, _Count] = {}
        self._entries: list[Entry] = []
        #: Through it things are taken, if there is one; see `turn.py`.
        self.kept: Kept | None = None

    def __repr__(self) -> str:
        return f"<Scope {self._counts}>"

    def __del__(self) -> None:
        # the thread has ended, and left something behind
        for count in list(self._counts.values()):  # giving one back may count down another
            with suppress(Exception):
                count.give_back()

    def __contains__(self, held: Held) -> bool:
        return held in self._counts

    def has(self, held: Held, all_of_it: Held) -> bool:
        """Whether one of them is held for longer than a call that begins now.

        Asked at every call, so in few words: Python that has not run for a millisecond is slow.
        """
        counts = self._counts
        if held not in counts and all_of_it not in counts:
            return False
        call = self._entries[-1].frame if self._entries else None
        if call is None or _is_running(call):  # so is what is below it
            return True
        self.reap()
        return held in counts or all_of_it in counts

    def count_up(self, held: Held) -> None:
        """Hold once more. Raises as `Client.acquire`."""
        count = self._counts.get(held)
        if count is not None:
            count.n += 1
        else:
            self._counts[held] = _Count(self.take(held))

    def take(self, held: Held) -> Callable[[], None]:
        """Have it; what is returned gives it back. Raises as `Client.acquire`."""
        return held.take() if self.kept is None else self.kept.take(held)

    def lend(self, held: Held) -> None:
        """Hold once more what is there anyway, under a lease of the caller's."""
        count = self._counts.get(held)
        if count is not None:
            count.n += 1
        else:
            self._counts[held] = _Count(_nothing)

    def count_down(self, held: Held) -> None:
        """Hold once less. Raises what giving back raises; then it is given back all the same."""
        count = self._counts[held]
        count.n -= 1
        if not count.n:
            del self._counts[held]
            count.give_back()

    def enter(self, held: Held, frame: FrameType | None, by: object) -> None:
        """A call of `by`, or a `with` block, begins. Raises as `Client.acquire`."""
        self.count_up(held)
        self._entries.append(Entry(held, frame, by))

    def find(self, by: object) -> Entry | None:
        """The last entry of `by`; None if there is none."""
        for entry in reversed(self._entries):
            if entry.by is by:
                return entry
        return None

    def leave(self, entry: Entry) -> None:
        """A call, or a block, ends. Once: said again it is not said. Raises as `count_down`."""
        if self._entries and self._entries[-1] is entry:
            self._entries.pop()
        elif entry in self._entries:
            self._entries.remove(entry)
        else:
            return
        self.count_down(entry.held)

    def reap(self) -> None:
        """Leave what calls left behind that ended without a word."""
        if not self._entries:
            return
        for entry in reversed(self._entries):
            if entry.frame is None:
                continue
            if _is_running(entry.frame):  # and so are those below it
                return
            with suppress(SwapdError):  # it ended long ago
                self.leave(entry)


def _nothing() -> None:
    pass


def _is_running(call: FrameType) -> bool:
    """Whether this frame is on the stack of the thread that asks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is call:
            return True
        frame = frame.f_back
    return False


def calling() -> FrameType | None:
    """The call of a module that one of its hooks is run by; None if it cannot be told.

    In compiled code it cannot, if the call was made part of its caller's.
    """
    frame: FrameType | None = sys._getframe(_NEAR)
    for _ in range(_SPARE):
        if frame is None or frame.f_code is _CALL:
            return frame
        frame = frame.f_back
    return None


class _Here(threading.local):
    def __init__(self) -> None:
        self.scope = Scope()


_here = _Here()


def here() -> Scope:
    """What the calling thread holds."""
    return _here.scope
