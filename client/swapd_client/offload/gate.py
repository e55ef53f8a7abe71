"""Runs calls of a component under its lease: checks before the call, the lease, and the output."""

import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import torch

from swapd_client.errors import Deadlock, NotWhileAttached, SwapdError
from swapd_client.finalizers import give_back_later
from swapd_client.interrupts import covered, to_its_end
from swapd_client.offload.dynamo import skip, uncompiled, when_imported
from swapd_client.offload.growth import Growth
from swapd_client.offload.outputs import LATER, ComponentSpans, tensors_in
from swapd_client.offload.scope import Count, Entry, Holdable, Scope, here, thread
from swapd_client.offload.update_barrier import await_changes, tell


@dataclass(eq=False)
class LeaseGate:
    name: str
    #: What a call acquires: the component, or a block of it.
    held: Holdable
    #: Held whenever any part is.
    whole: Holdable
    #: If this is held, a call acquires nothing.
    all_of_it: Holdable
    #: What backward would read.
    parameters: tuple[torch.Tensor, ...]
    grown: Growth | None
    #: The addresses under `held`, and under `whole`.
    lent: ComponentSpans
    all_lent: ComponentSpans

    def run(
        self, call: Callable[..., Any], args: Any, kwargs: Any, *, is_forward: bool = True
    ) -> Any:
        """Return the output of `call(*args, **kwargs)`, readable without the lease.

        A method that is no forward may switch to no_grad itself, as `generate` does: then only its
        output, and the forwards that it calls, are checked. Raises as `call`, `Client.acquire` and
        a release; NotWhileAttached if backward would read weights after the lease has ended, if the
        call is traced, or if the output cannot be copied.
        """
        scope = thread.scope
        counts = scope.counts
        if is_forward and torch.is_grad_enabled():
            _check_grad(self, scope)
        if self.held in counts or self.all_of_it in counts:
            output = call(*args, **kwargs)
        else:
            entry = Entry(self.held, self, is_checked=is_forward)
            try:
                _enter(self, entry)
                output = call(*args, **kwargs)
                if type(output) not in LATER:
                    output = _own(self, entry, output)
                _leave(entry)
            except BaseException:  # also an interrupt
                with suppress(SwapdError):  # an earlier error is the one to report
                    _leave(entry)
                raise
        return _lease(self, output) if type(output) in LATER else output

    def is_held_by(self, scope: Scope) -> bool:
        return self.held in scope.counts or self.all_of_it in scope.counts

    def enter(self, entry: Entry) -> None:
        scope = thread.scope
        if self.whole not in scope.counts:
            if self.grown is not None and self.grown.changed:
                self.grown.tell()
            if torch._C._get_tracing_state() or torch.compiler.is_exporting():
                raise NotWhileAttached(
                    f"{self.name!r} is attached to swapd, and an exported or traced module would "
                    "not load its weights: call detach() on its attachment first"
                )
        scope.begins = self.held  # set before the check for a change
        try:
            await_changes(scope)
            scope.enter(entry)
        except Deadlock as exc:
            raise Deadlock(
                f"{exc}. If {self.name!r} was called from another component's call, both must "
                "be on the device at once: attach them as one component, or stream the larger "
                "(resident=)"
            ) from exc
        finally:
            scope.begins = None

    def own(self, output: Any) -> Any:
        """Return an output, with copies of tensors whose lease is about to end.

        Raises: NotWhileAttached.
        """
        counts = thread.scope.counts
        count = counts.get(self.held)
        if count is None or count.n > 1:
            return output
        whole = counts.get(self.whole)  # None: the daemon is gone, and the weights are private
        ends = whole is None or self.held is self.whole or whole.n == 1
        output = (self.all_lent if ends else self.lent).copied(output, self.name)
        may_follow = ends and self.backward_may_follow()
        if may_follow and any(tensor.requires_grad for tensor in tensors_in(output)):
            raise self.refused_grad("its output requires grad")
        return output

    def backward_may_follow(self) -> bool:
        return torch.is_grad_enabled() and not self.whole.uses

    def refused_grad(self, why: str) -> NotWhileAttached:
        return NotWhileAttached(
            f"{self.name!r} was called in grad mode, and {why}: backward would read its weights "
            "after their lease. Call it under torch.inference_mode() or torch.no_grad(), or hold "
            f"it over backward too: with attachment.use({self.name!r})"
        )


# torch compiles the call that `run` makes, and none of these.


@uncompiled
def _check_grad(gate: LeaseGate, scope: Scope) -> None:
    if gate.whole in scope.counts and scope.entries and scope.entries[-1].is_checked:
        return  # checked by the forward around this one; or `use` holds it, perhaps over backward
    if gate.backward_may_follow() and any(p.requires_grad for p in gate.parameters):
        raise gate.refused_grad("its parameters require grad")


@uncompiled
def _enter(gate: LeaseGate, entry: Entry) -> None:
    gate.enter(entry)


@uncompiled
def _own(gate: LeaseGate, entry: Entry, output: Any) -> Any:
    entries = thread.scope.entries
    return gate.own(output) if entries and entries[-1] is entry else output


@uncompiled
def _leave(entry: Entry) -> None:
    try:
        thread.scope.leave(entry)
    finally:
        tell()


@uncompiled
def _lease(gate: LeaseGate, work: Any) -> Any:
    """Wrap `work` so that it holds the component while it runs. Its values go through `own`."""
    held, own = gate.held, gate.own
    if isinstance(work, CoroutineType):
        return LeasedCoroutine(work, _LeaseSpan(held, own))
    if isinstance(work, AsyncGeneratorType):  # StopIteration ends a step, not the generator
        return LeasedAsyncGenerator(work, _LeaseSpan(held, own, goes_on=StopIteration))
    steps = work if isinstance(work, GeneratorType) else (value for value in work)
    return LeasedGenerator(steps, _LeaseSpan(held, own, yields=True))


when_imported(lambda: skip(LeaseGate.run))


# --- generators, lazy iterators and coroutines that a call returned, and that run later ----------
# They hold their component from the first step to exhaustion, close or collection. Without a first
# step, they never hold it.


#: Copies values that may be views of weights, for a caller without the lease.
Own = Callable[[Any], Any]


class _LeaseSpan:
    def __init__(
        self,
        held: Holdable,
        own: Own,
        *,
        yields: bool = False,
        goes_on: type[StopIteration] | tuple[()] = (),
    ) -> None:
        """Hold `held` from the first step to `end`; if it is streamed, during each step only.

        `yields`: the value of a step is for the caller, not for the event loop. `goes_on`: what a
        step may raise without being the last.
        """
        self._held = held
        self._own = own
        self._yields = yields
        self.goes_on = goes_on
        #: Whether there was a step, and will be more.
        self._has_begun = False
        self._count = Count()
        self._process = os.getpid()

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:  # `os` may be gone by then
        # the collector may run with any lock held
        give_back = self._count.give_back
        if give_back is not None and self._process == getpid():
            give_back_later(give_back)

    def step(self, take: Callable[..., Any], *args: Any) -> Any:
        """Run a step; call `stop` after an exception but `goes_on`.

        Raises as the step, and as `Client.acquire`.
        """
        self._has_begun = True
        scope, entry = here(), Entry(self._held, self)
        leave = partial(to_its_end, partial(_leave, entry))
        scope.begins = self._held  # set before the check for a change
        try:
            await_changes(scope)
            self._hold(scope, entry)
            scope.begins = None
            return self._take(take, *args)
        finally:
            scope.begins = None
            leave()

    def _hold(self, scope: Scope, entry: Entry) -> None:
        if not self._held.is_lease:
            scope.enter(entry)
            return
        if self._count.give_back is None:
            if scope.request is not None:  # another thread may release it
                scope.request.end()
            scope.take(self._held, self._held.take, self._count)
        scope.enter(entry, lent=True)

    def _take(self, take: Callable[..., Any], *args: Any) -> Any:
        try:
            value = take(*args)
        except StopIteration as done:
            done.value = self._own(done.value)
            raise
        return self._own(value) if self._yields else value

    @covered
    def drive(self, steps: Any) -> Generator[Any, Any, Any]:
        try:
            take, value = steps.send, None
            while True:
                waited = self.step(take, value)
                try:
                    value = yield waited
                    take = steps.send
                except BaseException as exc:  # noqa: BLE001 - it is for the inner one to handle
                    take, value = steps.throw, exc
        except self.goes_on as done:
            return done.value
        except BaseException as exc:
            to_its_end(self.stop)
            if isinstance(exc, StopIteration):
                return exc.value
            raise

    @property
    def is_between_steps(self) -> bool:
        """Whether code that closes it must hold its component anew: a `finally` may read it."""
        return self._has_begun and not self._held.is_lease

    def stop(self) -> None:
        """As `end`, after an exception, which is the one to report."""
        with suppress(SwapdError):
            self.end()

    def end(self) -> None:
        self._has_begun = False
        if self._count.give_back is not None:
            self._count.give_back()
            self._count.give_back = None


class _Leased:
    def __init__(self, inner: Any, span: _LeaseSpan) -> None:
        self._inner = inner
        self._span = span


def _stopped(call: Callable[..., Any]) -> Callable[..., Any]:
    """Stop the span after an exception, also after an interrupt before or after its step.

    A kept traceback keeps frames of `call`, and with them the span and its lease.
    """

    @covered
    def run(self: _Leased, *args: Any) -> Any:
        try:
            return call(self, *args)
        except self._span.goes_on:
            raise
        except BaseException:
            to_its_end(self._span.stop)
            raise

    return run


class _Steps(_Leased):
    @_stopped
    def send(self, value: Any) -> Any:
        return self._span.step(self._inner.send, value)

    @_stopped
    def throw(self, *exception: Any) -> Any:
        return self._span.step(self._inner.throw, *exception)

    def close(self) -> None:
        span, close = self._span, self._inner.close
        try:
            if span.is_between_steps:
                span.step(close)
            else:
                close()
        finally:
            to_its_end(span.end)


class LeasedGenerator(_Steps, Generator[Any, Any, Any]):
    __next__ = _stopped(Generator.__next__)


class LeasedCoroutine(_Steps, Coroutine[Any, Any, Any]):
    def __await__(self) -> Generator[Any, Any, Any]:
        return self._span.drive(self._inner)


class LeasedAsyncGenerator(_Leased, AsyncGenerator[Any, Any]):
    @_stopped
    def asend(self, value: Any) -> LeasedCoroutine:
        return LeasedCoroutine(self._inner.asend(value), self._span)

    @_stopped
    def athrow(self, *exception: Any) -> LeasedCoroutine:
        return LeasedCoroutine(self._inner.athrow(*exception), self._span)

    def __anext__(self) -> LeasedCoroutine:
        return self.asend(None)  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        span, close = self._span, self._inner.aclose()
        try:
            await (LeasedCoroutine(close, span) if span.is_between_steps else close)
        finally:
            to_its_end(span.end)
