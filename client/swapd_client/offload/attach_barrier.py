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
from swapd_client.offload.hooks import Hook, hook_of
from swapd_client.offload.scope import here

#: Limited, since a thread in a call may be waiting for the thread that attaches.
PATIENCE_S = 30.0
#: A call without a hook sends no signal when it ends, so the wait polls.
_LOOK_AGAIN_S = 0.01
#: Every call of a module without a hook runs this code.
_CALL = Module._call_impl.__code__


def frames() -> dict[int, FrameType]:
    """Return the frame that each thread runs.

    CPython before 3.11.9 holds its lock of threads meanwhile (gh-106883): a finalizer that starts a
    thread would wait for ever. So nothing is collected.
    """
    collects = gc.isenabled()
    try:
        gc.disable()
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


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
        self._is_open = False
        #: Outermost frames of calls that began before. What these call may pass the doors.
        self._under_way: set[FrameType] = set()

    def wait(self, module: Module) -> None:
        """Block until the doors are open. Calls under way, or of a held component, go on."""
        if threading.get_ident() == self._thread:
            return
        call, scope, hook = self._outermost(sys._getframe()), here(), hook_of(module)
        gate = None if hook is None else hook.gate
        with self._lock:
            self._told.wait_for(
                lambda: (
                    self._is_open
                    or call in self._under_way
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

    def _now(self) -> dict[FrameType, int]:
        calls = {self._outermost(f): t for t, f in frames().items()}
        return {call: t for call, t in calls.items() if call is not None and t != self._thread}

    def _outermost(self, frame: FrameType | None) -> FrameType | None:
        found = None
        while frame is not None:
            code = frame.f_code
            if (code is _CALL or code.co_name in self._methods) and (
                id(frame.f_locals.get("self")) in self._modules
            ):
                found = frame
            frame = frame.f_back
        return found

    def _named(self) -> str:
        threads = {thread.ident: thread.name for thread in threading.enumerate()}
        return ", ".join(
            f"{type(call.f_locals['self']).__name__} in thread {threads.get(thread, thread)!r}"
            for call, thread in self._now().items()
            if call in self._under_way
        )
