"""Keeps calls away while weights change that these calls do not hold as a whole.

These are streamed blocks, buffers and mutable weights; a lease on a whole component has the old
bytes or the new ones. A change waits until no other thread is in a call of the component. It does
not wait for `use` blocks or for generators between two steps: a thread inside one may be waiting
for the thread that changes the weights.
"""

import os
import threading
from collections.abc import Collection, Generator, Mapping

from swapd_client.interrupts import covered_block, to_its_end
from swapd_client.log import log
from swapd_client.offload.lender import AttachClient
from swapd_client.offload.scope import Scope, here, is_of, scopes

#: Seconds until a waiting change logs the threads it waits for.
_SAY_AFTER_S = 10.0

Components = Mapping[AttachClient, Collection[str]]


def calls(scope: Scope, components: Components) -> bool:
    """Return whether the thread of `scope` is in a call of these components, or begins one."""
    # in this order, since a call that begins becomes an entry
    begins = scope.begins
    entries = list(scope.entries)
    if begins is not None and is_of(begins, components):
        return True
    return any(entry.is_call and is_of(entry.held, components) for entry in entries)


class _WeightChange:
    def __init__(self) -> None:
        self.start_over()
        # the child has none of the parent's threads
        os.register_at_fork(after_in_child=self.start_over)

    def start_over(self) -> None:
        #: What changes now. Every call reads it when it begins and ends.
        self.now: Components | None = None
        #: The thread that makes the change, or 0.
        self.by = 0
        self.one_at_a_time = threading.Lock()
        self.lock = threading.RLock()
        self.told = threading.Condition(self.lock)

    def tell(self) -> None:
        with self.lock:
            self.told.notify_all()

    def end(self) -> None:
        self.by, self.now = 0, None
        self.tell()


_changing = _WeightChange()


def await_changes(scope: Scope) -> None:
    """Wait while the weights of a beginning call change. First set `scope.begins`."""
    if _changing.now is None or _changing.by == scope.thread:
        return
    held = scope.begins
    assert held is not None
    while (change := _changing.now) is not None:
        scope.begins = None
        if not is_of(held, change) or calls(scope, change):
            break  # else the change would wait for the call, and the call for the change
        with _changing.lock:
            _changing.told.notify_all()
            while _changing.now is change:
                _changing.told.wait()
        scope.begins = held
    scope.begins = held


def tell() -> None:
    """Wake a waiting change: a call of this thread has ended, or failed to begin."""
    if _changing.now is not None:
        _changing.tell()


@covered_block
def quiet(components: Components) -> Generator[None, None, None]:
    """A `with` block during which no other thread is in a call of these components.

    Blocks until the calls under way have ended, and logs the threads if that takes long. Within
    another such block, these components stay quiet until that one ends. No-op in a thread that is
    in a call itself, since others may wait for that thread.
    """
    scope = here()
    if any(entry.is_call for entry in scope.entries):
        yield
        return
    if _changing.by == scope.thread:
        _widen(components, scope)
        yield
        return
    with _changing.one_at_a_time:
        try:
            _changing.by, _changing.now = scope.thread, _together({}, components)
            _await_calls(components, scope)
            yield
        finally:
            to_its_end(_changing.end)


def _widen(components: Components, scope: Scope) -> None:
    before = _changing.now or {}
    if (wider := _together(before, components)) == before:
        return
    _changing.now = wider
    tell()  # a call that waits inside a call of these goes on, or both would wait for ever
    _await_calls(wider, scope)


def _together(some: Components, others: Components) -> Components:
    return {
        client: frozenset((*some.get(client, ()), *others.get(client, ())))
        for client in dict.fromkeys((*some, *others))
    }


def _await_calls(components: Components, scope: Scope) -> None:
    with _changing.lock:
        while calling := [s for s in scopes() if s is not scope and calls(s, components)]:
            if not _changing.told.wait(_SAY_AFTER_S):
                names = {thread.ident: thread.name for thread in threading.enumerate()}
                log.warning(
                    "new weights wait for calls in these threads to end: %s",
                    ", ".join(repr(names.get(s.thread, s.thread)) for s in calling),
                )
