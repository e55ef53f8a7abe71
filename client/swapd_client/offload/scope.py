"""Counts the leases that each thread holds: the first entry acquires, the last one releases.

Each entry is left by its creator, also after an interrupt. A call inside a call that holds the same
needs no entry.

In a request of several calls, a thread keeps leases between calls, for a limited time and never
while it waits for another acquire. So other sessions cannot evict a DiT between two steps.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from swapd.shared import protocol
from swapd_client.errors import SessionEnded, SwapdError, UnknownComponent
from swapd_client.finalizers import give_back_later
from swapd_client.interrupts import covered_block, to_its_end
from swapd_client.lease import Lease
from swapd_client.memory.part import Part
from swapd_client.offload.lender import AttachClient
from swapd_client.session.session import Session

T = TypeVar("T")


# Made at every forward; msgspec runs no Python code for it.
class Entry(msgspec.Struct, eq=False):
    """One call, or one `with` block, that holds something."""

    held: Any
    by: object
    is_call: bool = True
    #: Whether calls inside need no check of gradients.
    is_checked: bool = True
    #: Whether a holdable made this entry, to hold another one.
    is_inner: bool = False


class Count(msgspec.Struct, eq=False):
    #: May be called again. None if the lease is the caller's own.
    give_back: Callable[[], None] | None = None
    n: int = 0

    def undo(self) -> None:
        """Give back after an error, which is the one to report."""
        if self.give_back is not None:
            with suppress(SwapdError):
                self.give_back()
            self.give_back = None


#: Acquires something for the thread of a scope. An interrupt may come before this returns, so it
#: notes the release in the count, not later than it acquires. Raises as `Client.acquire`.
Take = Callable[["Scope", Count], None]


class Holdable(Protocol):
    """What a thread can acquire: a component, a pass through a streamed one, or one block of it."""

    #: Whether another thread may release it, and one thread may take it twice.
    is_lease: bool
    #: The `use` blocks that hold it, in any thread: backward may run in a thread of torch's.
    uses: "set[Entry]"

    @property
    def client(self) -> AttachClient: ...

    def take(self, scope: "Scope", count: Count) -> None:
        """Acquire it for the thread of `scope`. See `Take`."""

    def has_any(self, client: AttachClient, names: Collection[str]) -> bool: ...


@dataclass(eq=False, repr=False)
class ComponentHold:
    is_lease = True
    client: AttachClient
    #: Names in the daemon. The next `take` drops those of components that have become private.
    names: list[str]
    uses: set[Entry] = field(default_factory=set)
    #: What was acquired after this the last time, and the session that was told so.
    next: "weakref.ref[ComponentHold] | None" = None
    told: weakref.ref[Session] | None = None

    def take(self, scope: "Scope", count: Count) -> None:
        lease = self.lease()
        if lease is not None:
            count.give_back = lease.release
            lease.answered_for()

    def has_any(self, client: AttachClient, names: Collection[str]) -> bool:
        return client is self.client and not set(names).isdisjoint(self.names)

    def lease(self) -> Lease | None:
        """Return a lease on all of it, or None if it is private again.

        Raises as `Client.acquire`.
        """
        unknown: list[Part | None] | None = None
        while self.names:
            try:
                return self.client.leasing.take(tuple(self.names))
            except UnknownComponent:
                components = self.client.session.components
                parts = [components.get(name) for name in self.names]
                if parts == unknown:
                    raise
                unknown = parts  # not at once: another thread may just have attached the model anew
                self.names[:] = [part.name for part in parts if part is not None]
        return None

    def is_before(self, held: "ComponentHold") -> None:
        """If `held` is acquired after this twice in turn, tell the daemon.

        The daemon then loads `held` while this is in use.
        """
        leasing, session = self.client.leasing, self.client.session
        if self.next is None or self.next() is not held:
            self.next, self.told = weakref.ref(held), None
        elif held.client is self.client and (self.told is None or self.told() is not session):
            self.told = weakref.ref(session)
            with suppress(SwapdError, IndexError):  # the acquire will raise it; or it is private
                names, after = tuple(held.names), self.names[0]
                leasing.call(protocol.Follows(session.next_id(), names, after, seen=True))

    def registered(self) -> list[str]:
        components = self.client.session.components
        return [name for name in self.names if name in components]


class Scope:
    """The leases of one thread, which alone changes them."""

    def __init__(self) -> None:
        #: How often each holdable is held.
        self.counts: dict[Holdable, Count] = {}
        #: Entries of calls and `with` blocks, the innermost last.
        self.entries: list[Entry] = []
        #: Entries made by holdables.
        self.inner: list[Entry] = []
        #: The request that this thread is in, if any: leases are taken through it.
        self.request: RequestLeases | None = None
        #: The last component acquired.
        self.last: weakref.ref[ComponentHold] | None = None
        #: The holdable of a beginning call, until the call is an entry; see `update_barrier.py`.
        self.begins: Holdable | None = None
        self.thread = threading.get_ident()
        _scopes[self] = None
        self._process = os.getpid()

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # `os` may be gone by then
        # the thread ended while it held something. In a forked child, leases belong to the parent
        if self._process == getpid() and self.counts:
            give_back_later(partial(_give_back, self.counts))

    def take(self, held: Holdable, take: Take, count: Count) -> None:
        """Call `take`. If the daemon is gone, call it again once the client has joined the next.

        If the client has made the weights private memory instead, no lease is needed.
        """
        try:
            return take(self, count)
        except SessionEnded as exc:
            count.undo()
            is_private = not held.client._daemon_gone(exc)
            exc.__traceback__ = None  # its frames would keep the model as long as the old session
        if not is_private:
            take(self, count)

    def enter(self, entry: Entry, *, lent: bool = False) -> None:
        """Begin a call or a `with` block. Raises as `Client.acquire`.

        `lent`: the caller holds it already, under its own lease.
        """
        held, request = entry.held, self.request
        entries = self.inner if entry.is_inner else self.entries
        count = self.counts.get(held)
        if count is None:
            count = Count()
            if isinstance(held, ComponentHold) and not entry.is_inner:
                self._note_order(held)
            if not lent:
                take = held.take if request is None else partial(request.take, held)
                try:
                    self.take(held, take, count)
                except BaseException:
                    count.undo()
                    raise
        count.n += 1
        self.counts[held] = count
        entries.append(entry)

    def _note_order(self, held: ComponentHold) -> None:
        last = None if self.last is None else self.last()
        if last is not held:
            self.last = weakref.ref(held)
            if last is not None:
                last.is_before(held)

    def leave(self, entry: Entry) -> None:
        """End a call or a block. No-op if it holds nothing.

        Raises as a release; the lease is released all the same.
        """
        entries = self.inner if entry.is_inner else self.entries
        if entry not in entries:
            return
        count = self.counts[entry.held]
        count.n -= 1  # no interrupt can come before the entry is gone
        if not count.n:
            del self.counts[entry.held]
        give_back = None if count.n else count.give_back
        try:
            entries.remove(entry)
        finally:  # also after an interrupt
            if give_back is not None:
                give_back()

    def renew(self, components: Mapping[AttachClient, Collection[str]]) -> None:
        """Acquire again all that this thread holds of these components, which have new bytes.

        Raises as `Client.acquire`; then the thread no longer holds them.
        """
        mine = [
            (held, count)
            for held, count in self.counts.items()
            if count.give_back is not None and is_of(held, components)
        ]
        for held, count in reversed(mine):
            # one may hold others, which are released and acquired with it
            if self.counts.get(held) is count and count.give_back is not None:
                count.give_back()
                count.give_back = None
        if self.request is not None:
            self.request.end()
        for held, count in mine:
            if self.counts.get(held) is count:
                held.take(self, count)


def is_of(held: Holdable, components: Mapping[AttachClient, Collection[str]]) -> bool:
    return any(held.has_any(client, names) for client, names in components.items())


def _give_back(counts: "dict[Holdable, Count]") -> None:
    while counts:  # the last first: its release counts down the one that it was taken in
        _, count = counts.popitem()
        if count.give_back is not None:
            with suppress(Exception):
                count.give_back()


class RequestLeases:
    """The leases that a thread keeps between the calls of a request. Only that thread uses it."""

    def __init__(self, client: AttachClient, within_s: float) -> None:
        """`within_s`: how long to keep components that others want."""
        self._client = client
        self._within_s = within_s
        #: When to release wanted components; None if no component is wanted.
        self._until: float | None = None
        self._kept: dict[ComponentHold, Lease] = {}

    def take(self, held: Holdable, scope: Scope, count: Count) -> None:
        """As `held.take`, but the release may keep the lease."""
        if not isinstance(held, ComponentHold):
            self.end()
            return held.take(scope, count)
        lease = self._kept.pop(held, None)
        if lease is None:
            self.end()
            lease = held.lease()
        if lease is not None:
            count.give_back = lease.release
            lease.answered_for()
            count.give_back = partial(to_its_end, partial(self._leave, held, lease))

    def end(self) -> None:
        self._until = None
        while self._kept:
            self._kept.popitem()[1].release()

    def _leave(self, held: ComponentHold, lease: Lease) -> None:
        if not lease.held:
            return
        if not self._client.session.told.wanted.isdisjoint(held.names):
            now = time.monotonic()
            self._until = now + self._within_s if self._until is None else self._until
            if now >= self._until:
                self._until = None
                return lease.release()
        lease.rests()
        self._kept[held] = lease


@covered_block
def kept_between_calls(client: AttachClient, within_s: float) -> Generator[None, None, None]:
    """Make the block a request: its thread keeps leases on `client`'s components between calls.

    `within_s`: seconds to keep a lease after another session wants the memory. A request within a
    request does nothing.
    """
    scope = here()
    if scope.request is not None:
        yield
        return
    request = scope.request = RequestLeases(client, within_s)
    try:
        yield
    finally:
        scope.request = None
        to_its_end(request.end)


_scopes: "weakref.WeakKeyDictionary[Scope, None]" = weakref.WeakKeyDictionary()


def scopes() -> list[Scope]:
    return living(_scopes)


def living(known: "weakref.WeakKeyDictionary[T, None]") -> list[T]:
    """Return the keys that still live. Other threads may add some meanwhile."""
    return [one for ref in known.keyrefs() if (one := ref()) is not None]


class _ThreadScope(threading.local):
    def __init__(self) -> None:
        self.scope = Scope()


thread = _ThreadScope()


def here() -> Scope:
    return thread.scope
