"""The cost of hooks for a model that fits: forwards of attached models and of a plain twin.

A block computes, then waits until a fixed time is over. So the difference is the time of hooks, on
any machine. The model has a list of blocks and a norm. Attached as a whole, it has hooks around
itself and the norm; streamed, also around each block.
"""

import statistics
import time
from functools import partial
from typing import Any

import msgspec

import swapd_client
from swapd import spawn
from swapd.bench.streaming import one_thread
from swapd.bench.swap_in import seconds_of

BLOCK_S = 0.001
BLOCKS = 16
WIDTH = 256
ROUNDS = 60
WARM_UP = 5
#: Forwards before each measurement: from the third on, an immediate reuse sends no message.
LEAD = 3


class HookCosts(msgspec.Struct, frozen=True):
    """Medians of forwards."""

    #: Share that hooks add to a forward, as a whole and streamed.
    whole_share: float
    streamed_share: float
    bare_s: float
    whole_s: float
    streamed_s: float

    @property
    def share(self) -> float:
        return max(self.whole_share, self.streamed_share)


def measure(rounds: int = ROUNDS) -> HookCosts:
    import torch

    models = [_model() for _ in range(3)]
    with (
        one_thread(),
        spawn.daemon(budget="128MiB") as daemon,
        swapd_client.connect(daemon.folder, label="bench") as client,
        client.attach({"whole": models[1]}),
        client.attach({"streamed": models[2]}, blocks=[f"layers.{i}" for i in range(BLOCKS)]),
        torch.inference_mode(),
    ):
        x = torch.ones(1, WIDTH)
        times: list[list[float]] = [[] for _ in models]
        for _ in range(rounds + WARM_UP):
            for model, taken in zip(models, times, strict=True):
                for _ in range(LEAD):
                    model(x)
                taken.append(seconds_of(partial(model, x)))
    bare_s, whole_s, streamed_s = (statistics.median(taken[WARM_UP:]) for taken in times)
    return HookCosts(
        whole_share=whole_s / bare_s - 1,
        streamed_share=streamed_s / bare_s - 1,
        bare_s=bare_s,
        whole_s=whole_s,
        streamed_s=streamed_s,
    )


def _model() -> Any:
    import torch

    class TimedBlock(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            until = time.perf_counter() + BLOCK_S
            x = super().forward(x)
            while time.perf_counter() < until:
                pass
            return x

    class TimedModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(TimedBlock(WIDTH, WIDTH) for _ in range(BLOCKS))
            self.norm = torch.nn.LayerNorm(WIDTH)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    return TimedModel()
