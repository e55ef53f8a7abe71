"""Weights that change while other threads call the modules that use them.

An update of a component that calls hold as a whole needs none of this: a lease has the old bytes or
the new ones. Other weights are held part by part or not at all: streamed blocks, buffers, mutable
weights. They change while no other thread is in a call of the component, and none begins. The
change waits for calls only. It does not wait for `use` blocks or for generators between two steps:
a thread inside one may be waiting for the thread that changes the weights.
"""

import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from swapd_client.offload.lender import Lender
from swapd_client.offload.scope import Holdable, Scope, here, scopes

#: A call that an interrupt ended sends no signal, so the wait polls.
_LOOK_AGAIN_S = 0.1


#: Names of components, by their client.
Components = Mapping[Lender, Collection[str]]


class Change:
    """A change of these components' weights, under way."""

    def __init__(self, components: Components) -> None:
        self._components = components

    def _is_of(self, held: Holdable) -> bool:
        return any(held.has_any(client, names) for client, names in self._components.items())

    def is_called_by(self, scope: Scope) -> bool:
        """Whether a thread is in a call of any of them, or begins one."""
        # in this order: a call that begins becomes an entry
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
        """Whether a thread's new call must wait: not if the change waits for that thread."""
        begins, scope.begins = scope.begins, None
        waits = begins is not None and self._is_of(begins) and not self.is_called_by(scope)
        scope.begins = begins
        return waits


class _Changing:
    """The change under way, if any."""

    def __init__(self) -> None:
        self.start_over()
        # the child has none of the parent's threads
        os.register_at_fork(after_in_child=self.start_over)

    def start_over(self) -> None:
        #: Read at the beginning and the end of every call.
        self.now: Change | None = None
        #: The thread that makes the change; 0: none.
        self.by = 0
        self.one_at_a_time = threading.Lock()
        self.said = threading.Condition()


changing = _Changing()


def wait() -> None:
    """Called when a call begins while weights change: wait, if they are weights of that call."""
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
    """Called when a call has ended in this thread."""
    with changing.said:
        changing.said.notify_all()


@contextmanager
def quiet(components: Components) -> Iterator[None]:
    """A `with` block during which no other thread is in a call of these components.

    Blocks until the calls under way have ended. In a thread that is itself in a call it does
    nothing, since other threads may wait for that one; nor inside another such block.
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
