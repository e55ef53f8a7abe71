"""Streaming a component block by block, against the same computation on resident weights.

Copying a block takes as long as computing on it, and passes follow each other at once: every copy
that computing does not hide costs time.
"""

import copy
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

import swapd_client
from swapd import spawn
from swapd.bench.swap_in import seconds_of

BLOCKS = 16
#: Small, because on the host the CPU copies: only the duration matters.
BLOCK_BYTES = 4 << 20
BLOCK_S = 0.03
ROUNDS = 5


class StreamTimes(msgspec.Struct, frozen=True):
    """Seconds are medians of a pass."""

    #: Time of a streamed pass over that of computing alone.
    ratio: float
    stream_s: float
    alone_s: float
    blocks: int
    block_bytes: int
    block_s: float
    peak_blocks: float
    #: By number of kept blocks: which are kept, and how many blocks a pass copies.
    kept: dict[int, str]
    copied: dict[int, float]


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread, because the other core copies: two threads would wait for
    each other in every block."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measure(rounds: int = ROUNDS, block_s: float = BLOCK_S) -> StreamTimes:
    import torch

    alone, streamed = _models(torch, block_s)
    x = torch.randn(1, int((BLOCK_BYTES // 4) ** 0.5))
    alone_s, stream_s = [], []
    with (
        one_thread(),
        torch.inference_mode(),
        # room for all blocks, so the peak shows the need
        spawn.daemon(
            budget=(BLOCKS + 4) * BLOCK_BYTES, bandwidth=f"{int(BLOCK_BYTES / block_s)}B/s"
        ) as daemon,
        swapd_client.connect(daemon.folder, label="bench") as client,
        client.attach({"dit": streamed}, resident={"dit": 0}),
    ):
        assert torch.equal(streamed(x), alone(x)), "not the same bits"
        for _ in range(rounds):
            alone_s.append(seconds_of(lambda: alone(x)))
            streamed(x)
            stream_s.append(seconds_of(lambda: streamed(x)))
        peak = client.status().peak_bytes
        kept, copied = {}, {}
        for keep in (BLOCKS // 4, BLOCKS // 2):
            client.resize("dit", keep * BLOCK_BYTES)
            parts = [c for c in client.status().components if c.part_of]
            kept[keep] = "".join("." if c.policy == "sequential" else "k" for c in parts)
            streamed(x)
            before = client.status().bytes_in
            streamed(x)
            copied[keep] = (client.status().bytes_in - before) / BLOCK_BYTES
    return StreamTimes(
        ratio=statistics.median(stream_s) / statistics.median(alone_s),
        stream_s=statistics.median(stream_s),
        alone_s=statistics.median(alone_s),
        blocks=BLOCKS,
        block_bytes=BLOCK_BYTES,
        block_s=block_s,
        peak_blocks=peak / BLOCK_BYTES,
        kept=kept,
        copied=copied,
    )


def _models(torch: Any, block_s: float) -> tuple[Any, Any]:
    side = int((BLOCK_BYTES // 4) ** 0.5)

    class PacedBlock(torch.nn.Module):  # type: ignore[misc]
        """Computes on all of its weights until a fixed time is over.

        The clock fixes this time and the device's speed, while the machine's speed drifts. So any
        extra time is that of copies.
        """

        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(torch.randn(side, side) / side**0.5)

        def forward(self, x: Any) -> Any:
            until = time.perf_counter() + block_s
            while time.perf_counter() < until:
                x @ self.weights
            return x @ self.weights

    class PacedModel(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(PacedBlock() for _ in range(BLOCKS))

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    model = PacedModel()
    return model, copy.deepcopy(model)
