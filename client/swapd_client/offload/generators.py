"""Generators, lazy iterators and coroutines that a component's call returned, and that run later.

They hold their component from the first step to exhaustion, close or collection. Without a first
step, they never hold it.
"""

import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from swapd_client.errors import SwapdError
from swapd_client.leases.collected import give_back_later
from swapd_client.offload.scope import Entry, Holdable, Scope, here
from swapd_client.offload.update_barrier import await_changes, tell

#: Copies values that may be views of weights for a caller without the lease.
Own = Callable[[Any], Any]


def lease(work: Any, held: Holdable, own: Own) -> Any:
    """Wrap `work` so that it holds `held` while it runs. Its values go through `own`."""
    if isinstance(work, GeneratorType):
        return LeasedGenerator(work, held, own)
    if isinstance(work, CoroutineType):
        return LeasedCoroutine(work, held, own)
    if isinstance(work, AsyncGeneratorType):
        return LeasedAsyncGenerator(work, held, own)
    return LeasedGenerator((value for value in work), held, own)


class _LeaseSpan:
    def __init__(
        self,
        held: Holdable,
        own: Own,
        *,
        yields: bool = False,
        goes_on: type[BaseException] | tuple[()] = (),
    ) -> None:
        """A step that raises is the last one, unless it raises `goes_on`.

        A streamed component is held for each step, and not between them. `yields`: the value of a
        step is for the caller, not for the event loop.
        """
        self._held = held
        self._own = own
        self._yields = yields
        self._goes_on = goes_on
        self._give_back: Callable[[], None] | None = None
        self._process = os.getpid()

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # `os` may be gone by then
        # the collector may run at any point, with locks held
        if self._give_back is not None and self._process == getpid():
            give_back_later(self._give_back)

    def step(self, take: Callable[..., Any], *args: Any) -> Any:
        """Take a step. Raises as the step, and as `Client.acquire`."""
        scope, entry = here(), Entry(self._held, self)
        scope.begins = self._held  # set before the check for a change
        try:
            await_changes(scope)
            self._hold(scope, entry)
            scope.begins = None
            return self._take(take, *args)
        except self._goes_on:
            raise
        except BaseException:
            with suppress(SwapdError):
                self.end()
            raise
        finally:
            scope.begins = None
            scope.leave(entry)
            tell()

    def _hold(self, scope: Scope, entry: Entry) -> None:
        if not self._held.is_lease:
            scope.enter(entry)
            return
        if self._give_back is None:
            if scope.request is not None:  # another thread may release it
                scope.request.end()
            self._give_back = scope.taken(self._held, self._held.take)
        scope.enter(entry, lent=True)

    def _take(self, take: Callable[..., Any], *args: Any) -> Any:
        try:
            value = take(*args)
        except StopIteration as done:
            done.value = self._own(done.value)
            raise
        return self._own(value) if self._yields else value

    def drive(self, steps: Any) -> Generator[Any, Any, Any]:
        take, value = steps.send, None
        while True:
            try:
                waited = self.step(take, value)
            except StopIteration as done:
                return done.value
            try:
                value = yield waited
                take = steps.send
            except BaseException as exc:  # noqa: BLE001 - it is for the inner one to handle
                take, value = steps.throw, exc

    def end(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class _Steps:
    _yields = False

    def __init__(self, inner: Any, held: Holdable, own: Own) -> None:
        self._inner = inner
        self._span = _LeaseSpan(held, own, yields=self._yields)

    def send(self, value: Any) -> Any:
        return self._span.step(self._inner.send, value)

    def throw(self, *exception: Any) -> Any:
        return self._span.step(self._inner.throw, *exception)

    def close(self) -> None:
        try:
            self._inner.close()
        finally:
            self._span.end()


class LeasedGenerator(_Steps, Generator[Any, Any, Any]):
    _yields = True


class LeasedCoroutine(_Steps, Coroutine[Any, Any, Any]):
    def __await__(self) -> Generator[Any, Any, Any]:
        return self._span.drive(self._inner)


class LeasedAsyncGenerator(AsyncGenerator[Any, Any]):
    def __init__(self, inner: "AsyncGenerator[Any, Any]", held: Holdable, own: Own) -> None:
        self._inner = inner
        self._span = _LeaseSpan(held, own, goes_on=StopIteration)  # each value ends a step so

    async def asend(self, value: Any) -> Any:
        return await _Awaited(self._span, self._inner.asend(value))

    async def athrow(self, *exception: Any) -> Any:
        return await _Awaited(self._span, self._inner.athrow(*exception))

    async def aclose(self) -> None:
        try:
            await self._inner.aclose()
        finally:
            self._span.end()


class _Awaited:
    def __init__(self, span: _LeaseSpan, steps: Any) -> None:
        self._span = span
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._span.drive(self._steps.__await__())
