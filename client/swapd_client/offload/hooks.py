"""Makes calls of a module, and of its methods, hold its component while they run.

torch calls a module by its `_call_impl`, or the compiled one of `Module.compile`. An attribute of
the module takes that place, so its class and `forward` stay as they were. Copies and pickles of the
module are without it.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.nn import Module

from swapd_client.errors import NotWhileAttached
from swapd_client.offload import dynamo, search
from swapd_client.offload.copies import Marker, Method, ToUndo, put_back
from swapd_client.offload.gate import LeaseGate

_HOOK = "_swapd_hook"


def _held(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs in place of `_call_impl`."""
    hook: Hook | None = vars(self).get(_HOOK)
    if hook is None:  # code compiled in place calls this after `detach`
        return type(self)._call_impl(self, *args, **kwargs)
    # each is read once: another thread may take it away
    if (door := hook.door) is not None:
        _wait(door, self)
    if (gate := hook.gate) is None:
        return hook.inner(*args, **kwargs)
    return gate.run(hook.inner, args, kwargs)


@dynamo.uncompiled
def _wait(door: Callable[[Module], None], module: Module) -> None:
    door(module)


#: The code of each call of a module with a hook.
HELD = _held.__code__


def _held_uncompiled(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As `_held`, for modules that may share compiled code: that code is without the hook."""
    if torch.compiler.is_dynamo_compiling():
        return type(self)._call_impl(self, *args, **kwargs)
    return _held(self, *args, **kwargs)


for _function in (_held, _held_uncompiled):
    _function.marker = Marker()  # type: ignore[attr-defined]
dynamo.when_imported(lambda: dynamo.skip(_held))


class Hook(Marker):
    """Replaces the attribute by which torch calls a module, while it has a gate or a door."""

    def __init__(self, module: Module) -> None:
        self._attributes = vars(module)
        compiled = module._compiled_call_impl is not None
        self._slot = "_compiled_call_impl" if compiled else "_call_impl"
        self._before = self._attributes.get(self._slot)
        self._runs = MethodType(_held, module)
        self.inner: Callable[..., Any] = self._before or MethodType(type(module)._call_impl, module)
        #: Where calls wait during `attach`.
        self.door: Callable[[Module], None] | None = None
        self.gate: LeaseGate | None = None
        #: Takes this hook out at times; None if the hook always stays.
        self.aside: BlockHooks | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return self  # a class that copies attributes by hand gets it; the copy then drops it

    def share_compiled_code(self) -> None:
        runs = MethodType(_held_uncompiled, self._runs.__self__)
        if self._attributes.get(self._slot) is self._runs:  # at the door; no interrupt comes here
            self._attributes[self._slot] = runs
        self._runs = runs

    def refuse_script(self) -> Module:
        """Raise NotWhileAttached. Called by `torch.jit.script`."""
        name = "" if self.gate is None else self.gate.name
        raise NotWhileAttached(
            f"{name!r} is attached to swapd, and a scripted module would not load its weights: "
            "call detach() on its attachment first"
        )

    def put(self) -> None:
        self._attributes[_HOOK] = self
        self._attributes[self._slot] = self._runs

    def take_out(self) -> None:
        if self._attributes.get(self._slot) is self._runs:
            put_back(self._attributes, self._slot, self._before)

    def end(self, what: str) -> None:
        """Remove the "door" or the "gate". Without both, remove the hook from the module."""
        setattr(self, what, None)
        if self.door is None and self.gate is None:
            self.take_out()
            self._attributes.pop(_HOOK, None)


def hook_of(module: Module) -> Hook | None:
    return vars(module).get(_HOOK)


def is_attached(module: Module) -> bool:
    hook = hook_of(module)
    return hook is not None and hook.gate is not None


def install(
    module: Module,
    gate: LeaseGate,
    to_undo: ToUndo,
    *,
    is_compiled: bool = False,
    is_member: bool = False,
) -> Hook:
    """Have each call of `module` run through `gate`.

    `is_compiled`: as one, so the hook stays outside of the compiled code. `is_member`: of a list
    whose members may share compiled code; that code is without the hook.
    """
    hook = hook_of(module) or Hook(module)
    distinct = not (is_compiled or is_member)

    def undo() -> None:
        if hook.aside is not None:
            hook.aside.discard(hook)
        hook.end("gate")
        if distinct:
            dynamo.undistinguish(module)
        vars(module).pop(_TO_SCRIPT, None)

    to_undo(undo)
    if distinct:
        dynamo.distinguish(module)
    vars(module)[_TO_SCRIPT] = hook.refuse_script
    if is_member:
        hook.share_compiled_code()
    hook.gate = gate
    hook.put()
    return hook


def hook_original(compiled: Module, gate: LeaseGate, to_undo: ToUndo) -> None:
    """Have direct calls of the original of `compiled` run through `gate`, too.

    The compiled code stays valid. No-op if torch compiles the original's call as well, as for
    torch's own classes.
    """
    original = search.bare(compiled)
    calls = getattr(vars(compiled).get("forward"), "_torchdynamo_orig_callable", None)
    if getattr(calls, "__self__", None) is not original or is_attached(original):
        return
    install(original, gate, to_undo, is_compiled=True)


#: `torch.jit.script` calls this first.
_TO_SCRIPT = "__prepare_scriptable__"


# --- hooks that are removed at times -----------------------------------------------------


class BlockHooks:
    """The hooks of a component's blocks, and of single layers beside them.

    A pass that holds the whole component removes them meanwhile: a hook that does nothing still
    costs microseconds, and more with cold caches. Other threads' direct calls then run under its
    lease. During a compilation all hooks are installed: the compiled code keeps them as they were.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooks: list[Hook] = []
        #: Passes and direct calls that go block by block; and passes that hold the whole component.
        self._by_block: set[object] = set()
        self._whole: set[object] = set()
        #: None after an interrupt: some may be removed.
        self._removed: bool | None = False
        _all.add(self)

    def add(self, hook: Hook) -> None:
        """Manage a hook. Call it while no pass is under way."""
        hook.aside = self
        with self._lock:
            self._hooks.append(hook)

    def discard(self, hook: Hook) -> None:
        with self._lock:
            hook.aside = None
            self._hooks = [one for one in self._hooks if one is not hook]

    def begin(self, by: object, *, whole: bool) -> None:
        with self._lock:
            (self._whole if whole else self._by_block).add(by)
            self._follow()

    def end(self, by: object) -> None:
        with self._lock:
            self._whole.discard(by)
            self._by_block.discard(by)
            self._follow()

    def _follow(self) -> None:
        remove = bool(self._whole) and not self._by_block
        if self._removed is remove:
            return
        self._removed = None
        if remove:
            _hear_of_compilations()
        for hook in self._hooks:
            if remove:
                hook.take_out()
            else:
                hook.put()
        self._removed = remove


_all: "weakref.WeakSet[BlockHooks]" = weakref.WeakSet()
#: The compilations under way, innermost last, and the managers told of each.
_told: list[tuple[object, list[BlockHooks]]] = []


def _compile_begins(*_: object) -> None:
    compilation, told = object(), list(_all)
    _told.append((compilation, told))
    for aside in told:
        aside.begin(compilation, whole=False)


def _compile_ends(*_: object) -> None:
    compilation, told = _told.pop() if _told else (None, [])
    for aside in told:
        aside.end(compilation)


def _hear_of_compilations() -> None:
    """Register the callbacks, also after each `torch.compiler.reset()`, which drops them."""
    callback = sys.modules.get("torch._dynamo.callback")
    handler: Any = getattr(callback, "callback_handler", None)
    if handler is not None and _compile_begins not in handler.start_callbacks:
        handler.register_start_callback(_compile_begins)
        handler.register_end_callback(_compile_ends)


dynamo.when_imported(_hear_of_compilations)


# --- methods -----------------------------------------------------------------------------


dynamo.when_imported(lambda: dynamo.skip(Method.__call__))


def wrap(module: Module, name: str, gate: LeaseGate, to_undo: ToUndo) -> None:
    put(module, Method(module, name, partial(gate.run, is_forward=False)), to_undo)


def put(module: Module, method: Method, to_undo: ToUndo) -> None:
    name = method.__name__
    to_undo(partial(put_back, vars(module), name, method.before(name)))
    setattr(module, name, method)


#: Methods with these prefixes only switch an option.
_SWITCHES = ("enable_", "disable_", "set_")


def methods_of(module: Module) -> Iterable[str]:
    """Return the public methods that a component's own class adds, and `generate`.

    They are in the file of the class, or of the class that has its forward, but not in torch's own.
    """
    kind = type(module)
    forward = next((c for c in kind.__mro__ if "forward" in vars(c)), kind)
    files = {kind.__module__, forward.__module__}
    found = {"generate"} if callable(getattr(kind, "generate", None)) else set()
    for one in kind.__mro__:
        if one.__module__ in files and not one.__module__.startswith("torch.nn."):
            found.update(n for n, value in vars(one).items() if _is_method(n, value))
    return sorted(found)


def _is_method(name: str, value: object) -> bool:
    return (
        callable(value)
        and hasattr(type(value), "__get__")  # else it does not get the module, and cannot read it
        and not isinstance(value, (staticmethod, classmethod))
        and not name.startswith(("_", *_SWITCHES))
        and not hasattr(Module, name)
    )
