"""`load_state_dict` into weights that cannot be written to where they are.

What loads a module is given a stand-in for it: the same attributes, with copies of its tensors. So
torch, and a class's own loading, do and say what they always do, and who calls the module meanwhile
sees nothing of it. What was written is collected, and becomes the tensors' new value when the
outermost guarded module is through: all of it at once, or, if something raises before, none.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from swapd_client.errors import NotWhileAttached
from swapd_client.memory.tensors import inner_names, is_wrapper
from swapd_client.offload.copies import Copies, start_of
from swapd_client.offload.weights_of import Changes, Weights

#: A module's tensors by name: whose each is; None: this process's, for calls of the component.
Staged = Iterable[tuple[str, torch.Tensor, Weights | None]]

_TABLES = ("_parameters", "_buffers")
_HOOKS = "_load_state_dict_pre_hooks"


class Load:
    """One call of `load_state_dict`, in so far as it comes by guarded modules."""

    def __init__(self, missing_keys: list[str], first: torch.nn.Module) -> None:
        #: The list that is handed to every module of one call: by it a call is known.
        self.missing_keys = missing_keys
        #: The outermost guarded module.
        self.first = first
        self._values: dict[Weights, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._private: list[tuple[_Staged, list[Weights]]] = []

    def run(
        self,
        load: Callable[[torch.nn.Module], None],
        module: torch.nn.Module,
        prefix: str,
        staged: Staged,
        calls: list[Weights],
    ) -> None:
        """Have `load` load a module's own tensors, of which `staged` are not to be written to.

        `calls`: of components in whose calls it runs.
        """
        copies: dict[Weights, Copies] = {}
        with torch.inference_mode(False), torch.no_grad():
            ours = [_Staged(module, n, t, w, _copy(t, w, copies)) for n, t, w in staged]
        try:
            if not ours:
                return load(module)
            stand_in = _StandIn(module, ours)
            load(stand_in.module)
            for one in ours:
                one.find(stand_in.module, prefix)
            stand_in.end()
            for one in ours:
                if one.weights is None:
                    self._private.append((one, calls))
                elif one.value is not None:
                    self._values.setdefault(one.weights, []).append((one.tensor, one.value))
        except BaseException:
            _loads().remove(self)
            raise

    def end(self) -> None:
        """Have all of it there, at once. Raises what `Changes.apply` raises."""
        changes = Changes()
        for weights, values in self._values.items():
            weights.change(values, changes)
        for one, calls in self._private:
            if one.differs():
                for weights in calls:
                    weights.quieten(changes)
        changes.apply(self._write)

    def _write(self) -> None:
        for one, _ in self._private:
            one.write()


def _copy(
    tensor: torch.Tensor, weights: Weights | None, copies: dict[Weights, Copies]
) -> torch.Tensor:
    if weights is None:
        return tensor.detach().clone()
    if weights not in copies:
        copies[weights] = weights.copies()
    return copies[weights].of(tensor)


class _StandIn:
    """For a module, to what loads it. What that sets on it, the module has afterwards."""

    def __init__(self, module: torch.nn.Module, staged: "list[_Staged]") -> None:
        self._of = module
        attributes = dict(vars(module))
        for table in _TABLES:
            attributes[table] = dict(attributes[table])
        self.module: torch.nn.Module = object.__new__(type(module))
        hooks = attributes[_HOOKS]
        attributes[_HOOKS] = type(hooks)(
            (number, _called_with(self.module, module, hook)) for number, hook in hooks.items()
        )
        for one in staged:
            attributes[one.table][one.name] = one.copy
        vars(self.module).update(attributes)
        self._before = {**attributes, **{table: dict(attributes[table]) for table in _TABLES}}
        self._staged = {(one.table, one.name) for one in staged}

    def end(self) -> None:
        """Set on the module what was set on this, but for what was staged."""
        found, target, before = vars(self.module), vars(self._of), self._before
        for table in _TABLES:
            staged = {name for where, name in self._staged if where == table}
            _carry_over(target[table], found[table], before[table], but=staged)
        _carry_over(target, found, before, but={*_TABLES, _HOOKS})


@contextmanager
def in_place(module: torch.nn.Module, stand_in: torch.nn.Module) -> Iterator[None]:
    """The module has the tensors of its stand-in, for all threads."""
    tables = {table: vars(module)[table] for table in _TABLES}
    vars(module).update({table: vars(stand_in)[table] for table in _TABLES})
    try:
        yield
    finally:
        vars(module).update(tables)


def _carry_over(
    target: dict[str, Any], found: dict[str, Any], before: dict[str, Any], but: Collection[str]
) -> None:
    """Have in `target` what is in `found` and was not there before, and nothing that went."""
    for name in before.keys() - found.keys() - set(but):
        target.pop(name, None)
    new = ((name, value) for name, value in found.items() if before.get(name, but) is not value)
    target.update((name, value) for name, value in new if name not in but)


def _called_with(stand_in: torch.nn.Module, module: torch.nn.Module, hook: Any) -> Any:
    """A hook of the module's, that is given the stand-in where it would be given the module."""
    inner = getattr(hook, "hook", hook)  # torch wraps them
    if isinstance(inner, MethodType) and inner.__self__ is module:
        inner = MethodType(inner.__func__, stand_in)
    if getattr(hook, "with_module", False):
        return MethodType(inner, stand_in)
    return inner


class _Staged:
    """A copy in a tensor's place."""

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        tensor: torch.Tensor,
        weights: Weights | None,
        copy: torch.Tensor,
    ) -> None:
        self.tensor = tensor
        self.name = name
        self.weights = weights
        self.table = "_parameters" if name in module._parameters else "_buffers"
        if isinstance(tensor, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
        self.copy = copy
        #: What was loaded; None if nothing was.
        self.value: torch.Tensor | None = None
        self._target: dict[str, Any] = vars(module)[self.table]
        self._found: Any = copy
        self._before = _traces(copy)

    def find(self, module: torch.nn.Module, prefix: str) -> None:
        """See what is there now. Raises: NotWhileAttached if it does not fit in a component."""
        self._found = vars(module)[self.table].get(self.name)
        if self._found is self.copy:
            self.value = self.copy.detach() if _traces(self.copy) != self._before else None
        elif self.weights is not None:
            self.value = self._fitting(prefix + self.name)

    def _fitting(self, key: str) -> torch.Tensor:
        found = self._found
        if not isinstance(found, torch.Tensor) or found.shape != self.tensor.shape:
            raise NotWhileAttached(
                f"{key!r} was replaced while it was loaded, by what does not fit where it is in "
                "swapd. detach() first, then load, then attach() again"
            )
        # the parameter stays, as everybody knows it; it takes the value
        with torch.inference_mode(False), torch.no_grad():
            if type(found.data) is type(self.copy.data) and found.dtype == self.copy.dtype:
                return found.detach()
            return self.copy.detach().copy_(found)

    def differs(self) -> bool:
        """Whether `write` changes what a call computes."""
        if self._found is not self.copy:
            return True
        value, tensor = self.value, self.tensor
        return value is not None and (value.shape != tensor.shape or not torch.equal(value, tensor))

    def write(self) -> None:
        """A tensor that is no component's takes its value, or gives its place to another."""
        if self._found is not self.copy:
            if self._found is None:
                self._target.pop(self.name, None)
            else:
                self._target[self.name] = self._found
        elif self.value is not None:
            with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
                if self.tensor.shape != self.value.shape:
                    self.tensor.resize_(self.value.shape)
                self.tensor.copy_(self.value)


def _traces(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """What is different once a tensor was written to, or its memory replaced."""
    inner = inner_names(tensor) if is_wrapper(tensor) else ()
    # what writes to a wrapper counts for it, and need not for those inside
    own = (0 if inner else start_of(tensor), tensor._version)
    return [own, *(trace for name in inner for trace in _traces(getattr(tensor, name)))]


def is_copied(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor that is no component's can be staged: it has bytes."""
    return tensor is not None and not is_lazy(tensor) and not tensor.is_meta


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
    """`module`, and what is in it, was loaded. Raises what `Changes.apply` raises."""
    for load in _loads():
        if load.missing_keys is missing_keys and load.first is module:
            _loads().remove(load)
            return load.end()
