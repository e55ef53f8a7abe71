"""The account of each traced acquire, for its reply.

Kept from the request until its answer. Other acquires cost one look into an empty table, and each
load one entry while it runs, because a later acquire may come to wait for it.
"""

from collections import deque
from collections.abc import Callable

import msgspec

from swapd.core.actions import CopyIn, Evict, Evicted, Waiting
from swapd.core.events import AnyEvent, CopiedIn, CopyFailed
from swapd.shared.protocol import MOVES_MAX, Account, Acquire, AnyAcquire, Move

#: A session, and its request.
Key = tuple[int, int]

#: Most finished loads that are kept for open accounts.
CAME_MAX = 4096


class _Open(msgspec.Struct):
    """An account that is not answered yet."""

    since_s: float
    asked: tuple[str, ...]
    waits_for: str = ""
    #: Evictions by generation.
    evictions: dict[int, Move] = {}


class Accounts:
    """The accounts of one daemon; used in its loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[Key, _Open] = {}
        #: Loads in flight, by generation.
        self._coming: dict[int, Move] = {}
        #: Loads that ended while an account was open, the oldest first.
        self._came: deque[Move] = deque(maxlen=CAME_MAX)
        #: Evictions in progress, by generation, with the account that each is in.
        self._leaving: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self._open)

    # --- from the request to the answer --------------------------------------------------

    def open(self, session: int, request: AnyAcquire) -> None:
        """Open an account for a traced acquire."""
        asked = request.names if isinstance(request, Acquire) else ()
        self._open[session, request.id] = _Open(self._clock(), asked)

    def answer(
        self, session: int, request: int, names: tuple[str, ...], record: int
    ) -> Account | None:
        """The account for its answer; None if it is not traced.

        `names`: all granted names, if they differ from the requested ones. `record`: number of the
        answer in the swap log.
        """
        if not self._open or (found := self.drop(session, request)) is None:
            return None
        wanted = frozenset(names or found.asked)
        moves = [
            *found.evictions.values(),
            *(m for m in self._came if m.name in wanted and (m.ended_s or 0.0) >= found.since_s),
            *(m for m in self._coming.values() if m.name in wanted),
        ]
        moves.sort(key=lambda move: move.record)
        if not self._open:
            self._came.clear()
        left_out = max(len(moves) - MOVES_MAX, 0)
        told = tuple(moves[:MOVES_MAX])
        return Account(self._clock(), record, found.waits_for, told, left_out)

    def drop(self, session: int, request: int) -> _Open | None:
        """Close an account: the acquire has its answer, or needs none any more."""
        found = self._open.pop((session, request), None)
        if found is not None:
            for generation in found.evictions:
                self._leaving.pop(generation, None)
        return found

    def session_gone(self, session: int) -> None:
        for key in [key for key in self._open if key[0] == session]:
            self.drop(*key)

    # --- what happens meanwhile ----------------------------------------------------------

    def waiting(self, action: Waiting) -> None:
        if found := self._open.get((action.session, action.request)):
            found.waits_for = action.why

    def load(self, order: CopyIn, record: int) -> None:
        """A load is ordered."""
        nbytes = order.nbytes if order.only is None else sum(n for _, n in order.only)
        self._coming[order.generation] = Move("load", order.name, nbytes, self._clock(), record)

    def moved(self, event: AnyEvent) -> None:
        """A copy has ended."""
        if not isinstance(event, CopiedIn | CopyFailed):
            return
        load = self._coming.pop(event.generation, None)
        if load is not None and self._open:
            why = event.why if isinstance(event, CopyFailed) else ""
            self._came.append(msgspec.structs.replace(load, ended_s=event.now, why=why))

    def evict(self, order: Evict, record: int) -> None:
        """An eviction is decided."""
        if order.waiter is None or not (found := self._open.get(order.waiter)):
            return
        move = Move("evict", order.name, 0, self._clock(), record, why=order.reason)
        found.evictions[order.generation] = move
        self._leaving[order.generation] = order.waiter

    def evicted(self, action: Evicted) -> None:
        """The evicted component has left."""
        key = self._leaving.pop(action.generation, None)
        if key is not None:
            evictions = self._open[key].evictions
            evictions[action.generation] = msgspec.structs.replace(
                evictions[action.generation], nbytes=action.bytes_back, ended_s=self._clock()
            )
