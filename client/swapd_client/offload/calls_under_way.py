"""Keeps calls of a model away while its weights move into swapd.

A call that began before the model's hooks has no lease, so it would read weights that may leave at
any time. `attach` waits for such calls. Calls that begin meanwhile wait in a hook until `attach` is
over, and then run the hooks that it installed.

A generator or coroutine that is suspended is on no thread's stack, so `attach` does not see it.
"""

import logging
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from torch.nn import Module

from swapd_client.errors import ComponentInUse
from swapd_client.offload.dynamo import uncompiled
from swapd_client.offload.ours import Ours
from swapd_client.offload.scope import CALL, calling, here
from swapd_client.offload.shortcuts import Enter

log = logging.getLogger("swapd_client")

#: `attach` refuses to wait longer: a thread in a call may wait for the thread that attaches.
PATIENCE_S = 30.0
#: A call without a hook sends no signal when it ends, so the wait polls.
_LOOK_AGAIN_S = 0.01


@contextmanager
def no_calls(
    entrances: Iterable[Module], modules: Iterable[Module], methods: Collection[str]
) -> Iterator[None]:
    """A `with` block in which no other thread is in a call of these modules.

    `entrances`: those that are called from outside. `methods`: whose calls count beside forwards.
    Blocks until the calls under way have ended. Raises: ComponentInUse, naming calls that do not
    end.
    """
    door = _Door({id(module) for module in modules}, methods)
    with ExitStack() as undo:
        undo.callback(door.open)
        for module in entrances:
            undo.callback(module.register_forward_pre_hook(door, prepend=True).remove)
        door.await_calls()
        yield


@uncompiled
def _pass(door: "_Door", module: Module, args: Any) -> None:
    door.wait(module)
    if door.is_open:
        for enter in _enters(module):
            enter(module, args)


def _enters(module: Module) -> list[Enter]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Enter)]


class _Door(Ours):
    """A pre-hook in which calls wait until it is open."""

    def __init__(self, modules: set[int], methods: Collection[str]) -> None:
        self._modules = modules
        self._methods = methods
        self._thread = threading.get_ident()
        self._said = threading.Condition()
        self.is_open = False
        #: The outermost frames of calls that had begun: they may call other modules.
        self._under_way: set[FrameType] = set()
        #: The frames of calls that wait here.
        self._waiting: set[FrameType | None] = set()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return Enter, ()  # a hook that does nothing

    def __call__(self, module: Module, args: Any) -> None:
        if self._thread != threading.get_ident():
            _pass(self, module, args)

    def wait(self, module: Module) -> None:
        """Block until the door is open, or the call is part of one that may go on."""
        call, scope = self._outermost(sys._getframe()), here()
        with self._said:
            self._waiting.add(calling())
            self._said.wait_for(
                lambda: (
                    self.is_open
                    or call in self._under_way
                    or any(enter.is_held_by(scope) for enter in _enters(module))
                )
            )

    def await_calls(self) -> None:
        """Block until the calls under way have ended. Raises: ComponentInUse."""
        deadline = time.monotonic() + PATIENCE_S
        with self._said:
            self._under_way = self._calls().keys() - self._waiting
            self._said.notify_all()
        if self._under_way:
            log.warning("attach waits for calls that had begun: %s", self._named())
        while self._under_way:
            if time.monotonic() > deadline:
                raise ComponentInUse(
                    f"attach has waited {PATIENCE_S:.0f} s for calls that had begun: "
                    f"{self._named()}. Attach a model before other threads call it, or once their "
                    "calls have ended"
                )
            time.sleep(_LOOK_AGAIN_S)
            self._under_way &= self._calls().keys()

    def open(self) -> None:
        with self._said:
            self.is_open = True
            self._said.notify_all()
        self._under_way, self._waiting = set(), set()

    def _calls(self) -> dict[FrameType, int]:
        """The outermost call of each other thread, and the thread."""
        calls = {self._outermost(f): t for t, f in sys._current_frames().items()}
        return {call: t for call, t in calls.items() if call is not None and t != self._thread}

    def _outermost(self, frame: FrameType | None) -> FrameType | None:
        found = None
        while frame is not None:
            code = frame.f_code
            if (code is CALL or code.co_name in self._methods) and (
                id(frame.f_locals.get("self")) in self._modules
            ):
                found = frame
            frame = frame.f_back
        return found

    def _named(self) -> str:
        threads = {thread.ident: thread.name for thread in threading.enumerate()}
        return ", ".join(
            f"{type(call.f_locals['self']).__name__} in thread {threads.get(thread, thread)!r}"
            for call, thread in self._calls().items()
            if call in self._under_way
        )
