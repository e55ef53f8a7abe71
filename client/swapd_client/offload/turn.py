"""One request of several calls: what a call has brought in stays for the calls after it.

A DiT is called at every step of a request, and others may want its memory meanwhile. If they got it
between two steps they would have to give it back for the next one. So within a turn a lease is kept
from call to call, as long as it may be; but none is kept while the thread waits for another.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from swapd_client.client import Client, Lease
from swapd_client.offload.scope import Held, Kept, Leased, here


class _Lease:
    """One lease of a turn."""

    def __init__(self, lease: Lease | None) -> None:
        self._lease = lease
        #: Streams of a GPU that worked under it, each once.
        self._streams: dict[int, None] = {}

    def rests(self, streams: Iterable[int]) -> None:
        """A call under it has ended, which worked on these."""
        self._streams.update(dict.fromkeys(streams))

    def release(self) -> None:
        if self._lease is not None:
            for stream in self._streams:
                self._lease.uses(stream)
            self._lease.release()


class Turn(Kept):
    """What one thread keeps between calls. Used by that thread alone."""

    def __init__(
        self, client: Client, within_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`within_s`: how long what others want is still kept."""
        self._client = client
        self._within_s = within_s
        self._clock = clock
        self._kept: dict[Leased, _Lease] = {}
        #: When what is wanted is given back; None: nothing is.
        self._until: float | None = None

    def take(self, held: Held) -> Callable[[], None]:
        if not isinstance(held, Leased):
            self.end()
            return held.take()
        lease = self._kept.pop(held, None)
        if lease is None:
            self.end()
            lease = _Lease(held.lease())
        return partial(self._leave, held, lease)

    def end(self) -> None:
        self._until = None
        while self._kept:
            _, lease = self._kept.popitem()
            lease.release()

    def _leave(self, held: Leased, lease: _Lease) -> None:
        if self._may_keep(held):
            lease.rests(self._client.session.current_streams())
            self._kept[held] = lease
        else:
            lease.release()

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
