"""swapd, attached to the pipeline for the length of a block."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import swapd_client
from benchmarks.offload.counts import Counts
from swapd import spawn


@contextmanager
def attached(
    pipeline: Any, budget: int, bandwidth: float | None, **settings: Any
) -> Iterator[Callable[[], Counts]]:
    """A daemon of its own, and the pipeline attached with `settings`; yields what counts."""
    daemon_settings: dict[str, Any] = {"budget": budget, "isolation": "strict"}
    if bandwidth is not None:
        daemon_settings["bandwidth"] = f"{bandwidth:.0f}/s"
    with (
        spawn.daemon(**daemon_settings) as daemon,
        swapd_client.connect(daemon.folder, label="pictures") as client,
        _timed(client) as waits,
    ):

        def count() -> Counts:
            status = client.status()
            return Counts(status.bytes_in, status.bytes_out, status.peak_bytes, waits.seconds)

        with client.attach(pipeline, **settings):
            yield count


@dataclass
class _Waits:
    seconds: float = 0.0


@contextmanager
def _timed(client: swapd_client.Client) -> Iterator[_Waits]:
    """Count the time that acquires take, copies that they wait for included."""
    waits = _Waits()
    acquire = client.acquire

    def timed(*names: str, **options: Any) -> swapd_client.Lease:
        started = time.perf_counter()
        try:
            return acquire(*names, **options)
        finally:
            waits.seconds += time.perf_counter() - started

    client.acquire = timed  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        client.acquire = acquire  # type: ignore[method-assign]
