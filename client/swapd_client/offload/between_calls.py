"""Requests of several calls: a call's lease stays with the thread for the calls after it.

A request calls a DiT at every step, and other sessions may want its memory meanwhile. If they got
it between two steps, the next step would load the DiT again. So the thread keeps its lease from
call to call, up to a bound, but never while it waits for another acquire.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from swapd_client.lease import Lease
from swapd_client.leases.keeping import RequestKeeping
from swapd_client.offload.lender import Lender
from swapd_client.offload.scope import Holdable, Kept, Leased, here


class _Lease:
    """One lease kept between calls."""

    def __init__(self, lease: Lease | None) -> None:
        self._lease = lease

    def rests(self) -> None:
        """A call that uses it has ended."""
        if self._lease is not None:
            self._lease.rests()

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()


class KeptBetweenCalls(Kept):
    """The leases that one thread keeps between calls. Used by that thread alone."""

    def __init__(self, client: Lender, keeping: RequestKeeping) -> None:
        self._client = client
        self._keeping = keeping
        self._kept: dict[Leased, _Lease] = {}

    def take(self, held: Holdable) -> Callable[[], None]:
        if not isinstance(held, Leased):
            self.end()
            return held.take()
        lease = self._kept.pop(held, None)
        if lease is None:
            self.end()
            lease = _Lease(held.lease())
        return partial(self._leave, held, lease)

    def end(self) -> None:
        self._keeping.over()
        while self._kept:
            _, lease = self._kept.popitem()
            lease.release()

    def _leave(self, held: Leased, lease: _Lease) -> None:
        wanted = not self._client.session.told.wanted.isdisjoint(held.names)
        if self._keeping.keeps(time.monotonic(), wanted=wanted):
            lease.rests()
            self._kept[held] = lease
        else:
            lease.release()


@contextmanager
def kept_between_calls(client: Lender, within_s: float) -> Iterator[None]:
    """A request: this thread keeps the leases of its calls on `client`'s components between them.

    `within_s`: seconds to keep a lease after another session wants the memory. A request within a
    request does nothing.
    """
    scope = here()
    if scope.kept is not None:
        yield
        return
    scope.reap()
    kept = scope.kept = KeptBetweenCalls(client, RequestKeeping(within_s))
    try:
        yield
    finally:
        scope.kept = None
        scope.reap()
        kept.end()
