"""Chooses the chunk size for the daemons of a plan. Pure.

With large chunks an eviction takes fewer driver calls. But each component, each group of layers and
each block takes whole chunks, so less fits, and more is copied. The balance depends on their
number, so plans with both sizes are compared.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

from swapd.plan.advise import DoesNotFit
from swapd.shared.config import (
    GPU_CHUNK,
    HOST_CHUNK,
    LARGE_BUDGET,
    LARGE_CHUNK,
    SMALL_BUDGET,
    gpu_chunk,
)
from swapd.shared.units import seconds, size

Plan = TypeVar("Plan")
Isolation = Literal["relaxed", "strict"]

#: Time to revoke access to a chunk and unmap it, in the worker that loses it: 20 and 22 us on an
#: H200 (benchmarks/results).
CALLS_S = 42e-6


class Cost(NamedTuple):
    budgets: Sequence[int]
    moved_bytes: int
    copying_s: float
    #: Stages that must do without CUDA graphs, to fit or to stream.
    eager: int = 0

    def round_s(self, chunk: int) -> float:
        """Return a round's wait for copies, and for unmapping the same number of bytes."""
        return self.copying_s + self.moved_bytes / chunk * CALLS_S


class ChunkChoice(NamedTuple):
    nbytes: int
    why: str


def chosen(
    plan_with: Callable[[int], Plan],
    cost_of: Callable[[Plan], Cost],
    said: int | Literal["auto"] | None,
    isolation: Isolation = "relaxed",
) -> tuple[Plan, ChunkChoice]:
    """Plan daemons on GPUs, in chunks of `said` if given, else of the better size.

    `plan_with` plans with this chunk size in bytes. Raises: DoesNotFit, if small chunks do not fit.
    """
    if isinstance(said, int):
        return plan_with(said), ChunkChoice(said, "as given")
    small, ours = plan_with(GPU_CHUNK), f"chunks of {size(LARGE_CHUNK)}"
    many = cost_of(small)
    if gpu_chunk(max(many.budgets, default=SMALL_BUDGET), large=False) != GPU_CHUNK:
        why = f"the default of --chunk for budgets under {size(SMALL_BUDGET)}"
        return plan_with(HOST_CHUNK), ChunkChoice(HOST_CHUNK, why)
    if said is None and isolation == "relaxed":
        return small, ChunkChoice(GPU_CHUNK, "the default of --chunk on a GPU")
    if gpu_chunk(min(many.budgets, default=0), large=True) != LARGE_CHUNK:
        why = f"{ours} are for budgets over {size(LARGE_BUDGET)}"
        return small, ChunkChoice(GPU_CHUNK, why)
    try:
        large = plan_with(LARGE_CHUNK)
    except DoesNotFit:
        return small, ChunkChoice(GPU_CHUNK, f"in {ours} it would not fit")
    few = cost_of(large)
    if few.eager > many.eager:
        return small, ChunkChoice(GPU_CHUNK, f"in {ours} it would not fit")
    few_s, many_s = few.round_s(LARGE_CHUNK), many.round_s(GPU_CHUNK)
    if gpu_chunk(min(few.budgets), large=True) == LARGE_CHUNK and few_s < many_s:
        saved = seconds(many_s - few_s)
        return large, ChunkChoice(LARGE_CHUNK, f"a round takes {saved} less than in small ones")
    why = f"in {ours} a round would move {size(few.moved_bytes)}, and take no less"
    return small, ChunkChoice(GPU_CHUNK, why)
