"""Makes operations on a module, other than calls, safe while its weights may be absent.

After `guard(module, weights)`, `state_dict`, `load_state_dict`, `copy.deepcopy`, pickle,
`torch.save`, `.to()` and its kind do the same as for any other module, or raise. Each submodule has
its own Guard, so they may be used through any parent. Methods of other libraries that write to
weights run in an edit; other code that writes needs `attachment.edit(...)`.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.context import get_spawning_popen
from types import MethodType
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from swapd_client.errors import NotWhileAttached
from swapd_client.memory.movable import leaves
from swapd_client.offload import state_dict
from swapd_client.offload.copies import (
    Copies,
    Marker,
    Method,
    ToUndo,
    copied,
    private,
    put_back,
    stand_in,
    tensors_of,
)
from swapd_client.offload.ownership import own_parameters
from swapd_client.offload.scope import living
from swapd_client.offload.weights import ComponentWeights, CopiesByOwner, Covered, edited, edits

_GUARD = "_swapd_guard"

#: All weights that have guards.
_guarded: "weakref.WeakKeyDictionary[ComponentWeights, None]" = weakref.WeakKeyDictionary()


def guard(module: Module, weights: ComponentWeights, to_undo: ToUndo) -> None:
    """Guard the tensors of `weights` in a module and its submodules.

    Give the whole model: then tied tensors stay tied in copies, and a refused move moves nothing.
    """

    def undo() -> None:
        _guarded.pop(weights, None)
        for one in filter(None, map(guard_of, living(weights.guarded))):
            one.forget(weights)

    to_undo(undo)
    _guard(module, weights)
    _guarded[weights] = None


def follow(module: Module, new: object) -> None:
    """Guard a module that a guarded one has gained: it may have tensors of the other's."""
    its = guard_of(module)
    if its is None or not isinstance(new, Module):
        return
    known = guard_of(new)  # once is enough: Cache-DiT exchanges a model's blocks at each call
    for weights in list(its.weights):
        if known is None or weights not in known.weights:
            _guard(new, weights)


def _guard(module: Module, weights: ComponentWeights) -> None:
    for one in reversed(list(module.modules())):  # `follow` looks at the outermost
        weights.guarded[one] = None  # first: an interrupt may come in between
        its = guard_of(one) or Guard(one)
        if weights not in its.weights:
            its.weights.append(weights)


def guard_of(module: Module) -> "Guard | None":
    return vars(module).get(_GUARD)


def is_any() -> bool:
    return bool(living(_guarded))


def owner_of(tensor: torch.Tensor) -> ComponentWeights | None:
    return next((one for one in living(_guarded) if one.covers(tensor)), None)


def covered(*what: Module | torch.Tensor) -> list[Covered]:
    found: dict[int, Covered] = {}
    for name, tensor in _tensors_in(what):
        if (owner := owner_of(tensor)) is not None:
            for inner_name, inner in leaves(name, tensor):
                if owner.covers(inner):
                    found.setdefault(id(inner), (inner, inner_name, owner))
    return list(found.values())


def _tensors_in(what: Iterable[Module | torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for one in what:
        if isinstance(one, torch.Tensor):
            yield "a tensor", one
            continue
        for path, module in one.named_modules():
            for name, tensor in own_tensors(module):
                yield f"{path}.{name}".lstrip("."), tensor


def own_tensors(module: Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from own_parameters(module)
    yield from ((name, buffer) for name, buffer in module._buffers.items() if buffer is not None)


def writable(*what: Module | torch.Tensor) -> AbstractContextManager[None]:
    """Return a `with` block in which code may write to these tensors and modules' weights."""
    found = covered(*what)
    return edited(found, owners(found)) if found else nullcontext()


def held(module: Module) -> AbstractContextManager[object]:
    """Return a `with` block that holds what a call of `module` holds, if it is in a component."""
    its = guard_of(module)
    around = its.around() if its else []
    return around[0].hold(module) if around else nullcontext()


def owners(found: Iterable[Covered]) -> list[ComponentWeights]:
    return list(dict.fromkeys(weights for _, _, weights in found))


class Guard(Marker):
    def __init__(self, module: Any) -> None:
        self.weights: list[ComponentWeights] = []
        self.module = module
        self._handles: list[Any] = []
        attributes: dict[str, Any] = {
            _GUARD: self,
            "__deepcopy__": self._deepcopy,
            "__reduce_ex__": self._reduce,
            "_apply": self._apply,
            "_load_from_state_dict": self._load,
        }
        for name, run in _WRITERS.items():
            # `getattr` on a wrapper may find the methods of the module in it
            if callable(getattr(type(module), name, None)):
                attributes[name] = Method(module, name, partial(run, self))
        #: Attributes under these names that the module itself had.
        self._own = {name: vars(module).get(name) for name in attributes}
        vars(module).update(attributes)  # first: from here on, an interrupt leads to `forget`
        self._handles.append(module.register_state_dict_post_hook(_StateDictHook(self)))
        # before the existing hooks, which must see readable bytes
        module._state_dict_hooks.move_to_end(self._handles[0].id, last=False)
        self._handles.append(module.register_load_state_dict_post_hook(self._loaded))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Guard":
        return self  # a class that copies attributes by hand gets the guard; the copy then drops it

    def around(self) -> list[ComponentWeights]:
        """Return the weights of components whose calls run the module."""
        return [one for one in self.weights if one.has_inside(self.module)]

    def forget(self, weights: ComponentWeights) -> None:
        """Stop guarding these weights. Remove the guard if it guards no others."""
        self.weights = [one for one in self.weights if one is not weights]
        if self.weights:
            return
        for handle in self._handles:
            handle.remove()
        for name, own in self._own.items():
            put_back(vars(self.module), name, own)

    def before(self, name: str) -> Any:
        return self._own.get(name)

    def method(self, name: str, module: Module | None = None) -> Callable[..., Any]:
        module = self.module if module is None else module
        own: Callable[..., Any] | None = self._own[name]
        if own is None:
            own = getattr(type(self.module), name).__get__(module)
        elif isinstance(own, MethodType) and own.__self__ is self.module:
            own = MethodType(own.__func__, module)
        return own

    def owner(self, tensor: torch.Tensor) -> ComponentWeights | None:
        return next((w for w in self.weights if w.covers(tensor)), None)

    def covered(self) -> Iterator[Covered]:
        for name, tensor in own_tensors(self.module):
            if (weights := self.owner(tensor)) is not None:
                yield tensor, name, weights

    # --- instead of the module's own methods ---------------------------------------------

    def _deepcopy(self, memo: dict[int, Any]) -> Any:
        self._fill(memo, private)
        return copied(self.module, memo)

    def _reduce(self, protocol: Any) -> Any:
        memo: dict[int, Any] = {}
        self._fill(memo, stand_in)
        plain = copied(self.module, memo)
        if (starting := get_spawning_popen()) is not None:
            # the new process gets the descriptors a moment after the pickling
            vars(starting).setdefault("_swapd_pickled", []).append(plain)
        return plain.__reduce_ex__(protocol)

    def _fill(
        self, memo: dict[Any, Any], copy: Callable[[torch.Tensor, Copies], torch.Tensor]
    ) -> None:
        filled: set[Module] = memo.setdefault(_GUARD, set())
        if self.module in filled:  # for a module around it
            return
        made = CopiesByOwner()
        for module in self.module.modules():
            filled.add(module)
            if (its := guard_of(module)) is None:
                continue
            for tensor in tensors_of(module):
                if id(tensor) not in memo and (weights := its.owner(tensor)) is not None:
                    memo[id(tensor)] = copy(tensor, made[weights])

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = _moving.by
        if before is fn:  # a module around it has asked
            return self._apply_checked(fn, recurse)
        _refuse_moves(self.module.named_modules() if recurse else [("", self.module)], fn)
        try:
            _moving.by = fn
            return self._apply_checked(fn, recurse)
        finally:
            _moving.by = before

    def _apply_checked(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> Any:
        module: Any = self.module
        mine = {name for _, name, _ in self.covered()}
        if not mine:
            return self.method("_apply")(fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        _apply_to_rest(module, fn, mine)
        return module

    def _load(
        self,
        given: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *others: Any,
    ) -> None:
        module: Any = self.module

        def load(stand_in: Module) -> None:
            method = self.method("_load_from_state_dict", stand_in)
            arguments = given, prefix, local_metadata, strict, missing_keys, *others
            if isinstance(method, MethodType):
                method(*arguments)
                return
            with state_dict.in_place(module, stand_in):  # a bound function that knows the module
                method(*arguments)

        calls = self.around()
        # tensors not to be written in place; all of them, if calls of a component run the module
        staged = (
            (name, tensor, weights)
            for name, tensor in own_tensors(module)
            if (weights := self.owner(tensor)) is not None
            or (calls and not is_lazy(tensor) and not tensor.is_meta)
        )
        state_dict.of(missing_keys, module).run(load, module, prefix, staged, calls)

    def _loaded(self, module: Module, incompatible: Any) -> None:
        state_dict.ended(incompatible.missing_keys, module)


def _apply_to_rest(module: Any, fn: Callable[..., Any], but: set[str]) -> None:
    rest: Any = Module()
    for table in state_dict.TABLES:
        tensors = getattr(module, table).items()
        getattr(rest, table).update({k: t for k, t in tensors if k not in but})
    rest._apply(fn)
    for table in state_dict.TABLES:
        getattr(module, table).update(getattr(rest, table))


class _StateDictHook(Marker):
    def __init__(self, owner: Guard) -> None:
        self._guard = owner

    def __call__(self, module: Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        copies = None
        for tensor, name, weights in self._guard.covered():
            value = state.get(prefix + name)
            # not saved; or the caller wants the tensor itself (keep_vars)
            if value is None or value is tensor:
                continue
            copies = copies or state_dict.copies_in(state, module, prefix)
            state[prefix + name] = copies[weights].of(tensor)


# --- casts and moves ---------------------------------------------------------------------


class _Moving(threading.local):
    #: The function that this thread applies to a module, and that has been tried on its weights.
    by: object = None


_moving = _Moving()


def _refuse_moves(
    modules: Iterable[tuple[str, Module]], fn: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tried = set[object]()
    for path, module in modules:
        its = guard_of(module)
        for tensor, name, weights in () if its is None else its.covered():
            probe = _like(tensor)
            kind = probe.shape, probe.stride(), probe.dtype, probe.device
            if kind not in tried:
                tried.add(kind)
                _refuse_move(f"{path}.{name}".lstrip("."), probe, fn, weights.name)


def _refuse_move(
    name: str, probe: Any, fn: Callable[[torch.Tensor], torch.Tensor], component: str
) -> None:
    """Raise NotWhileAttached unless `fn`, tried on a few elements like these, changes nothing."""
    shared = probe.is_shared()
    with torch.no_grad():
        made: Any = fn(probe)
    if made is probe and made.is_shared() == shared:
        return
    what = "be moved to shared memory" if made is probe else _difference(probe, made)
    raise NotWhileAttached(
        f"{name!r} cannot {what}: its memory is swapd's, as part of {component!r}. Nothing was "
        "changed. detach() first, then do this, then attach() again"
    )


def _difference(probe: torch.Tensor, made: torch.Tensor) -> str:
    if made.device != probe.device:
        return f"be moved from {probe.device} to {made.device}"
    if made.dtype != probe.dtype:
        return f"be cast from {probe.dtype} to {made.dtype}"
    return "be replaced"


def _like(tensor: torch.Tensor) -> Any:
    shape = [min(n, 2) for n in tensor.shape]
    strides = [0] * len(shape)
    step = 1
    for at in sorted(range(len(shape)), key=lambda i: (tensor.stride(i), -i)):
        strides[at] = step
        step *= max(shape[at], 1)
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)


# --- methods that write ------------------------------------------------------------------


def _write(owner: Guard, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with writable(owner.module):
        return method(*args, **kwargs)


def _write_layers(owner: Guard, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """For methods that merge adapters into layers one by one; `tools.py` makes each writable."""
    with edits(owner.weights):
        return method(*args, **kwargs)


def _refuse_resize(owner: Guard, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    wanted = kwargs.get("new_num_tokens", args[0] if args else None)
    more = len(args) > 1 or kwargs.get("pad_to_multiple_of") is not None
    there = owner.module.get_input_embeddings()
    if wanted is None or (not more and wanted == getattr(there, "num_embeddings", None)):
        return method(*args, **kwargs)
    names = ", ".join(repr(one.name) for one in owner.weights)
    raise NotWhileAttached(
        f"{method.__name__}({wanted}) on a {type(owner.module).__name__} changes the shape of "
        f"weights that are in swapd, as part of {names}. Nothing was changed. detach() first, then "
        "do this, then attach() again"
    )


_WRITERS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("fuse_lora", "unfuse_lora"), _write_layers),  # diffusers
    # makes new private weights from the existing ones
    "fuse_qkv_projections": _write,  # diffusers
    "_rescale_layers": _write,  # RWKV, in its first forward in each mode
    "resize_token_embeddings": _refuse_resize,  # transformers
}
