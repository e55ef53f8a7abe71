"""`load_state_dict` into weights that cannot be written to where they are.

While a module loads, copies of its weights stand in for them, so that torch does and says what
it always does. What was written is collected, and becomes the weights' new value when the
outermost guarded module is through: all of a component's at once, or, if something raises
before, none.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from swapd_client.errors import NotWhileAttached
from swapd_client.offload.copies import start_of
from swapd_client.offload.weights_of import Weights
from swapd_client.tensors import inner_names, is_wrapper


class Load:
    """One call of `load_state_dict`, in so far as it comes by guarded modules."""

    def __init__(self, missing_keys: list[str], first: torch.nn.Module) -> None:
        #: The list that is handed to every module of one call: by it a call is known.
        self.missing_keys = missing_keys
        #: The outermost guarded module.
        self.first = first
        self._values: dict[Weights, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def run(
        self,
        load: Callable[[], None],
        module: torch.nn.Module,
        prefix: str,
        covered: list[tuple[str, torch.Tensor, Weights]],
    ) -> None:
        """Have `load` load a module's own tensors, of which `covered` are swapd's."""
        copies = {weights: weights.copies() for _, _, weights in covered}
        with torch.inference_mode(False):
            staged = [_Staged(module, n, t, copies[w].of(t)) for n, t, w in covered]
        try:
            try:
                load()
            finally:
                for one in staged:
                    one.put_back()
            for one, (name, tensor, weights) in zip(staged, covered, strict=True):
                if (value := one.value(prefix + name)) is not None:
                    self._values.setdefault(weights, []).append((tensor, value))
        except BaseException:
            _loads().remove(self)
            raise

    def end(self) -> None:
        for weights, values in self._values.items():
            weights.update(values)


class _Staged:
    """A copy in a tensor's place."""

    def __init__(
        self, module: torch.nn.Module, name: str, tensor: torch.Tensor, copy: torch.Tensor
    ) -> None:
        self._tensor = tensor
        self._name = name
        own: Any = module
        self._table = own._parameters if name in own._parameters else own._buffers
        if isinstance(tensor, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
        self._copy = copy
        self._found: Any = copy
        self._before = _traces(copy)
        self._table[name] = copy

    def put_back(self) -> None:
        self._found = self._table.get(self._name)
        self._table[self._name] = self._tensor

    def value(self, key: str) -> torch.Tensor | None:
        """What was loaded; None if nothing was. Raises: NotWhileAttached if it does not fit."""
        if self._found is self._copy:
            return self._copy.detach() if _traces(self._copy) != self._before else None
        found = self._found
        if not isinstance(found, torch.Tensor) or found.shape != self._tensor.shape:
            raise NotWhileAttached(
                f"{key!r} was replaced while it was loaded, by what does not fit where it is in "
                "swapd. detach() first, then load, then attach() again"
            )
        # the parameter stays, as everybody knows it; it takes the value
        with torch.inference_mode(False), torch.no_grad():
            if type(found.data) is type(self._copy.data) and found.dtype == self._copy.dtype:
                return found.detach()
            return self._copy.detach().copy_(found)


def _traces(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """What is different once a tensor was written to, or its memory replaced."""
    inner = inner_names(tensor) if is_wrapper(tensor) else ()
    # what writes to a wrapper counts for it, and need not for those inside
    own = (0 if inner else start_of(tensor), tensor._version)
    return [own, *(trace for name in inner for trace in _traces(getattr(tensor, name)))]


class _Here(threading.local):
    def __init__(self) -> None:
        self.loads: list[Load] = []


_here = _Here()


def _loads() -> list[Load]:
    """Those under way in this thread; more than one if a module's loading loads another."""
    return _here.loads


def of(missing_keys: list[str], module: torch.nn.Module) -> Load:
    """The call that this list is of; `module` is the first of it, if it is not known."""
    for load in _loads():
        if load.missing_keys is missing_keys:
            return load
    # one that began here before, and is still there, ended elsewhere by an exception
    _loads()[:] = [load for load in _loads() if load.first is not module]
    _loads().append(Load(missing_keys, module))
    return _loads()[-1]


def ended(missing_keys: list[str], module: torch.nn.Module) -> None:
    """`module`, and what is in it, was loaded. Raises what `Weights.update` raises."""
    for load in _loads():
        if load.missing_keys is missing_keys and load.first is module:
            _loads().remove(load)
            return load.end()
