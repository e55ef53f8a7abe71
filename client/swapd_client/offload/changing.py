"""Weights that change while other threads call the modules that have them.

An update of a component that is held as a whole needs nothing of this: a lease has the old bytes or
the new ones. What a call holds part by part, or does not hold at all (blocks that are streamed,
buffers, mutable weights), changes while no call of it is under way in any other thread, and none
begins. Waited for are calls, not `use` blocks, and not generators between two steps: whoever is in
one may wait for the thread that changes the weights.
"""

import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from swapd_client.lease import Lender
from swapd_client.offload.scope import Holdable, Scope, here, scopes

#: A call that ended by an interrupt says nothing: so it is looked again.
_LOOK_AGAIN_S = 0.1


#: Names of components, by their client.
Components = Mapping[Lender, Collection[str]]


class Change:
    """Of these components the weights are being changed."""

    def __init__(self, components: Components) -> None:
        self._components = components

    def _is_of(self, held: Holdable) -> bool:
        return any(held.has_any(client, names) for client, names in self._components.items())

    def is_called_by(self, scope: Scope) -> bool:
        """Whether a call of any of them is under way in a thread, or begins."""
        # in this order: what begins becomes an entry
        begins = scope.begins
        entries = list(scope.entries)
        if begins is not None and self._is_of(begins):
            return True
        return any(
            entry.is_call
            and self._is_of(entry.held)
            and (entry.frame is None or _is_running(entry.frame, scope.thread))
            for entry in entries
        )

    def is_for(self, scope: Scope) -> bool:
        """Whether the call that begins in a thread has to wait: not in one that is waited for."""
        begins, scope.begins = scope.begins, None
        waits = begins is not None and self._is_of(begins) and not self.is_called_by(scope)
        scope.begins = begins
        return waits


class _Changing:
    """What is changed now, if anything is."""

    def __init__(self) -> None:
        self.start_over()
        os.register_at_fork(after_in_child=self.start_over)  # threads of the parent's are not there

    def start_over(self) -> None:
        #: Read at the beginning and the end of every call.
        self.now: Change | None = None
        #: The thread that changes it; 0: none.
        self.by = 0
        self.one_at_a_time = threading.Lock()
        self.said = threading.Condition()


changing = _Changing()


def wait() -> None:
    """A call begins in this thread, and weights are being changed: wait, if they are its own."""
    scope = here()
    if changing.by == scope.thread:
        return
    while (change := changing.now) is not None and change.is_for(scope):
        begins, scope.begins = scope.begins, None
        with changing.said:
            changing.said.notify_all()
            while changing.now is change:
                changing.said.wait()
        scope.begins = begins


def tell() -> None:
    """A call has ended in this thread."""
    with changing.said:
        changing.said.notify_all()


@contextmanager
def quiet(components: Components) -> Iterator[None]:
    """No call of these components is under way in another thread, and none begins.

    Blocks until those that are under way have ended. In a thread that is in a call itself it does
    nothing: others may wait for that one. Nor in another such block.
    """
    scope = here()
    scope.reap()
    if changing.by == scope.thread or any(entry.is_call for entry in scope.entries):
        yield
        return
    with changing.one_at_a_time:
        changing.by = scope.thread
        change = changing.now = Change(components)
        try:
            others = [one for one in scopes() if one is not scope]
            with changing.said:
                while any(map(change.is_called_by, others)):
                    changing.said.wait(_LOOK_AGAIN_S)
                    others = [one for one in scopes() if one is not scope]
            yield
        finally:
            changing.by, changing.now = 0, None
            tell()


def _is_running(call: FrameType, thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame is call:
            return True
        frame = frame.f_back
    return False
