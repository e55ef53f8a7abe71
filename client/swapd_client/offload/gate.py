"""The way into a component: the checks before a call, the lease of it, and its output."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from swapd_client.errors import Deadlock, NotWhileAttached, SwapdError
from swapd_client.offload import generators
from swapd_client.offload.dynamo import skip, uncompiled, when_imported
from swapd_client.offload.growth import Growth
from swapd_client.offload.outputs import LATER, ComponentSpans, tensors_in
from swapd_client.offload.scope import Entry, Holdable, Scope, thread
from swapd_client.offload.update_barrier import await_changes, tell

_NOTHING = ComponentSpans()


@dataclass(eq=False)
class LeaseGate:
    """Runs calls of a component, or of a block of it, under its lease."""

    name: str
    #: Acquired by a call: the component, or a block of it.
    held: Holdable
    #: Held whenever any part is.
    whole: Holdable
    #: With this held, there is nothing left to acquire.
    all_of_it: Holdable
    #: Those that backward would read.
    parameters: tuple[torch.Tensor, ...] = ()
    grown: Growth | None = None
    #: The addresses under `held`; and under `whole`.
    lent: ComponentSpans = _NOTHING
    all_lent: ComponentSpans = _NOTHING

    def run(
        self, call: Callable[..., Any], args: Any, kwargs: Any, *, is_forward: bool = True
    ) -> Any:
        """Call `call(*args, **kwargs)`, and return its output, readable without the lease.

        A method, which is no forward, may switch to no_grad itself, as `generate` does: the
        forwards that it calls are checked, and its output is. Raises as `call`, `Client.acquire`
        and a release; NotWhileAttached if backward would read weights after the lease has ended, if
        the call is traced, or if the output cannot be copied.
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
            except BaseException:  # also an interrupt before it has left
                with suppress(SwapdError):  # an earlier error is the one to report
                    _leave(entry)
                raise
        return _lease(self, output) if type(output) in LATER else output

    def is_held_by(self, scope: Scope) -> bool:
        return self.held in scope or self.all_of_it in scope

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
        """The output of a call or a generator, with copies of tensors whose lease is about to end.

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


# torch compiles what `run` calls: the call, and none of these.


@uncompiled
def _check_grad(gate: LeaseGate, scope: Scope) -> None:
    if gate.whole in scope.counts and scope.entries and scope.entries[-1].is_checked:
        return  # by the forward around this one; or `use` holds it, perhaps over backward
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
def _lease(gate: LeaseGate, output: Any) -> Any:
    return generators.lease(output, gate.held, gate.own)


when_imported(lambda: skip(LeaseGate.run))
