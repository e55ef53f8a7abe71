"""A core that gets the events of one session, and ends the session when it decides to."""

import asyncio
import time
from types import TracebackType
from typing import Literal, Self

from swapd.core import Residency, Rules
from swapd.core.actions import AnyAction, Fence
from swapd.core.events import AnyEvent, SessionOpened, Tick, Unread
from swapd.daemon.lifeline import Lifeline


class FencedByCore:
    """Session 1 of a core with these rules. The event `fenced` is set when it is fenced."""

    def __init__(self, **rules: float) -> None:
        self.fenced = asyncio.Event()
        self.why = ""
        #: What it ends then, if that is set.
        self.lifeline: Lifeline | None = None
        self._core = Residency(1, 1, Rules(**rules))  # type: ignore[arg-type]
        self._timer: asyncio.TimerHandle | None = None
        self._handle(SessionOpened(time.monotonic(), 1, "one"))

    def hears(
        self, count: int, error: str = "", channel: Literal["lifeline", "replies"] = "lifeline"
    ) -> None:
        """The number of messages that are kept for the session."""
        self._handle(Unread(time.monotonic(), 1, channel, count, error))

    def _handle(self, event: AnyEvent) -> None:
        for action in self._core.handle(event):
            self._do(action)
        if self._timer is not None:
            self._timer.cancel()
        due = self._core.next_deadline()
        if due is not None:
            after_s = max(due - time.monotonic(), 0.0) + 0.001
            self._timer = asyncio.get_running_loop().call_later(after_s, self._tick)

    def _tick(self) -> None:
        self._handle(Tick(time.monotonic()))

    def _do(self, action: AnyAction) -> None:
        assert isinstance(action, Fence), action
        assert not self.fenced.is_set(), "twice"
        self.why = action.why
        self.fenced.set()
        if self.lifeline is not None:
            self.lifeline._server.drop(self.lifeline, "fenced", action.why)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
