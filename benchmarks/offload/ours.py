"""swapd, attached to the pipeline for the length of a block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    ):

        def count() -> Counts:
            status = client.status()
            return Counts(status.bytes_in, status.bytes_out, status.peak_bytes)

        with client.attach(pipeline, **settings):
            yield count
