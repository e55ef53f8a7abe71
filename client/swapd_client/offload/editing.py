"""Writing to weights where they are: copies take their place, and then the copies' values.

Weights are read-only in the process, so what writes to them would die of it. While they are edited,
each tensor is over a private copy of its bytes; what was written becomes the weights' value, of all
components at once, when the outermost edit of the thread ends. No call of other threads is under
way meanwhile. What this thread holds it holds anew then, and so has the new values.
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

#: A tensor, what it is called, and whose it is.
Covered = tuple[torch.Tensor, str, Weights]


class _Edited:
    """One tensor that has bytes, over a copy of them."""

    def __init__(self, covered: Covered, copies: Copies, written: torch.Tensor | None) -> None:
        """`written`: what an edit before it, that has not taken place yet, has made of it."""
        self.tensor, self._name, self.weights = covered
        self._there = self.tensor.data
        copy = copies.of(self.tensor).to(self.tensor.device) if written is None else written
        self._put(copy)
        #: Where it is now, unless that may differ from what it was at first.
        self._memory = copy.data_ptr() if written is None else 0

    def _put(self, data: torch.Tensor) -> None:
        with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
            self.tensor.data = data

    def end(self, unchanged: Callable[[Weights], Copies]) -> torch.Tensor | None:
        """Be where it was; return its new value, if it has one. Raises: NotWhileAttached."""
        value = self.tensor.data
        self._put(self._there)
        if value.shape != self._there.shape or value.dtype != self._there.dtype:
            raise NotWhileAttached(
                f"{self._name!r} became {tuple(value.shape)} of {value.dtype}, and where it is in "
                f"swapd, as part of {self.weights.name!r}, is room for {tuple(self._there.shape)} "
                f"of {self._there.dtype}: it is as it was. detach() first, then do this, then "
                "attach() again"
            )
        if value.data_ptr() == self._memory and _same_bytes(
            value, unchanged(self.weights).of(self.tensor)
        ):
            return None
        return value


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaNs are equal if they are the same."""
    bits = [t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)


class _Here(threading.local):
    def __init__(self) -> None:
        #: The new values that the edits of this thread have for tensors, by their ids; None: there
        #: are no edits.
        self.values: dict[Weights, dict[int, tuple[torch.Tensor, torch.Tensor]]] | None = None


_here = _Here()


@contextmanager
def edits(weights: Sequence[Weights]) -> Iterator[None]:
    """All that is edited in it, of these weights or others, changes at once at its end.

    Also if it raises: then what was written by then is there, as it would be in private memory.
    Blocks until calls in other threads are through, and raises what an update and an acquire raise.
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
    """These tensors can be written to, in any way; see `edits`."""
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
    """A tensor, or, of one that wraps others, those."""
    if is_wrapper(tensor):
        for inner in inner_names(tensor):
            yield from with_bytes(getattr(tensor, inner), f"{name}.{inner}", weights)
    elif weights.covers(tensor):
        yield tensor, name, weights


def _nothing() -> None:
    pass
