"""Keeps calls of a model away while its weights move into swapd.

A call that began before the hooks has no lease, so its weights could be evicted under it. `attach`
waits for such calls. New calls wait at a door until it is over, and then run with the hooks.
Suspended generators and coroutines are on no thread's stack, so `attach` does not see them.
"""

import gc
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from types import FrameType

from torch.nn import Module

from swapd_client.errors import InUse
from swapd_client.log import log
from swapd_client.offload.copies import Method
from swapd_client.offload.hooks import HELD, Hook, hook_of
from swapd_client.offload.scope import here

#: Limited, since a thread in a call may be waiting for the thread that attaches.
PATIENCE_S = 30.0
#: A call without a hook sends no signal when it ends, so the wait polls.
_LOOK_AGAIN_S = 0.01
#: Every call of a module runs one of these; one with a hook, which may wait for its lease, both.
_CALLS = Module._call_impl.__code__, HELD


def frames() -> dict[int, list[FrameType]]:
    """Return the frames of each thread, the innermost first.

    Nothing is collected meanwhile. CPython before 3.11.9 holds its lock of threads (gh-106883): a
    finalizer that starts a thread would wait for ever. And while `f_back` makes an object, a
    finalizer may let the thread run on, which frees the frame.
    """
    collects = gc.isenabled()
    try:
        gc.disable()
        return {thread: stack(frame) for thread, frame in sys._current_frames().items()}
    finally:
        if collects:
            gc.enable()


def stack(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def without_calls(
    entrances: Iterable[Module],
    modules: Iterable[Module],
    methods: Collection[str],
    do: Callable[[], None],
) -> None:
    """Call `do()` while no other thread is in a call of `modules`.

    `entrances` are called from outside. Calls of `methods` count like forwards. Blocks until the
    calls under way have ended. Raises: InUse, naming calls that do not end.
    """
    calls = _Calls({id(module) for module in modules}, methods)
    try:
        for module in entrances:
            calls.doors.append(hook := hook_of(module) or Hook(module))
            hook.door = calls.wait
            hook.put()
            methods_there = [one for one in vars(module).values() if type(one) is Method]
            calls.methods_with_doors += methods_there
            for method in methods_there:
                method.door = calls.wait
        calls.await_end()
        do()
        calls.open()
    except BaseException:
        calls.open()  # again: an interrupt may have come in the middle
        raise


class _Calls:
    def __init__(self, modules: set[int], methods: Collection[str]) -> None:
        self._modules = modules
        self._methods = methods
        self._lock = threading.RLock()
        self._told = threading.Condition(self._lock)
        self._thread = threading.get_ident()
        self.doors: list[Hook] = []
        self.methods_with_doors: list[Method] = []
        self._is_open = False
        #: Outermost frames of calls that began before. What these call may pass the doors.
        self._under_way: set[FrameType] = set()

    def wait(self, module: Module) -> None:
        """Block until the doors are open. Calls under way, or of a held component, go on."""
        if threading.get_ident() == self._thread:
            return
        mine, scope, hook = stack(sys._getframe()), here(), hook_of(module)
        gate = None if hook is None else hook.gate
        calls = {self._outermost(mine), self._outermost(mine[1:])}
        with self._lock:
            self._told.wait_for(
                lambda: (
                    self._is_open
                    or not calls.isdisjoint(self._under_way)
                    or (gate is not None and gate.is_held_by(scope))
                )
            )

    def await_end(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        with self._lock:
            self._under_way = set(self._now())
            self._told.notify_all()
        if self._under_way:
            log.warning("attach waits for calls that had begun: %s", self._named())
        while self._under_way:
            if time.monotonic() > deadline:
                raise InUse(
                    f"attach has waited {PATIENCE_S:.0f} s for calls that had begun: "
                    f"{self._named()}. Attach a model before other threads call it, or once their "
                    "calls have ended"
                )
            time.sleep(_LOOK_AGAIN_S)
            self._under_way &= self._now().keys()

    def open(self) -> None:
        with self._lock:
            self._is_open = True
            self._told.notify_all()
        self._under_way = set()
        for hook in self.doors:
            hook.end("door")
        for method in self.methods_with_doors:
            method.door = None

    def _now(self) -> dict[FrameType, int]:
        calls = {self._outermost(f): t for t, f in frames().items()}
        return {call: t for call, t in calls.items() if call is not None and t != self._thread}

    def _outermost(self, frames: Iterable[FrameType]) -> FrameType | None:
        """Return the outermost call of the modules, unless it waits at its door."""
        found, waits = None, False
        for frame in frames:
            if frame.f_code is _WAIT and frame.f_locals.get("self") is self:
                waits = True
            elif self._is_call(frame):
                found, waits = found if waits else frame, False
        return found

    def _is_call(self, frame: FrameType) -> bool:
        code = frame.f_code
        if code in _CALLS or code.co_name in self._methods:
            return id(frame.f_locals.get("self")) in self._modules
        return code is _METHOD and id(frame.f_locals["self"]._module) in self._modules

    def _named(self) -> str:
        threads = {thread.ident: thread.name for thread in threading.enumerate()}
        return ", ".join(
            f"{_called(call)} in thread {threads.get(thread, thread)!r}"
            for call, thread in self._now().items()
            if call in self._under_way
        )


def _called(call: FrameType) -> str:
    caller = call.f_locals["self"]
    return type(caller._module if call.f_code is _METHOD else caller).__name__


_WAIT, _METHOD = _Calls.wait.__code__, Method.__call__.__code__
