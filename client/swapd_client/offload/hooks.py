"""What is called around a module's forward and methods: its component comes in, and may go.

Native hooks: forward does what it did (`forwards.py`). Hooks and wrapped methods are objects of
classes of this file, so that a module can be pickled and copied: in the copy they do nothing.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any

import torch

from swapd_client.errors import DaemonGone, NotWhileAttached, SwapdError, WouldDeadlock
from swapd_client.offload import find, forwards, generators
from swapd_client.offload.aside import Pair
from swapd_client.offload.changing import changing, tell, wait
from swapd_client.offload.dynamo import uncompiled
from swapd_client.offload.growth import Growth
from swapd_client.offload.ours import Ours
from swapd_client.offload.returned import Lent
from swapd_client.offload.scope import CALL, Entry, Held, calling, here, thread

_LATER = (GeneratorType, CoroutineType, AsyncGeneratorType)


_NOTHING = Lent()


class Gate:
    """The way into a component: what is held, and what is looked at before."""

    def __init__(
        self,
        name: str,
        held: Held,
        whole: Held,
        all_of_it: Held,
        parameters: tuple[torch.Tensor, ...] = (),
        grown: Growth | None = None,
        gone: Callable[[DaemonGone], None] | None = None,
        lent: Lent = _NOTHING,
        all_lent: Lent | None = None,
    ) -> None:
        """`held` is what an entry here holds: the component, or a block of it; `whole` is held
        whenever any of it is, and with `all_of_it` there is nothing left to hold. `parameters`:
        those that backward would read. `gone(error)` is told that the daemon is, and raises, or
        sees to it that there is nothing to hold any more. `lent`: what is held by `held`;
        `all_lent`: by `whole`, if that is more.
        """
        self.name = name
        self.held = held
        self.whole = whole
        self.all_of_it = all_of_it
        self._lent = lent
        self._all_lent = lent if all_lent is None else all_lent
        self._parameters = parameters
        self._grown = grown
        self._gone = gone

    def enter(self, by: object, frame: FrameType | None = None) -> None:
        """A call begins, and its thread does not have it. `frame`: the call, if its end may be
        heard of from nobody.

        Raises as `Client.acquire`; NotWhileAttached.
        """
        scope = thread.scope
        if scope.entries:
            scope.reap()
        if self.whole not in scope.counts:
            if self._grown is not None and self._grown.changed:
                self._grown.tell()
            if torch.is_grad_enabled():
                self._refuse_grad()
            if torch._C._get_tracing_state() or torch.compiler.is_exporting():
                raise self._untraceable()
            scope.begins = self.held  # said before it is looked who changes it
            if changing.now is not None:
                wait()
        try:
            scope.enter(self.held, frame, by)
        except DaemonGone as exc:
            if self._gone is None:
                raise
            self._gone(exc)
        except WouldDeadlock as exc:
            raise WouldDeadlock(
                f"{exc}. If {self.name!r} was called inside of a call of what is held, both have "
                "to be in at once: attach them as one component, or stream the larger (resident=)"
            ) from exc
        finally:
            scope.begins = None

    def leave(self, entry: Entry, output: Any) -> Any:
        """That call ends, and returns `output`: returns that, without what is lent no longer.

        Raises: NotWhileAttached, and as a release.
        """
        scope = thread.scope
        try:
            if output is not None:
                output = self.own(output)
        finally:
            scope.leave(entry)
            if changing.now is not None:
                tell()
        if (
            torch.is_grad_enabled()
            and not self.whole.uses
            and self.whole not in scope.counts
            and _needs_grad(output)
        ):
            raise self._grad("what it returned requires grad")
        return output

    def own(self, output: Any) -> Any:
        """What a call returns, or a generator yields, that is about to leave: with copies of what
        is lent no longer then. Raises: NotWhileAttached."""
        counts = thread.scope.counts
        count = counts.get(self.held)
        if count is None or count.n > 1:
            return output
        ends = self.held is self.whole or counts[self.whole].n == 1
        return (self._all_lent if ends else self._lent).copied(output, self.name)

    def _refuse_grad(self) -> None:
        # backward may come when nothing is held any more
        if not self.whole.uses and any(p.requires_grad for p in self._parameters):
            raise self._grad("its parameters require grad")

    def _untraceable(self) -> NotWhileAttached:
        return NotWhileAttached(
            f"{self.name!r} is attached to swapd, and what is exported or traced would not "
            "bring its weights in: call detach() on its attachment first"
        )

    def _grad(self, why: str) -> NotWhileAttached:
        return NotWhileAttached(
            f"{self.name!r} was called in grad mode, and {why}: backward would read its weights "
            "when nothing holds them any more. Call it under torch.inference_mode() or "
            f"torch.no_grad(), or hold it over backward too: with attachment.use({self.name!r})"
        )


def _needs_grad(output: Any) -> bool:
    if isinstance(output, torch.Tensor):
        return output.requires_grad
    if isinstance(output, Mapping):
        return any(map(_needs_grad, output.values()))
    if isinstance(output, (list, tuple)):
        return any(map(_needs_grad, output))
    return False


# --- hooks -------------------------------------------------------------------------------


class _Hook(Ours):
    """A hook of one module. A copy of it, or one that was pickled, has no gate."""

    __slots__ = ("_by", "_gate")

    def __init__(self, gate: Gate | None = None, by: object = None) -> None:
        self._gate = gate
        self._by = by

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return type(self), ()


#: Above a hook that torch calls: its `inner`, then the call. Looked at first: to search is slow.
_CALLER = 2


@uncompiled
def _apart(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a hook does is no part of what is compiled. Where nothing is, this would cost most."""
    if isinstance(hook, Enter) and hook.pair is not None:
        hook.pair.have_leave()  # what is compiled next has it for good, or never
    return hook(*args, **kwargs)


class Enter(_Hook):
    """Before forward."""

    __slots__ = ("_far", "pair")

    def __init__(self, gate: Gate | None = None, by: object = None) -> None:
        super().__init__(gate, by)
        #: How far up the stack it last found the call that holds what this one needs.
        self._far = 1
        #: Itself and what leaves, if they are put aside at times.
        self.pair: Pair | None = None

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            _apart(self, module, args)
            return
        gate = self._gate
        if gate is None:
            return
        scope = thread.scope
        far = scope.has(gate.held, gate.all_of_it, self._far) if scope.counts else 0
        if far:
            self._far = far
        else:
            call = sys._getframe(_CALLER)
            gate.enter(self._by, call if call.f_code is CALL else calling())
            if self.pair is not None:
                self.pair.have_leave()


class Leave(_Hook):
    """After forward, also if it raised."""

    __slots__ = ()

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _apart(self, module, args, output)
        gate = self._gate
        if gate is None:
            return None
        later = isinstance(output, _LATER)
        scope, by = thread.scope, self._by
        entries = scope.entries
        # it is mostly the last
        entry = entries[-1] if entries and entries[-1].by is by else scope.find(by)
        if entry is not None and (
            entry.frame is sys._getframe(_CALLER) or _is_of(entry, calling())
        ):
            if later:
                gate.leave(entry, None)
            elif (kept := gate.leave(entry, output)) is not output:
                return kept
        return generators.lease(output, gate.held, gate.own) if later else None


def _is_of(entry: Entry, call: FrameType | None) -> bool:
    """Whether it was made by this call, not by one of the same module around it."""
    return entry.frame is call or entry.frame is None or call is None


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
        later = isinstance(output, _LATER)
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
