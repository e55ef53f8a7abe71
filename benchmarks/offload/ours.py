"""swapd, attached to the pipeline for the length of a block."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch

import msgspec

import swapd_client
from swapd import spawn
from swapd_client.leasing import Leasing
from swapd_client.offload.stream import StreamPass


class Counts(msgspec.Struct, frozen=True):
    """Bytes since the start: into the device, back to the host, most on the device at once.

    `waited_s`: seconds without computing, because weights were being copied.
    """

    bytes_in: int
    bytes_back: int
    peak_bytes: int
    waited_s: float


@contextmanager
def attached(
    pipeline: Any, budget: int, bandwidth: float | None, **settings: Any
) -> Iterator[Callable[[], Counts]]:
    """A daemon of its own, and the pipeline attached with `settings`; yields the counts."""
    daemon_settings: dict[str, Any] = {"budget": budget, "isolation": "strict"}
    if bandwidth is not None:
        daemon_settings["bandwidth"] = f"{bandwidth:.0f}/s"
    with (
        spawn.daemon(**daemon_settings) as daemon,
        swapd_client.connect(daemon.folder, label="pictures") as client,
        _timed() as waits,
    ):

        def count() -> Counts:
            status = client.status()
            return Counts(status.bytes_in, status.bytes_out, status.peak_bytes, waits.seconds)

        with client.attach(pipeline, **settings):
            yield count


@dataclass
class _Waits:
    seconds: float = 0.0
    #: Depth of nested timed calls.
    depth: int = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            self.depth += 1
            try:
                return function(*args, **options)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.seconds += time.perf_counter() - started

        return call


@contextmanager
def _timed() -> Iterator[_Waits]:
    """Count the time of acquires and waits for weights, whole or in blocks."""
    waits = _Waits()
    with ExitStack() as patches:
        for owner, name in ((Leasing, "take"), (StreamPass, "enter"), (StreamPass, "need")):
            timed = waits.timed(getattr(owner, name))
            patches.enter_context(patch.object(owner, name, timed))
        yield waits
