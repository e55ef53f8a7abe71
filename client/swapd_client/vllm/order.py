"""Which stages the requests of a stage go on to, and which they come from. Pure.

Names are those that the stages have in the daemon. What vllm-omni says of it is in `topology.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from swapd_client.errors import InvalidSettings


class Neighbours(NamedTuple):
    """Of one stage. After the last stages come the first again: the next request starts there."""

    after: tuple[str, ...] = ()
    #: Those that have done with a request when this stage has it.
    before: tuple[str, ...] = ()


#: Of a stage that no other is known to come after.
ALONE = Neighbours()


def in_order(order: Sequence[str], name: str) -> Neighbours:
    """Of stages that follow each other. Raises: InvalidSettings if `name` is none of them."""
    if not order:
        return ALONE
    if name not in order:
        raise InvalidSettings(
            f"{name}: order names {', '.join(order)}, and not this stage: name all stages of the "
            "pipeline, as they are called in swapd"
        )
    stages = range(len(order))
    sources = {stage: (stage - 1,) if stage else () for stage in stages}
    return among(sources, dict(zip(stages, order, strict=True)), order.index(name))


def among(sources: Mapping[int, Iterable[int]], names: Mapping[int, str], stage: int) -> Neighbours:
    """By number, which stages each gets its requests from, and what it is called."""
    inner = {source for of in sources.values() for source in of}
    firsts = [one for one, of in sources.items() if not tuple(of)]
    lasts = [one for one in sources if one not in inner]
    after = [one for one, of in sources.items() if stage in of] or firsts
    before = list(sources.get(stage, ())) or lasts
    return Neighbours(
        tuple(names[one] for one in after if one != stage),
        tuple(names[one] for one in before if one != stage and one not in after),
    )
