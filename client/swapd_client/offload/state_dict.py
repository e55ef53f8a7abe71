"""`state_dict` and `load_state_dict` for weights that are read-only in place, or absent.

Loading code gets a stand-in for the module, with the same attributes and copies of its tensors. So
torch, and a class's own loading, work as always, and concurrent calls see no change. When the
outermost guarded module is loaded, all written values become the tensors' values at once; after an
error, no tensor changes.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch

from swapd_client.errors import NotWhileAttached
from swapd_client.interrupts import covered_block, to_its_end
from swapd_client.memory.movable import inner_names, is_wrapper
from swapd_client.offload.copies import start_of
from swapd_client.offload.weights import Changes, ComponentWeights, CopiesByOwner

#: Tensors by name, with their owner. None: a private tensor that calls of the component use.
Staged = Iterable[tuple[str, torch.Tensor, ComponentWeights | None]]

TABLES = ("_parameters", "_buffers")
_HOOKS = "_load_state_dict_pre_hooks"


class _StateDictLoad:
    def __init__(self, missing_keys: list[str], first: torch.nn.Module) -> None:
        #: Every module of one call gets this list, so it identifies the call.
        self.missing_keys = missing_keys
        self.first = first
        self._values: dict[ComponentWeights, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._private: list[tuple[_Staged, list[ComponentWeights]]] = []

    def run(
        self,
        load: Callable[[torch.nn.Module], None],
        module: torch.nn.Module,
        prefix: str,
        staged: Staged,
        calls: list[ComponentWeights],
    ) -> None:
        """Call `load` with a stand-in for `module`, which has copies of the `staged` tensors.

        `calls`: the components whose calls run the module.
        """
        copies = CopiesByOwner()
        with torch.inference_mode(False), torch.no_grad():
            ours = [
                _Staged(module, n, t, w, t.detach().clone() if w is None else copies[w].of(t))
                for n, t, w in staged
            ]
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


class _StandIn:
    """Stands in for a module while it is loaded; the module then gets the attributes set on it."""

    def __init__(self, module: torch.nn.Module, staged: "list[_Staged]") -> None:
        self._of = module
        attributes = dict(vars(module))
        for table in TABLES:
            attributes[table] = dict(attributes[table])
        self.module: torch.nn.Module = object.__new__(type(module))
        hooks = attributes[_HOOKS]
        attributes[_HOOKS] = type(hooks)(
            (number, _called_with(self.module, module, hook)) for number, hook in hooks.items()
        )
        for one in staged:
            attributes[one.table][one.name] = one.copy
        vars(self.module).update(attributes)
        self._before = {**attributes, **{table: dict(attributes[table]) for table in TABLES}}
        self._staged = {(one.table, one.name) for one in staged}

    def end(self) -> None:
        found, target, before = vars(self.module), vars(self._of), self._before
        for table in TABLES:
            staged = {name for where, name in self._staged if where == table}
            _carry_over(target[table], found[table], before[table], but=staged)
        _carry_over(target, found, before, but={*TABLES, _HOOKS})


@covered_block
def in_place(module: torch.nn.Module, stand_in: torch.nn.Module) -> Generator[None, None, None]:
    """Within the block, give the module its stand-in's tensors, for all threads."""
    own, its = ({table: vars(one)[table] for table in TABLES} for one in (module, stand_in))
    put_back = partial(vars(module).update, own)
    try:
        vars(module).update(its)
        yield
    finally:
        to_its_end(put_back)


def _carry_over(
    target: dict[str, Any], found: dict[str, Any], before: dict[str, Any], but: Collection[str]
) -> None:
    for name in before.keys() - found.keys() - set(but):
        target.pop(name, None)
    new = ((name, value) for name, value in found.items() if before.get(name, but) is not value)
    target.update((name, value) for name, value in new if name not in but)


def _called_with(stand_in: torch.nn.Module, module: torch.nn.Module, hook: Any) -> Any:
    inner = getattr(hook, "hook", hook)  # torch wraps hooks
    if isinstance(inner, MethodType) and inner.__self__ is module:
        inner = MethodType(inner.__func__, stand_in)
    if getattr(hook, "with_module", False):
        return MethodType(inner, stand_in)
    return inner


class _Staged:
    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        tensor: torch.Tensor,
        weights: ComponentWeights | None,
        copy: torch.Tensor,
    ) -> None:
        self.tensor = tensor
        self.name = name
        self.weights = weights
        self.table = "_parameters" if name in module._parameters else "_buffers"
        if isinstance(tensor, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
        self.copy = copy
        self.value: torch.Tensor | None = None
        self._target: dict[str, Any] = vars(module)[self.table]
        self._found: Any = copy
        self._before = _traces(copy)

    def find(self, module: torch.nn.Module, prefix: str) -> None:
        """Find the loaded value. Raises: NotWhileAttached if it does not fit the component."""
        self._found = vars(module)[self.table].get(self.name)
        if self._found is self.copy:
            self.value = self.copy.detach() if _traces(self.copy) != self._before else None
        elif self.weights is not None:
            self.value = self._fitting(prefix + self.name)

    def _fitting(self, key: str) -> torch.Tensor:
        found = self._found
        if not isinstance(found, torch.Tensor) or found.shape != self.tensor.shape:
            raise NotWhileAttached(
                f"loading replaced {key!r} by a tensor that does not fit its place in swapd. "
                "detach() first, then load, then attach() again"
            )
        # others refer to the parameter: so it stays, and takes the value
        with torch.inference_mode(False), torch.no_grad():
            if type(found.data) is type(self.copy.data) and found.dtype == self.copy.dtype:
                return found.detach()
            return self.copy.detach().copy_(found)

    def differs(self) -> bool:
        if self._found is not self.copy:
            return True
        value, tensor = self.value, self.tensor
        return value is not None and (value.shape != tensor.shape or not torch.equal(value, tensor))

    def write(self) -> None:
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
    """Return what changes when a tensor is written to, or put over other memory."""
    inner = inner_names(tensor) if is_wrapper(tensor) else ()
    # a write to a wrapper changes its version, but not always that of its inner tensors
    own = (0 if inner else start_of(tensor), tensor._version)
    return [own, *(trace for name in inner for trace in _traces(getattr(tensor, name)))]


_thread = threading.local()


def _loads() -> list[_StateDictLoad]:
    """Return this thread's loads; several if a module's loading loads another."""
    loads: list[_StateDictLoad] = vars(_thread).setdefault("loads", [])
    return loads


def of(missing_keys: list[str], module: torch.nn.Module) -> _StateDictLoad:
    """Return the load with this list; without one, begin it at `module`."""
    for load in _loads():
        if load.missing_keys is missing_keys:
            return load
    # an older load that began here ended by an exception
    _loads()[:] = [load for load in _loads() if load.first is not module]
    _loads().append(_StateDictLoad(missing_keys, module))
    return _loads()[-1]


def ended(missing_keys: list[str], module: torch.nn.Module) -> None:
    """Apply the load that began at `module`. Raises as `Changes.apply`."""
    for load in _loads():
        if load.missing_keys is missing_keys and load.first is module:
            _loads().remove(load)
            return load.end()


# --- state dicts -------------------------------------------------------------------------


class _StateDictCopies(CopiesByOwner):
    def __init__(self) -> None:
        #: Modules already saved, by id and prefix.
        self.modules: set[tuple[int, str]] = set()


#: By the id of the state dict, while that lives.
_copied: dict[int, _StateDictCopies] = {}


def copies_in(state: dict[str, Any], module: torch.nn.Module, prefix: str) -> CopiesByOwner:
    known = _copied.get(id(state))
    if known is None:
        try:
            weakref.finalize(state, _copied.pop, id(state), None).atexit = False
        except TypeError:  # a plain dict of the caller's: its end cannot be observed
            return CopiesByOwner()
    where = id(module), prefix
    if known is None or where in known.modules:  # the same module again: a new call
        known = _copied[id(state)] = _StateDictCopies()
    known.modules.add(where)
    return known
