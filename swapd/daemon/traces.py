"""The account of each traced acquire, for its reply.

Kept from the request until its answer. Other acquires cost one look into an empty table.
"""

from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from swapd.core.actions import AnyAction, CopyIn, Evict, Evicted, Waiting
from swapd.core.events import AnyEvent, CopiedIn, CopyFailed, CopyStopped
from swapd.shared.protocol import MOVES_MAX, Account, Acquire, AnyAcquire, Move

#: A session, and its request.
Key = tuple[int, int]

#: Most finished loads that are kept for open accounts.
ENDED_MAX = 4096


class _TracedAcquire(msgspec.Struct):
    """An acquire that is not answered yet."""

    since_s: float
    names: tuple[str, ...]
    waits_for: str = ""
    #: Evictions by generation.
    evictions: dict[int, Move] = {}


class Traces:
    """The traced acquires of one daemon; used in its loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        #: Those that are not answered yet. While there are none, no action or event matters here.
        self.open: dict[Key, _TracedAcquire] = {}
        #: Loads in flight, by generation; and those that ended, the oldest first.
        self._loads: dict[int, Move] = {}
        self._ended: deque[Move] = deque(maxlen=ENDED_MAX)
        #: Evictions in progress, by generation, with the acquire that each is for.
        self._leaving: dict[int, Key] = {}

    # --- from the request to the answer --------------------------------------------------

    def begin(self, session: int, request: AnyAcquire, loads: Mapping[int, Move]) -> None:
        """Begin to trace an acquire. `loads`: those in flight, by generation."""
        if not self.open:
            self._loads = dict(loads)
        names = request.names if isinstance(request, Acquire) else ()
        self.open[session, request.id] = _TracedAcquire(self._clock(), names)

    def answer(
        self, session: int, request: int, names: tuple[str, ...], record: int
    ) -> Account | None:
        """The account for its answer; None if it is not traced.

        `names`: all granted names, if they differ from the requested ones. `record`: number of the
        answer in the swap log.
        """
        if (traced := self.open.get((session, request))) is None:
            return None
        wanted = frozenset(names or traced.names)
        loads = [load for load in self._ended if (load.ended_s or 0.0) >= traced.since_s]
        loads += self._loads.values()
        moves = [*traced.evictions.values(), *(load for load in loads if load.name in wanted)]
        moves.sort(key=lambda move: move.record)
        self.drop(session, request)
        left_out = max(len(moves) - MOVES_MAX, 0)
        return Account(self._clock(), record, traced.waits_for, tuple(moves[:MOVES_MAX]), left_out)

    def drop(self, session: int, request: int) -> None:
        """The acquire has its answer, or needs none any more."""
        if (traced := self.open.pop((session, request), None)) is not None:
            for generation in traced.evictions:
                self._leaving.pop(generation, None)
        if not self.open:
            self._ended.clear()
            self._loads.clear()

    def session_gone(self, session: int) -> None:
        for key in [key for key in self.open if key[0] == session]:
            self.drop(*key)

    # --- what happens meanwhile ----------------------------------------------------------

    def action(self, action: AnyAction, record: int) -> None:
        """Note an action of the core, with its number in the swap log."""
        match action:
            case CopyIn():
                self._loads[action.generation] = load(action, self._clock(), record)
            case Evict(waiter=waiter) if waiter in self.open:
                move = Move("evict", action.name, 0, self._clock(), record, why=action.reason)
                self.open[waiter].evictions[action.generation] = move
                self._leaving[action.generation] = waiter
            case Evicted() if action.generation in self._leaving:
                moves = self.open[self._leaving.pop(action.generation)].evictions
                moves[action.generation] = msgspec.structs.replace(
                    moves[action.generation], nbytes=action.bytes_back, ended_s=self._clock()
                )
            case Waiting() if traced := self.open.get((action.session, action.request)):
                traced.waits_for = action.why

    def event(self, event: AnyEvent) -> None:
        """Note the end of a load."""
        if not isinstance(event, CopiedIn | CopyFailed | CopyStopped):
            return
        if (ended := self._loads.pop(event.generation, None)) is not None:
            why = event.why if isinstance(event, CopyFailed) else ""
            self._ended.append(msgspec.structs.replace(ended, ended_s=event.now, why=why))


def load(order: CopyIn, now: float, record: int) -> Move:
    """A load that was just ordered."""
    nbytes = order.nbytes if order.only is None else sum(n for _, n in order.only)
    return Move("load", order.name, nbytes, now, record)
