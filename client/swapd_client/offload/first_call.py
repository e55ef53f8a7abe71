"""Watches the first call of a streamed component, or of a module around components.

Hooks load a block, or a component, for its own call. But a model may call a part of a block, call
`forward` past the hooks, or read weights itself. If the first call reads weights that its thread
does not hold, swapd loads them, and from then on the method that made the read holds them while it
runs.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from inspect import getattr_static
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.utils import _python_dispatch as modes

from swapd_client.errors import Deadlock, SwapdError, TooLarge
from swapd_client.log import log
from swapd_client.offload import dynamo
from swapd_client.offload.copies import Method, ToUndo
from swapd_client.offload.dynamo import uncompiled, when_imported
from swapd_client.offload.gate import LeaseGate
from swapd_client.offload.hooks import wrap
from swapd_client.offload.outputs import LATER, tensors_in
from swapd_client.offload.scope import Entry, here, thread
from swapd_client.offload.update_barrier import tell


class ReadPart(NamedTuple):
    gate: LeaseGate
    names: Sequence[str]
    modules: Collection[Module]


class FirstCall(Method):
    def __init__(
        self,
        module: Module,
        name: str,
        gate: LeaseGate | None,
        parts: Sequence[ReadPart],
        to_undo: ToUndo,
    ) -> None:
        """`parts`: what a call may read. A call that holds all behind `gate` is not watched."""
        super().__init__(module, name, None)
        self._gate = gate
        self._parts = parts
        self._to_undo = to_undo
        #: Whether the module was detached meanwhile, or has other hooks, which hold what it reads.
        self.is_over = False

    def end(self) -> None:
        self.is_over = True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_gate": None, "_parts": (), "_to_undo": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gate, parts = self._gate, self._parts
        if not parts or (gate is not None and gate.all_of_it in thread.scope.counts):
            return self.__wrapped__(*args, **kwargs)
        reads = _Reads(self, parts, self._to_undo)
        try:
            _begin(reads)
            output = _own(reads, self.__wrapped__(*args, **kwargs))
            _end(reads)
            self._parts = ()
            return output
        except BaseException:  # also an interrupt, perhaps in `_end`
            _end(reads)
            raise


_CALL = FirstCall.__call__.__code__


class _Reads(modes.TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, call: FirstCall, parts: Sequence[ReadPart], to_undo: ToUndo) -> None:
        self._call = call
        self._parts = parts
        self._to_undo = to_undo
        self._found: list[tuple[str, str]] = []
        self._loaded: set[LeaseGate] = set()
        #: An entry for each read, with the frame of the method that made it.
        self._held: list[tuple[Entry, FrameType]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch never compiles code again that it meets under a mode without this."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch imports its compiler to skip the next method. See `_skip`."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not getattr(func, "is_view", False):  # else it reads nothing
            self._release(ended=True)
            self._load_for((args, kwargs), sys._getframe(1))
        return func(*args, **kwargs or {})

    def _load_for(self, values: Any, frame: FrameType) -> None:
        for tensor in () if self._call.is_over else tensors_in(values):
            having = [part for part in self._parts if part.gate.lent.has(tensor)]
            if having and not any(part.gate.is_held_by(thread.scope) for part in having):
                self._load(having[0], frame)

    def _load(self, part: ReadPart, frame: FrameType) -> None:
        module, name, frame = self._reader(part, frame)
        path = next((p for p, m in self._call._module.named_modules() if m is module), "")
        reader, read = f"{path}.{name}".lstrip("."), " + ".join(part.names)
        entry = Entry(part.gate.held, self)
        self._held.append((entry, frame))
        try:
            part.gate.enter(entry)
        except (TooLarge, Deadlock) as exc:
            beside = ", ".join(before for _, before in self._found)
            raise TooLarge(
                f"{exc}. {reader} reads {read} outside of the calls that load it"
                f"{f', and reads {beside} too' if beside else ''}: attach with other blocks "
                "(blocks=) or components, or with more of it resident"
            ) from exc
        self._found.append((reader, read))
        self._loaded.add(part.gate)
        wrap(module, name, part.gate, self._to_undo)

    def _release(self, *, ended: bool) -> None:
        while self._held and not (ended and _is_running(self._held[-1][1])):
            with suppress(SwapdError):  # the call's own release raises it, too
                here().leave(self._held[-1][0])
            self._held.pop()
            tell()

    def _reader(self, part: ReadPart, frame: FrameType) -> tuple[Module, str, FrameType]:
        """Return the module, name and frame of the method that reads.

        This is the outermost running method of the part's own modules, or if no such method is
        running, the watched method.
        """
        found, outermost = None, frame
        at: FrameType | None = frame
        while at is not None and not (at.f_code is _CALL and at.f_locals["self"] is self._call):
            outermost, code = at, at.f_code
            caller = at.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if (
                isinstance(caller, Module)
                and caller in part.modules
                and _is_method(caller, code.co_name)
            ):
                found = caller, code.co_name, at
            at = at.f_back
        return found or (self._call._module, self._call.__name__, outermost)

    def own(self, output: Any) -> Any:
        """Return the call's output, with copies of weights that only the reads hold."""
        self._load_for(output, sys._getframe(1))
        for gate in self._loaded:
            output = gate.own(output)
        return output

    def release(self) -> None:
        self._release(ended=False)
        if self._found:
            log.info(
                "%s: methods that read weights outside of the calls that load them hold them from "
                "now on: %s",
                type(self._call._module).__name__,
                ", ".join(f"{reader} ({read})" for reader, read in self._found),
            )


def _is_running(call: FrameType) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


def _skip() -> None:
    dynamo.skip(FirstCall.__call__)
    disable: Any = torch.compiler.disable
    _Reads.__torch_dispatch__ = disable(_Reads.__torch_dispatch__)  # type: ignore[method-assign]


when_imported(_skip)


# `with reads` would also set flags that all threads share.


@uncompiled
def _begin(reads: _Reads) -> None:
    modes._push_mode(reads)


@uncompiled
def _own(reads: _Reads, output: Any) -> Any:
    _pop(reads)
    return output if type(output) in LATER else reads.own(output)


@uncompiled
def _end(reads: _Reads) -> None:
    """Undo `_begin`, and release what the reads hold. May be repeated after an interrupt."""
    _pop(reads)
    reads.release()


def _pop(reads: _Reads) -> None:
    if modes._get_current_dispatch_mode() is reads:
        modes._pop_mode()


def _is_method(module: Module, name: str) -> bool:
    is_own = name == "forward" or not hasattr(Module, name)
    return is_own and isinstance(getattr_static(type(module), name, None), FunctionType)
