"""The leases of tasks, and the acquires that are not awaited yet."""

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from swapd_client.errors import InvalidArgument
from swapd_client.finalizers import give_back_later
from swapd_client.interrupts import to_its_end
from swapd_client.lease import OF_A_RELEASE, BaseLease, not_to_enter
from swapd_client.leases.record import Record
from swapd_client.session.session import Session


class AsyncLease(BaseLease, AbstractAsyncContextManager["AsyncLease"]):
    """As `swapd_client.Lease`; belongs to the task that took it. `release` never blocks."""

    def __init__(
        self, session: Session, record: Record, give_back: Callable[[Record], None]
    ) -> None:
        """`give_back(record)` ends the lease after its work; may be called in any thread."""
        self._session = session
        self._record = record
        self._granted = record.granted
        self._give_back = give_back
        self.names = record.names
        self.held = True

    async def wait(
        self, segment: int | None = None, *, name: str | None = None, stream: Any = None
    ) -> None:
        """As `Lease.wait`, in a thread: it waits even with `stream`, if that cannot."""
        await asyncio.to_thread(self._wait, segment, name, stream)

    def __del__(self) -> None:
        if self.held and self._session.error is None and not self._session.forked:
            self._record.unmarked = True  # nobody has marked the work under it
            give_back_later(partial(self._give_back, self._record))  # the loop may not run again
            warnings.warn(
                f"{self!r} was never released, so it ends now that no object holds it: use it in "
                "an `async with` block, or call release()",
                ResourceWarning,
                stacklevel=2,
            )

    def release(self) -> None:
        """Give the components back. Raises as `Lease.release`."""
        if self.held:
            try:
                to_its_end(self._end)
            finally:
                self.held = False

    def _end(self) -> None:
        problem = self._rest()
        self._give_back(self._record)
        if problem is not None:
            raise problem

    async def __aenter__(self) -> "AsyncLease":
        if self._entered or not self.held:
            raise not_to_enter(self)
        self._entered = True
        return self

    async def __aexit__(self, kind: object, exc: BaseException | None, where: object) -> None:
        with suppress(*OF_A_RELEASE) if exc is not None else nullcontext():
            self.release()


class Acquiring:
    """An acquire that is not awaited yet: `await` it, or use it in `async with`."""

    def __init__(self, acquire: Callable[[], Coroutine[Any, Any, AsyncLease]]) -> None:
        self._acquire = acquire
        self._lease: AsyncLease | None = None
        self._entered = False

    def __await__(self) -> Generator[Any, None, AsyncLease]:
        return self._acquire().__await__()

    async def __aenter__(self) -> AsyncLease:
        if self._entered:
            raise InvalidArgument(
                "another `async with` uses this acquire: call acquire() for each block"
            )
        self._entered = True
        try:
            self._lease = await self
            return await self._lease.__aenter__()
        except BaseException:
            self._entered = False
            raise

    async def __aexit__(self, *exc: Any) -> None:
        assert self._lease is not None
        self._entered = False
        await self._lease.__aexit__(*exc)
