"""In what chunks the daemon of a plan is to lend its memory. Pure.

In large chunks an eviction takes fewer calls of the driver. But each component, each group of
layers and each block takes whole chunks, so less fits, and more is copied: which counts for more
depends on how many of them there are, and is weighed by planning with both.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

from swapd.plan.advise import DoesNotFit
from swapd.shared.config import GPU_CHUNK, LARGE_BUDGET, LARGE_CHUNK
from swapd.shared.units import seconds, size

Plan = TypeVar("Plan")
Isolation = Literal["relaxed", "strict"]

#: Of unmapping one chunk in the worker that loses it: taking its access away, and unmapping.
#: Published for an A100; 36 and 26 us.
CALLS_S = 62e-6


class Cost(NamedTuple):
    """What a plan comes to: each daemon's budget, and what is moved in a round of requests."""

    budgets: Sequence[int]
    moved_bytes: int
    copying_s: float

    def round_s(self, chunk: int) -> float:
        """A round's wait for copies, and for unmapping as much as is copied in its place."""
        return self.copying_s + self.moved_bytes / chunk * CALLS_S


class Choice(NamedTuple):
    """What the chunks of a plan are, in bytes, and why."""

    nbytes: int
    why: str


def chosen(
    plan_with: Callable[[int], Plan],
    cost_of: Callable[[Plan], Cost],
    said: int | Literal["auto"] | None,
    isolation: Isolation = "relaxed",
) -> tuple[Plan, Choice]:
    """A plan for daemons on GPUs, and their chunks: as said, else as suits best.

    `plan_with` plans with chunks of so many bytes. Raises: DoesNotFit, as it does with small ones.
    """
    if isinstance(said, int):
        return plan_with(said), Choice(said, "as given")
    small, ours = plan_with(GPU_CHUNK), f"chunks of {size(LARGE_CHUNK)}"
    if said is None and isolation == "relaxed":
        return small, Choice(GPU_CHUNK, "the default of --chunk on a GPU")
    if min(cost_of(small).budgets, default=0) <= LARGE_BUDGET:
        why = f"{ours} are for budgets over {size(LARGE_BUDGET)}"
        return small, Choice(GPU_CHUNK, why)
    try:
        large = plan_with(LARGE_CHUNK)
    except DoesNotFit:
        return small, Choice(GPU_CHUNK, f"in {ours} it would not fit")
    few, many = cost_of(large), cost_of(small)
    few_s, many_s = few.round_s(LARGE_CHUNK), many.round_s(GPU_CHUNK)
    if min(few.budgets) > LARGE_BUDGET and few_s < many_s:
        saved = seconds(many_s - few_s)
        return large, Choice(LARGE_CHUNK, f"a round takes {saved} less than in small ones")
    why = f"in {ours} a round would move {size(few.moved_bytes)}, and take no less"
    return small, Choice(GPU_CHUNK, why)
