"""The way into a component, plainly: what a call of it holds, and what is looked at before.

`shortcuts.py` has the same for the calls that most are, in fewer steps; what it does not see to
itself is done here.
"""

from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch

from swapd_client.errors import NotWhileAttached, SessionEnded, SwapdError, WouldDeadlock
from swapd_client.offload import generators
from swapd_client.offload.changing import changing, tell, wait
from swapd_client.offload.growth import Growth
from swapd_client.offload.returned import LATER, Lent
from swapd_client.offload.scope import Entry, Holdable, calling, thread

_NOTHING = Lent()


class Gate:
    """The way into a component: what is held, and what is looked at before."""

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
        """`held` is what an entry here holds: the component, or a block of it; `whole` is held
        whenever any of it is, and with `all_of_it` there is nothing left to hold. `parameters`:
        those that backward would read. `gone(error)` is told that the daemon is, and raises, or
        sees to it that there is nothing to hold any more. `lent`: what is held by `held`;
        `all_lent`: by `whole`, if that is more.
        """
        self.name = name
        self.held = held
        self.whole = whole
        self.all_of_it = all_of_it
        self.all_lent = lent if all_lent is None else all_lent
        self.grown = grown
        self._lent = lent
        self._parameters = parameters
        self._gone = gone

    def begin(self, by: object, far: int) -> int:
        """A hook says that a call of its module begins, `by` which it is entered if need be.

        0: it was entered. Else its thread has it for longer: how far up the stack the call is that
        holds it. `far` is where that is looked for first. Raises as `enter`.
        """
        scope = thread.scope
        found = scope.has(self.held, self.all_of_it, far) if scope.counts else 0
        if not found:
            self.enter(by, calling())
        return found

    def end(self, by: object, output: Any) -> Any:
        """A hook says that a call returns, or raises: what it returns instead, or None.

        Raises as `leave`.
        """
        later = isinstance(output, LATER)
        entry = thread.scope.find(by)
        if entry is not None and _is_of(entry, calling()):
            if later:
                self.leave(entry, None)
            elif (kept := self.leave(entry, output)) is not output:
                return kept
        return generators.lease(output, self.held, self.own) if later else None

    def enter(self, by: object, frame: FrameType | None = None) -> None:
        """A call begins, and its thread does not have it. `frame`: the call, if its end may be
        heard of from nobody.

        Raises as `Client.acquire`; NotWhileAttached.
        """
        scope = thread.scope
        if scope.entries:
            scope.reap()
        if self.whole not in scope.counts:
            if self.grown is not None and self.grown.changed:
                self.grown.tell()
            if torch.is_grad_enabled():
                self._refuse_grad()
            if torch._C._get_tracing_state() or torch.compiler.is_exporting():
                raise self._untraceable()
            scope.begins = self.held  # said before it is looked who changes it
            if changing.now is not None:
                wait()
        try:
            scope.enter(self.held, frame, by)
        except SwapdError as exc:
            self.refused(exc)
        finally:
            scope.begins = None

    def refused(self, error: SwapdError) -> None:
        """What it holds was not to be had. Raises `error`, or returns if nothing is needed."""
        if isinstance(error, SessionEnded) and self._gone is not None:
            self._gone(error)
        elif isinstance(error, WouldDeadlock):
            raise WouldDeadlock(
                f"{error}. If {self.name!r} was called inside of a call of what is held, both have "
                "to be in at once: attach them as one component, or stream the larger (resident=)"
            ) from error
        else:
            raise error

    def leave(self, entry: Entry, output: Any) -> Any:
        """That call ends, and returns `output`: returns that, without what is lent no longer.

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
        if (
            torch.is_grad_enabled()
            and not self.whole.uses
            and self.whole not in scope.counts
            and _needs_grad(output)
        ):
            raise self._grad("what it returned requires grad")
        return output

    def own(self, output: Any) -> Any:
        """What a call returns, or a generator yields, that is about to leave: with copies of what
        is lent no longer then. Raises: NotWhileAttached."""
        counts = thread.scope.counts
        count = counts.get(self.held)
        if count is None or count.n > 1:
            return output
        ends = self.held is self.whole or counts[self.whole].n == 1
        return (self.all_lent if ends else self._lent).copied(output, self.name)

    def _refuse_grad(self) -> None:
        # backward may come when nothing is held any more
        if not self.whole.uses and any(p.requires_grad for p in self._parameters):
            raise self._grad("its parameters require grad")

    def _untraceable(self) -> NotWhileAttached:
        return NotWhileAttached(
            f"{self.name!r} is attached to swapd, and what is exported or traced would not "
            "bring its weights in: call detach() on its attachment first"
        )

    def _grad(self, why: str) -> NotWhileAttached:
        return NotWhileAttached(
            f"{self.name!r} was called in grad mode, and {why}: backward would read its weights "
            "when nothing holds them any more. Call it under torch.inference_mode() or "
            f"torch.no_grad(), or hold it over backward too: with attachment.use({self.name!r})"
        )


def _needs_grad(output: Any) -> bool:
    if isinstance(output, torch.Tensor):
        return output.requires_grad
    if isinstance(output, Mapping):
        return any(map(_needs_grad, output.values()))
    if isinstance(output, (list, tuple)):
        return any(map(_needs_grad, output))
    return False


def _is_of(entry: Entry, call: FrameType | None) -> bool:
    """Whether it was made by this call, not by one of the same module around it."""
    return entry.frame is call or entry.frame is None or call is None
