"""Operations on a module, other than calls, while its weights may be absent.

`guard(module, weights)` makes each do the same as for any other module, or raise: `state_dict`,
`load_state_dict`, `copy.deepcopy`, pickle and `torch.save`, `.to()` and its kind. Each submodule
has its own Guard, so it does not matter which of them the caller uses, or through which parent.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.context import get_spawning_popen
from types import MethodType
from typing import Any

import torch

from swapd_client.offload import copying, editing, loading, writers
from swapd_client.offload.copies import Copies
from swapd_client.offload.moves import refuse_move
from swapd_client.offload.ours import Ours
from swapd_client.offload.weights_of import Weights

Module = torch.nn.Module

#: The attribute that holds a module's guard.
_GUARD = "_swapd_guard"

#: All weights that modules are guarded for; a new tuple at each change, for other threads.
_guarded: tuple[weakref.ref[Weights], ...] = ()


def guard(module: Module, weights: Weights) -> Callable[[], None]:
    """Guard a module and its submodules, for their tensors that belong to `weights`.

    A module may have guards for several. Pass the whole model rather than the component alone: then
    tensors tied across components stay tied in state dicts and copies, and a refused move has moved
    nothing. Returns the undo.
    """
    guards = [guard_of(m) or Guard(m) for m in module.modules()]
    for one in guards:
        one.weights.append(weights)
    global _guarded
    _guarded = (*(one for one in _guarded if one() is not None), weakref.ref(weights))

    def undo() -> None:
        global _guarded
        _guarded = tuple(one for one in _guarded if one() not in (None, weights))
        for one in guards:
            if weights in one.weights:
                one.weights.remove(weights)
                if not one.weights:
                    one.remove()

    return undo


def guard_of(module: Module) -> "Guard | None":
    return vars(module).get(_GUARD)


def is_any() -> bool:
    """Whether any module is guarded."""
    return any(weights() is not None for weights in _guarded)


def owner_of(tensor: torch.Tensor) -> Weights | None:
    """The weights that a tensor belongs to, if modules are guarded for them."""
    living = (one for weights in _guarded if (one := weights()) is not None)
    return next((one for one in living if one.covers(tensor)), None)


def covered(*what: Module | torch.Tensor) -> list[editing.Covered]:
    """The tensors that are in swapd, of these and of the modules in these."""
    found: dict[int, editing.Covered] = {}
    for name, tensor in _tensors_of(what):
        if (owner := owner_of(tensor)) is not None:
            for one in editing.with_bytes(tensor, name, owner):
                found.setdefault(id(one[0]), one)
    return list(found.values())


def _tensors_of(what: Iterable[Module | torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for one in what:
        if isinstance(one, torch.Tensor):
            yield "a tensor", one
            continue
        for path, module in one.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield f"{path}.{name}".lstrip("."), tensor


def writable(*what: Module | torch.Tensor) -> AbstractContextManager[None]:
    """A `with` block in which code may write to these tensors, and to the weights of these modules.

    See `editing.edits`.
    """
    found = covered(*what)
    return editing.edited(found, owners(found)) if found else nullcontext()


def owners(found: Iterable[editing.Covered]) -> list[Weights]:
    """The weights that covered tensors belong to."""
    return list(dict.fromkeys(weights for _, _, weights in found))


class Guard(Ours):
    """Replaces some methods of one module."""

    def __init__(self, module: Any) -> None:
        self.weights: list[Weights] = []
        self._module = module
        self._handles = [
            module.register_state_dict_post_hook(_StateDict(self)),
            module.register_load_state_dict_post_hook(_Loaded()),
        ]
        # before the existing hooks: they must see bytes that are readable
        module._state_dict_hooks.move_to_end(self._handles[0].id, last=False)
        attributes: dict[str, Any] = {
            _GUARD: self,
            "__deepcopy__": self._deepcopy,
            "__reduce_ex__": self._reduce,
            "_apply": self._apply,
            "_load_from_state_dict": self._load,
        }
        for name, runs in writers.of(module).items():
            attributes[name] = Writer(self, name, runs)
        #: Attributes that the module itself, and not its class, had under these names.
        self._own = {name: vars(module).get(name) for name in attributes}
        vars(module).update(attributes)

    def __repr__(self) -> str:
        return f"<Guard of a {type(self._module).__name__} for {self.weights}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Guard":
        return self  # a class that copies attributes by hand gets the guard; the copy then drops it

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for name, own in self._own.items():
            if own is None:
                vars(self._module).pop(name, None)
            else:
                vars(self._module)[name] = own

    def before(self, name: str) -> Any:
        return self._own.get(name)

    def _method(self, name: str, module: Module | None = None) -> Callable[..., Any]:
        """The module's own method, bound to it or to its stand-in."""
        module = self._module if module is None else module
        own: Callable[..., Any] | None = self._own[name]
        if own is None:
            own = getattr(type(self._module), name).__get__(module)
        elif isinstance(own, MethodType) and own.__self__ is self._module:
            own = MethodType(own.__func__, module)
        return own

    def owner(self, tensor: torch.Tensor) -> Weights | None:
        """The weights that a tensor belongs to."""
        return next((w for w in self.weights if w.covers(tensor)), None)

    # --- instead of the module's own methods ---------------------------------------------

    def _deepcopy(self, memo: dict[int, Any]) -> Any:
        self._fill(memo, copying.private)
        return copying.copied(self._module, memo)

    def _reduce(self, protocol: Any) -> Any:
        memo: dict[int, Any] = {}
        self._fill(memo, copying.stand_in)
        plain = copying.copied(self._module, memo)
        if (starting := get_spawning_popen()) is not None:
            # the new process gets the descriptors a moment after the pickling
            vars(starting).setdefault("_swapd_pickled", []).append(plain)
        return plain.__reduce_ex__(protocol)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        module: Any = self._module
        inside = module.named_modules() if recurse else [("", module)]
        for path, one in inside:
            if (its := guard_of(one)) is not None:
                for name, tensor, weights in its.covered():
                    refuse_move(f"{path}.{name}".lstrip("."), tensor, fn, weights.name)
        covered = {name for name, _, _ in self.covered()}
        if not covered:
            return self._method("_apply")(fn, recurse)
        if recurse:
            for child in module.children():
                child._apply(fn)
        rest: Any = Module()  # the module's tensors that are not in swapd
        for table in ("_parameters", "_buffers"):
            mine = getattr(module, table)
            getattr(rest, table).update({k: t for k, t in mine.items() if k not in covered})
        rest._apply(fn)
        for table in ("_parameters", "_buffers"):
            getattr(module, table).update(getattr(rest, table))
        return module

    def _load(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        module: Any = self._module
        given = (
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

        def load(stand_in: Module) -> None:
            method = self._method("_load_from_state_dict", stand_in)
            if isinstance(method, MethodType):
                method(*given)
                return
            with loading.in_place(module, stand_in):  # a bound function that knows the module
                method(*given)

        calls = [weights for weights in self.weights if weights.has_inside(module)]
        loading.of(missing_keys, module).run(load, module, prefix, self._staged(calls), calls)

    # --- what is there -------------------------------------------------------------------

    def covered(self) -> Iterator[tuple[str, torch.Tensor, Weights]]:
        """The module's own parameters and buffers that are in swapd."""
        for table in (self._module._parameters, self._module._buffers):
            for name, tensor in table.items():
                if tensor is not None and (weights := self.owner(tensor)) is not None:
                    yield name, tensor, weights

    @property
    def module(self) -> Module:
        module: Module = self._module
        return module

    def writable(self, *modules: Module) -> AbstractContextManager[None]:
        return writable(*modules)

    def _staged(self, calls: list[Weights]) -> Iterator[tuple[str, torch.Tensor, Weights | None]]:
        """Tensors that loading must not write in place; in a module of components, all of them."""
        for table in (self._module._parameters, self._module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                weights = self.owner(tensor)
                if weights is not None or (calls and loading.is_copied(tensor)):
                    yield name, tensor, weights

    def _fill(
        self, memo: dict[int, Any], copy: Callable[[torch.Tensor, Copies], torch.Tensor]
    ) -> None:
        """Put copies of swapd's tensors into the memo of a copy of the module."""
        made: dict[Weights, Copies] = {}
        for module in self._module.modules():
            if (its := guard_of(module)) is None:
                continue
            for tensor in copying.tensors_of(module):
                if id(tensor) in memo or (weights := its.owner(tensor)) is None:
                    continue
                if weights not in made:
                    made[weights] = weights.copies()
                memo[id(tensor)] = copy(tensor, made[weights])


class Writer(Ours):
    """A method of a module that writes to weights, or would replace them."""

    def __init__(self, owner: Guard, name: str, runs: writers.Runs) -> None:
        self._guard = owner
        self._name = name
        self._runs = runs
        self.__name__ = name

    def __repr__(self) -> str:
        return f"<{self.__wrapped__!r}, for {self._guard.weights}>"

    def before(self, name: str) -> Any:
        return self._guard.before(name)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original method, which gives this one its signature."""
        return self._guard._method(self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._runs(self._guard, self.__wrapped__, args, kwargs)


class _StateDict(Ours):
    """Puts copies into a state dict after a module has put in its tensors."""

    def __init__(self, owner: Guard) -> None:
        self._guard = owner

    def __call__(self, module: Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        copies = None
        for name, tensor, weights in self._guard.covered():
            value = state.get(prefix + name)
            # not saved; or the caller wants the tensor itself (keep_vars)
            if value is None or value is tensor:
                continue
            copies = copies or _copies_in(state, module, prefix)
            state[prefix + name] = copies.of(tensor, weights)


class _Loaded(Ours):
    """Runs after a module and its submodules were loaded."""

    def __call__(self, module: Module, incompatible: Any) -> None:
        loading.ended(incompatible.missing_keys, module)


class _CopiesIn:
    """The copies for one call of `state_dict`, so that tied tensors stay tied in its result."""

    def __init__(self) -> None:
        #: Modules already put into it, by id and prefix.
        self.modules: set[tuple[int, str]] = set()
        self._copies: dict[Weights, Copies] = {}

    def of(self, tensor: torch.Tensor, weights: Weights) -> torch.Tensor:
        if weights not in self._copies:
            self._copies[weights] = weights.copies()
        return self._copies[weights].of(tensor)


#: By the id of the result, while that lives.
_copied: dict[int, _CopiesIn] = {}


def _copies_in(state: dict[str, Any], module: Module, prefix: str) -> _CopiesIn:
    """The copies of the call that puts `module` into `state` under `prefix`."""
    known = _copied.get(id(state))
    if known is None:
        try:
            weakref.finalize(state, _copied.pop, id(state), None).atexit = False
        except TypeError:  # a plain dict of the caller's: its end cannot be observed
            return _CopiesIn()
    where = id(module), prefix
    if known is None or where in known.modules:  # the same module again: a new call
        known = _copied[id(state)] = _CopiesIn()
    known.modules.add(where)
    return known
