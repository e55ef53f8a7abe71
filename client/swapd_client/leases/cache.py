"""The leases of one client's threads: in use, or kept for the next use.

A lease that was used again within KEEP_S is kept after its next release, too, until it has been
unused for KEEP_S; for LINGER_S while the daemon asks to hurry, because an acquire waits for memory.
A lease with components that others wait for is not kept.

Two dictionaries are the state:

- `records`: every lease, by its thread and names, from before its request is sent until the
  daemon was told of its end;
- `holders`: by the same key, a weak reference to the `Lease` that uses it, or to a call that gives
  it back. Without a living reference, the lease is kept.

Whoever puts its reference first has the lease (`dict.setdefault` is atomic), so a use takes no
lock. A signal handler may raise anywhere: then the `Lease` dies with its frames, and the lease is
kept again. The lifeline's thread gives back leases that were kept long enough.
"""

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from math import inf
from typing import Any

from swapd_client.leases.record import Record

#: Seconds that a lease is kept after its last use; and while an acquire waits for memory.
KEEP_S, LINGER_S = 0.5, 0.002
#: The daemon hears of a lease this often, even if it is used all the time.
UNTOLD_S = 1.0

#: The thread that took the lease, the requested names, and a number if it has several.
Key = tuple[Any, ...]


class _Claim:
    __slots__ = ("__weakref__",)


class Cache:
    def __init__(self, ring: Callable[[], None]) -> None:
        """`ring()` makes the lifeline's thread sweep; it may be called anywhere."""
        self.records: dict[Key, Record] = {}
        self.holders: dict[Key, weakref.ref[Any]] = {}
        #: Last use of leases that are over, by key.
        self.left: dict[Key, float] = {}
        #: The lease that each thread used last, and keeps.
        self.latest: dict[int, Record] = {}
        self.closed = False
        self.naps_s = inf
        self.ring = ring
        #: Never taken by a use of a kept lease. Re-entrant: a signal handler may acquire.
        self.lock: Any = threading.RLock()

    def used(self, thread: int) -> tuple[int, ...]:
        self.free()
        mine = [(key, ref()) for key, ref in self.holders.copy().items() if key[0] == thread]
        in_use = [key for key, holder in mine if not isinstance(holder, _Claim | None)]
        return tuple(record.id for key in in_use if (record := self.records.get(key)) is not None)

    def kept(self) -> set[int]:
        self.free()
        return {one.id for key, one in self.records.copy().items() if key not in self.holders}

    def free(self) -> None:
        """Keep the leases whose holders were collected."""
        with self.lock:
            for key, ref in self.holders.copy().items():
                # a release takes its lease out before it dies
                if ref() is not None or self.holders.get(key) is not ref:
                    continue
                record = self.records.get(key)
                if record is not None and not record.is_asked:
                    record.unmarked = True  # nobody has marked the work under it
                    self._warn(record)
                if self.holders.get(key) is ref:
                    del self.holders[key]

    def _warn(self, record: Record) -> None:
        if record.is_answered_for:
            return
        with suppress(ResourceWarning):  # as an error it would end the lifeline's thread
            warnings.warn(
                f"a lease of {' + '.join(record.names)} was never released, so it ends now that no "
                "object holds it: use it in a `with` block, or call release()",
                ResourceWarning,
                stacklevel=2,
            )

    def each(
        self,
        do: Callable[[Key, Record], object],
        only: Callable[[Key, Record], bool] = lambda *_: True,
    ) -> None:
        """Call `do` for each kept lease that passes `only`, while nobody else can take it.

        The least recently used comes first, so that leases are evicted in this order.
        """
        if not self.records:
            return
        claim = _Claim()
        ref = weakref.ref(claim)
        with self.lock:
            self.free()
            for key, record in sorted(self.records.copy().items(), key=_since):
                try:
                    may = only(key, record) and self.holders.setdefault(key, ref) is ref
                    if may and self.records.get(key) is record:
                        do(key, record)
                finally:
                    if key in self.holders and self.holders[key] is ref:
                        del self.holders[key]

    def due(self, wanted: Collection[str], *, hurried: bool) -> list[Key]:
        now, limit = time.monotonic(), LINGER_S if hurried else KEEP_S
        waiting = {key[0] for key, record in self.records.copy().items() if record.is_asked}
        return [
            key
            for key, record in self.records.copy().items()
            if not record.may_be_kept
            or (wanted and record.has_any(wanted))
            or (hurried and key[0] in waiting)
            or max(now - record.since, record.gap_s) >= limit
        ]

    def nap_s(self, *, busy: bool) -> float:
        """Return the seconds until the next sweep."""
        if not self.records:
            return inf
        kept = busy and any(key not in self.holders for key in self.records.copy())
        return LINGER_S if kept else KEEP_S

    def forget_old(self) -> None:
        now = time.monotonic()
        for key, since in self.left.copy().items():
            if now - since > KEEP_S:
                self.left.pop(key, None)


def _since(one: tuple[Key, Record]) -> float:
    return one[1].since
