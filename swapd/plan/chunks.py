"""Chooses the chunk size for the daemons of a plan. Pure.

With large chunks an eviction takes fewer driver calls. But each component, each group of layers and
each block takes whole chunks, so less fits, and more is copied. The balance depends on their
number, so plans with both sizes are compared.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple, TypeVar

from swapd.plan.advice import DoesNotFit
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

    `plan_with` plans with this chunk size in bytes. Raises: DoesNotFit, if the default chunks do
    not fit.
    """
    if isinstance(said, int):
        return plan_with(said), ChunkChoice(said, "as given")
    small, usual = _by_default(plan_with, cost_of)
    if usual.nbytes == HOST_CHUNK or (said is None and isolation == "relaxed"):
        return small, usual
    many, ours = cost_of(small), f"chunks of {size(LARGE_CHUNK)}"
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


def _by_default(
    plan_with: Callable[[int], Plan], cost_of: Callable[[Plan], Cost]
) -> tuple[Plan, ChunkChoice]:
    """Plan in chunks of the default size, which is smaller for a small budget."""
    try:
        plan = plan_with(GPU_CHUNK)
    except DoesNotFit as exc:
        with suppress(DoesNotFit):
            plan = plan_with(HOST_CHUNK)
            if _is_small(cost_of(plan)):
                return plan, _OF_SMALL
        raise exc
    if _is_small(cost_of(plan)):
        return plan_with(HOST_CHUNK), _OF_SMALL
    return plan, ChunkChoice(GPU_CHUNK, "the default of --chunk on a GPU")


_OF_SMALL = ChunkChoice(
    HOST_CHUNK, f"the default of --chunk for budgets under {size(SMALL_BUDGET)}"
)


def _is_small(cost: Cost) -> bool:
    """Whether its daemons take small chunks: one size is for all, so the largest budget counts."""
    return gpu_chunk(max(cost.budgets, default=SMALL_BUDGET), large=False) == HOST_CHUNK
