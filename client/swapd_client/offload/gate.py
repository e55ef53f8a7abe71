"""The way into a component, in full: the checks before a call, and the leases of it.

`shortcuts.py` does the same in fewer steps for the most frequent calls, and leaves the others to
this module.
"""

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from swapd_client.errors import NotWhileAttached, SessionEnded, SwapdError, WouldDeadlock
from swapd_client.offload import generators
from swapd_client.offload.changing import changing, tell, wait
from swapd_client.offload.growth import Growth
from swapd_client.offload.returned import LATER, Lent, tensors_in
from swapd_client.offload.scope import Entry, Holdable, calling, thread

_NOTHING = Lent()


class Gate:
    """The way into a component: the leases of a call, and the checks before it."""

    def __init__(
        self,
        name: str,
        held: Holdable,
        whole: Holdable,
        all_of_it: Holdable,
        parameters: tuple[torch.Tensor, ...] = (),
        grown: Growth | None = None,
        gone: Callable[[SessionEnded], None] | None = None,
        lent: Lent = _NOTHING,
        all_lent: Lent | None = None,
    ) -> None:
        """`held`: acquired by an entry here: the component, or a block of it. `whole`: held
        whenever any part is. With `all_of_it` held, there is nothing left to acquire. `parameters`:
        those that backward would read. `gone(error)` is called when the daemon is gone: it raises,
        or makes the weights private. `lent`: the addresses under `held`; `all_lent`: under `whole`,
        if larger.
        """
        self.name = name
        self.held = held
        self.whole = whole
        self.all_of_it = all_of_it
        self.all_lent = lent if all_lent is None else all_lent
        self.grown = grown
        self.lent = lent
        self._parameters = parameters
        self._gone = gone

    def begin(self, by: object, far: int) -> int:
        """Called by a hook when a call of its module begins; enters it as `by` if needed.

        Returns 0 if it entered. Otherwise the thread holds the component for longer: returns how
        far up the stack the call is that holds it. The search starts at `far`. Raises as `enter`
        and `refuse_grad`.
        """
        scope = thread.scope
        found = scope.has(self.held, self.all_of_it, far) if scope.counts else 0
        around = scope.entries[-1] if self.whole in scope.counts and scope.entries else None
        # another forward has checked, and `use` may hold it over backward; a method has not checked
        if around is None or (around.is_call and around.frame is None):
            self.refuse_grad()
        if not found:
            self.enter(by, calling())
        return found

    def end(self, by: object, output: Any) -> Any:
        """Called by a hook when a call returns or raises. Returns a new output, or None to keep it.

        Raises as `leave`.
        """
        later = type(output) in LATER
        entry = thread.scope.find(by)
        if entry is not None and _is_of(entry, calling()):
            if later:
                self.leave(entry, None)
            elif (kept := self.leave(entry, output)) is not output:
                return kept
        return generators.lease(output, self.held, self.own) if later else None

    def enter(self, by: object, frame: FrameType | None = None) -> None:
        """A call begins in a thread that does not hold the component.

        `frame`: the frame of the call, if its end may go unnoticed. Raises as `Client.acquire`;
        NotWhileAttached if the call is traced.
        """
        scope = thread.scope
        if scope.entries:
            scope.reap()
        if self.whole not in scope.counts:
            if self.grown is not None and self.grown.changed:
                self.grown.tell()
            if torch._C._get_tracing_state() or torch.compiler.is_exporting():
                raise self._untraceable()
            scope.begins = self.held  # set before the check for a change
            if changing.now is not None:
                wait()
        try:
            scope.enter(self.held, frame, by)
        except SwapdError as exc:
            self.refused(exc)
        finally:
            scope.begins = None

    def refused(self, error: SwapdError) -> None:
        """The acquire failed. Raises `error`, or returns if the call needs no lease any more."""
        if isinstance(error, SessionEnded) and self._gone is not None:
            self._gone(error)
        elif isinstance(error, WouldDeadlock):
            raise WouldDeadlock(
                f"{error}. If {self.name!r} was called from another component's call, both must "
                "be on the device at once: attach them as one component, or stream the larger "
                "(resident=)"
            ) from error
        else:
            raise error

    def leave(self, entry: Entry, output: Any) -> Any:
        """The call ends. Returns `output`, with copies of tensors whose lease ends.

        Raises: NotWhileAttached, and as a release.
        """
        scope = thread.scope
        try:
            if output is not None:
                output = self.own(output)
        finally:
            scope.leave(entry)
            if changing.now is not None:
                tell()
        return output

    def own(self, output: Any) -> Any:
        """The output of a call or a generator, with copies of tensors whose lease is about to end.

        Raises: NotWhileAttached.
        """
        counts = thread.scope.counts
        count = counts.get(self.held)
        if count is None or count.n > 1:
            return output
        ends = self.held is self.whole or counts[self.whole].n == 1
        output = (self.all_lent if ends else self.lent).copied(output, self.name)
        if (
            ends
            and self._backward_may_follow()
            and any(tensor.requires_grad for tensor in tensors_in(output))
        ):
            raise self._grad("its output requires grad")
        return output

    def refuse_grad(self) -> None:
        """Raise NotWhileAttached if backward would read weights after the lease has ended.

        For forwards. A method may switch to no_grad itself, as `generate` does; the forwards that
        it calls are checked, and its output is.
        """
        if self._backward_may_follow() and any(p.requires_grad for p in self._parameters):
            raise self._grad("its parameters require grad")

    def _backward_may_follow(self) -> bool:
        return torch.is_grad_enabled() and not self.whole.uses

    def _untraceable(self) -> NotWhileAttached:
        return NotWhileAttached(
            f"{self.name!r} is attached to swapd, and an exported or traced module would not "
            "load its weights: call detach() on its attachment first"
        )

    def _grad(self, why: str) -> NotWhileAttached:
        return NotWhileAttached(
            f"{self.name!r} was called in grad mode, and {why}: backward would read its weights "
            "after their lease. Call it under torch.inference_mode() or torch.no_grad(), or hold "
            f"it over backward too: with attachment.use({self.name!r})"
        )


def _is_of(entry: Entry, call: FrameType | None) -> bool:
    """Whether this call made the entry, not an outer call of the same module."""
    return entry.frame is call or entry.frame is None or call is None
