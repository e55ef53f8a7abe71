"""Hooks and wrapped methods around a module's calls: they acquire its component, and release it.

Native hooks: forward stays as it was (`forwards.py`). The hooks' work is in `shortcuts.py` and, in
full, in `gate.py`. Hooks and wrapped methods are objects of classes, so that a module can be
pickled and copied: in the copy they do nothing.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

from swapd_client.errors import NotWhileAttached, SwapdError
from swapd_client.offload import find, forwards, generators
from swapd_client.offload.dynamo import uncompiled
from swapd_client.offload.gate import Gate
from swapd_client.offload.ours import Ours
from swapd_client.offload.returned import LATER
from swapd_client.offload.scope import here
from swapd_client.offload.shortcuts import Enter, Leave, Pair


def install(
    module: torch.nn.Module, gate: Gate, *, is_compiled: bool = False, is_member: bool = False
) -> tuple[Pair, Callable[[], None]]:
    """Have each call of `module` enter and leave `gate`; returns the hooks, and the undo.

    If `is_compiled`, the module is compiled as one: its hooks stay outside of the compiled code. If
    `is_member`, it may share compiled code with others in its list, which is without the hooks.

    The hooks run before every existing pre-hook and after every existing forward hook. A hook
    registered later runs without the component, unless the call is inside another one.
    """
    by = object()
    compiled = not is_member
    pair = Pair(module, Enter(gate, by, compiled=compiled), Leave(gate, by, compiled=compiled))
    undistinguish = None if is_compiled or is_member else forwards.distinguish(module)
    object.__setattr__(module, _TO_SCRIPT, _Unscriptable(module, gate.name))

    def undo() -> None:
        pair.remove()
        if undistinguish is not None:
            undistinguish()
        module.__dict__.pop(_TO_SCRIPT, None)

    return pair, undo


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether a gate is around its calls."""
    return _TO_SCRIPT in module.__dict__


#: `torch.jit.script` calls this first.
_TO_SCRIPT = "__prepare_scriptable__"


class _Unscriptable(Ours):
    """Makes `torch.jit.script` raise with advice. A copy of the module can be scripted."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module = module
        self._name = name

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_name": ""}

    def __call__(self) -> torch.nn.Module:
        if self._name:
            raise NotWhileAttached(
                f"{self._name!r} is attached to swapd, and a scripted module would not load its "
                "weights: call detach() on its attachment first"
            )
        return self._module


# --- methods -----------------------------------------------------------------------------


@uncompiled
def _apart(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` outside of compiled code."""
    return function(*args, **kwargs)


class Method(Ours):
    """A method of one module that holds its component while it runs.

    An attribute of the module, so the class is unchanged. In a copy of the module it is the copy's
    method, and holds nothing.
    """

    def __init__(self, module: torch.nn.Module, name: str, gate: Gate | None) -> None:
        self._module = module
        self._name = name
        self._gate = gate
        self.__name__ = name
        #: The module's own attribute of that name, if it had one.
        self._before = module.__dict__.get(name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gate": None}

    def __repr__(self) -> str:
        return f"<{self.__wrapped__!r}, under a lease>"

    def before(self, name: str) -> Any:
        return self._before

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original method, which gives this one its signature."""
        if self._before is not None:
            method: Callable[..., Any] = self._before
        else:
            method = getattr(type(self._module), self._name).__get__(self._module)
        return method

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__wrapped__.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _apart(self, *args, **kwargs)
        return self._held(args, kwargs)

    def _held(self, args: Any, kwargs: Any) -> Any:
        gate = self._gate
        if gate is None:
            return self.__wrapped__(*args, **kwargs)
        by = object()
        if not here().has(gate.held, gate.all_of_it, 1):
            self._enter(gate, by)
        try:
            output = self.__wrapped__(*args, **kwargs)
        except BaseException:
            with suppress(SwapdError):  # an earlier error is the one to report
                self._leave(gate, by, None)
            raise
        later = type(output) in LATER
        output = self._leave(gate, by, output)
        return generators.lease(output, gate.held, gate.own) if later else output

    def _enter(self, gate: Gate, by: object) -> None:
        gate.enter(by)

    def _leave(self, gate: Gate, by: object, output: Any) -> Any:
        entry = here().find(by)
        return output if entry is None else gate.leave(entry, output)


def wrap(module: torch.nn.Module, name: str, gate: Gate) -> Callable[[], None]:
    """Have a method hold `gate` while it runs; returns the undo."""
    return put(module, Method(module, name, gate))


def put(module: torch.nn.Module, method: Method) -> Callable[[], None]:
    """Put `method` in the place of the module's own; returns the undo."""
    name = method.__name__
    setattr(module, name, method)

    def undo() -> None:
        if method._before is not None:
            setattr(module, name, method._before)
        else:
            module.__dict__.pop(name, None)

    return undo


class _Twin(Method):
    """A call of a compiled module's original, from the compiled module or directly."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._gate is not None:
            _apart(self._gate.refuse_grad)
        return self._held(args, kwargs)

    def _enter(self, gate: Gate, by: object) -> None:
        _apart(super()._enter, gate, by)

    def _leave(self, gate: Gate, by: object, output: Any) -> Any:
        return _apart(super()._leave, gate, by, output)


def wrap_twin(compiled: torch.nn.Module, gate: Gate) -> Callable[[], None]:
    """Have also the original of `compiled` hold `gate` when it is called; returns the undo.

    Its compiled code stays valid. If torch compiles the call as well, as for torch's own classes,
    nothing is done.
    """
    twin = find.bare(compiled)
    calls = getattr(vars(compiled).get("forward"), "_torchdynamo_orig_callable", None)
    if getattr(calls, "__self__", None) is not twin or "_call_impl" in vars(twin):
        return lambda: None
    from torch._dynamo.decorators import skip

    for function in (_Twin.__call__, _Twin._held, _Twin._enter, _Twin._leave):
        skip(function)  # torch compiles the functions that they call, not these
    held = vars(twin)["_call_impl"] = _Twin(twin, "_call_impl", gate)

    def undo() -> None:
        if vars(twin).get("_call_impl") is held:
            del vars(twin)["_call_impl"]

    return undo


#: Methods of a component with these prefixes only switch an option.
_SWITCHES = ("enable_", "disable_", "set_")


def methods_of(module: torch.nn.Module) -> Iterable[str]:
    """The public methods that a component's own class adds, and `generate`.

    Own methods are those defined in the module of the class, or of the class that has its forward.
    The methods of torch's own classes are for building modules.
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
        and not isinstance(value, (type, staticmethod, classmethod))
        and not name.startswith(("_", *_SWITCHES))
        and not hasattr(torch.nn.Module, name)
    )
