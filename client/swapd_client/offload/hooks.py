"""What is put around a module's forward and methods: its component comes in, and may go.

Native hooks: forward does what it did (`forwards.py`). What they do is in `shortcuts.py` and, in
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
    module: torch.nn.Module, gate: Gate, *, is_compiled: bool = False
) -> tuple[Pair, Callable[[], None]]:
    """Have `gate` entered by each call of `module`, and left; returns also what undoes it.

    One that `is_compiled` as one has its hooks outside of that, and stays compiled as it was.

    Before every pre-hook there is, and after every forward hook there is. A hook that is
    registered later runs without the component, unless its own call comes in between.
    """
    by = object()
    pair = Pair(module, Enter(gate, by), Leave(gate, by))
    undistinguish = None if is_compiled else forwards.distinguish(module)
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


#: What torch.jit.script calls first.
_TO_SCRIPT = "__prepare_scriptable__"


class _Unscriptable(Ours):
    """Has torch.jit.script say what to do. Of a copy of the module it is said that it may be."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module = module
        self._name = name

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_name": ""}

    def __call__(self) -> torch.nn.Module:
        if self._name:
            raise NotWhileAttached(
                f"{self._name!r} is attached to swapd, and what is scripted would not bring its "
                "weights in: call detach() on its attachment first"
            )
        return self._module


# --- methods -----------------------------------------------------------------------------


@uncompiled
def _apart(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What is done around a call is no part of what is compiled."""
    return function(*args, **kwargs)


class Method(Ours):
    """A method of one module that holds its component while it runs.

    An attribute of the module, so that the class is as it was. In a copy of the module it is the
    copy's method, and holds nothing.
    """

    def __init__(self, module: torch.nn.Module, name: str, gate: Gate) -> None:
        self._module = module
        self._name = name
        self._gate: Gate | None = gate
        self.__name__ = name
        #: What the module had there of its own.
        self._before = module.__dict__.get(name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gate": None}

    def __repr__(self) -> str:
        return f"<{self.__wrapped__!r}, under a lease>"

    def before(self, name: str) -> Any:
        return self._before

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The method itself; its signature is this one's."""
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
            with suppress(SwapdError):  # what went wrong first is what to say
                self._leave(gate, by, None)
            raise
        later = isinstance(output, LATER)
        output = self._leave(gate, by, output)
        return generators.lease(output, gate.held, gate.own) if later else output

    def _enter(self, gate: Gate, by: object) -> None:
        gate.enter(by)

    def _leave(self, gate: Gate, by: object, output: Any) -> Any:
        entry = here().find(by)
        return output if entry is None else gate.leave(entry, output)


def wrap(module: torch.nn.Module, name: str, gate: Gate) -> Callable[[], None]:
    """Have a method hold `gate` while it runs; returns what undoes it."""
    method = Method(module, name, gate)
    setattr(module, name, method)

    def undo() -> None:
        if method._before is not None:
            setattr(module, name, method._before)
        else:
            module.__dict__.pop(name, None)

    return undo


class _Twin(Method):
    """The call of what a compiled module was made from: by itself, or by the compiled one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._held(args, kwargs)

    def _enter(self, gate: Gate, by: object) -> None:
        _apart(super()._enter, gate, by)

    def _leave(self, gate: Gate, by: object, output: Any) -> Any:
        return _apart(super()._leave, gate, by, output)


def wrap_twin(compiled: torch.nn.Module, gate: Gate) -> Callable[[], None]:
    """Have also what `compiled` was made from hold `gate` when it is called; returns what undoes
    it. What is compiled of it is as it was.

    Of one whose call torch compiles as well, as it does of torch's own classes, nothing is done.
    """
    twin = find.bare(compiled)
    calls = getattr(vars(compiled).get("forward"), "_torchdynamo_orig_callable", None)
    if getattr(calls, "__self__", None) is not twin or "_call_impl" in vars(twin):
        return lambda: None
    from torch._dynamo.decorators import skip

    for function in (_Twin.__call__, _Twin._held, _Twin._enter, _Twin._leave):
        skip(function)  # what they call is compiled, they are not
    held = vars(twin)["_call_impl"] = _Twin(twin, "_call_impl", gate)

    def undo() -> None:
        if vars(twin).get("_call_impl") is held:
            del vars(twin)["_call_impl"]

    return undo


#: Of a component's own methods, these only switch something.
_SWITCHES = ("enable_", "disable_", "set_")


def methods_of(module: torch.nn.Module) -> Iterable[str]:
    """The public methods that a component's own class adds, and `generate`.

    Own is what is defined beside the class, or beside the class that has its forward; not what
    torch's own classes have, which is for building them.
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
