"""One request of several calls: what a call has brought in stays for the calls after it.

A DiT is called at every step of a request, and others may want its memory meanwhile. If they got it
between two steps they would have to give it back for the next one. So within a turn a lease is kept
from call to call, as long as it may be; but none is kept while the thread waits for another.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from swapd_client.client import Client
from swapd_client.offload.scope import Held, Kept, Leased, here


class Turn(Kept):
    """What one thread keeps between calls. Used by that thread alone."""

    def __init__(
        self, client: Client, within_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`within_s`: how long what others want is still kept."""
        self._client = client
        self._within_s = within_s
        self._clock = clock
        self._kept: dict[Held, Callable[[], None]] = {}
        #: When what is wanted is given back; None: nothing is.
        self._until: float | None = None

    def take(self, held: Held) -> Callable[[], None]:
        give_back = self._kept.pop(held, None)
        if give_back is None:
            self.end()
            give_back = held.take()
        return partial(self._leave, held, give_back)

    def end(self) -> None:
        self._until = None
        while self._kept:
            _, give_back = self._kept.popitem()
            give_back()

    def _leave(self, held: Held, give_back: Callable[[], None]) -> None:
        if isinstance(held, Leased) and self._may_keep(held):
            self._kept[held] = give_back
        else:
            give_back()

    def _may_keep(self, held: Leased) -> bool:
        if self._client.session.wanted.isdisjoint(held.names):
            return True
        if self._until is None:
            self._until = self._clock() + self._within_s
        if self._clock() < self._until:
            return True
        self._until = None
        return False


@contextmanager
def turn(client: Client, within_s: float) -> Iterator[None]:
    """A request: what its calls bring in, of what `client` has, this thread keeps between them.

    What somebody else wants is kept for `within_s` more, in seconds. In a turn another begins none.
    """
    scope = here()
    if scope.kept is not None:
        yield
        return
    scope.reap()
    kept = scope.kept = Turn(client, within_s)
    try:
        yield
    finally:
        scope.kept = None
        scope.reap()
        kept.end()
