"""Writing to weights in place: the tensors are over copies meanwhile, whose values they then take.

Weights are read-only in the process, so a write to them would crash it. During an edit, each tensor
is over a private copy of its bytes. When the thread's outermost edit ends, the written values
become the weights of all components at once. No other thread is in a call of them meanwhile. Then
leases of this thread are acquired again, and so have the new values.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from swapd_client.errors import NotWhileAttached
from swapd_client.memory.tensors import inner_names, is_wrapper
from swapd_client.offload.changing import quiet
from swapd_client.offload.copies import Copies
from swapd_client.offload.scope import here
from swapd_client.offload.weights_of import Changes, Weights

Module = torch.nn.Module

#: A tensor, its name, and its owner.
Covered = tuple[torch.Tensor, str, Weights]


class _Edited:
    """One tensor with bytes of its own, over a copy of them."""

    def __init__(self, covered: Covered, copies: Copies, written: torch.Tensor | None) -> None:
        """`written`: its value from an earlier edit of this thread, not applied yet."""
        self.tensor, self._name, self.weights = covered
        self._there = self.tensor.data
        copy = copies.of(self.tensor).to(self.tensor.device) if written is None else written
        self._put(copy)
        #: The copy's address; 0 if the copy may already differ from the weights.
        self._memory = copy.data_ptr() if written is None else 0

    def _put(self, data: torch.Tensor) -> None:
        with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
            self.tensor.data = data

    def end(self, unchanged: Callable[[Weights], Copies]) -> torch.Tensor | None:
        """Put the tensor back; return its value if it changed. Raises: NotWhileAttached."""
        value = self.tensor.data
        self._put(self._there)
        if value.shape != self._there.shape or value.dtype != self._there.dtype:
            raise NotWhileAttached(
                f"{self._name!r} became {tuple(value.shape)} of {value.dtype}, but in swapd, as "
                f"part of {self.weights.name!r}, it is {tuple(self._there.shape)} of "
                f"{self._there.dtype}: it keeps its old bytes. detach() first, then do this, then "
                "attach() again"
            )
        if value.data_ptr() == self._memory and _same_bytes(
            value, unchanged(self.weights).of(self.tensor)
        ):
            return None
        return value


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit, so equal NaNs compare equal."""
    bits = [t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)


class _Here(threading.local):
    def __init__(self) -> None:
        #: New values from this thread's edits, by owner and tensor id; None outside of an edit.
        self.values: dict[Weights, dict[int, tuple[torch.Tensor, torch.Tensor]]] | None = None


_here = _Here()


@contextmanager
def edits(weights: Sequence[Weights]) -> Iterator[None]:
    """A `with` block. At its end all edited weights change at once, of `weights` and of others.

    Also if it raises: then the values written so far apply, as they would in private memory. Blocks
    until calls in other threads have ended. Raises as `Client.update` and `Client.acquire`.
    """
    if _here.values is not None:
        yield
        return
    changes = Changes()
    for one in weights:
        one.quieten(changes)
    changed = False
    try:
        with quiet(changes.in_steps):
            values = _here.values = {}
            try:
                yield
            finally:
                _here.values = None
                for one, new in values.items():
                    one.change(list(new.values()), changes)
                    one.quieten(changes)
                if values:
                    changes.apply(_nothing)
                    changed = True
    finally:
        if changed:
            here().renew(changes.in_steps)


@contextmanager
def edited(covered: Iterable[Covered], weights: Sequence[Weights]) -> Iterator[None]:
    """A `with` block in which any code may write to these tensors; see `edits`."""
    with edits(weights):
        values = _here.values
        assert values is not None
        copies: dict[Weights, Copies] = {}
        staged: list[_Edited] = []
        try:
            for one in covered:
                tensor, _, its = one
                _, written = values.get(its, {}).get(id(tensor), (tensor, None))
                staged.append(_Edited(one, _copies(copies, its), written))
            yield
        finally:
            fresh: dict[Weights, Copies] = {}
            problems = []
            for each in staged:
                try:
                    value = each.end(functools.partial(_copies, fresh))
                except NotWhileAttached as exc:
                    problems.append(exc)
                    continue
                if value is not None:
                    values.setdefault(each.weights, {})[id(each.tensor)] = each.tensor, value
            if problems:
                raise problems[0]


def _copies(made: dict[Weights, Copies], weights: Weights) -> Copies:
    if weights not in made:
        made[weights] = weights.copies()
    return made[weights]


def with_bytes(tensor: torch.Tensor, name: str, weights: Weights) -> Iterator[Covered]:
    """A tensor with bytes of its own; for a wrapper, its inner tensors."""
    if is_wrapper(tensor):
        for inner in inner_names(tensor):
            yield from with_bytes(getattr(tensor, inner), f"{name}.{inner}", weights)
    elif weights.covers(tensor):
        yield tensor, name, weights


def _nothing() -> None:
    pass
