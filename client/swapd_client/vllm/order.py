"""The stages before and after a stage in the order of requests. Pure.

Names are those of the stages in the daemon. `topology.py` reads vllm-omni's order.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from swapd_client.errors import InvalidSettings


class Neighbours(NamedTuple):
    """Neighbours of one stage. After the last stages come the first again, with the next
    request."""

    after: tuple[str, ...] = ()
    #: Stages that are done with a request when this stage gets it.
    before: tuple[str, ...] = ()


#: Of a stage without known successors.
ALONE = Neighbours()


def in_order(order: Sequence[str], name: str) -> Neighbours:
    """Neighbours in a sequence of stages. Raises: InvalidSettings if `name` is none of them."""
    if not order:
        return ALONE
    if name not in order:
        raise InvalidSettings(
            f"{name}: order names {', '.join(order)}, but not this stage: name all stages of the "
            "pipeline by their names in swapd"
        )
    stages = range(len(order))
    sources = {stage: (stage - 1,) if stage else () for stage in stages}
    return among(sources, dict(zip(stages, order, strict=True)), order.index(name))


def among(sources: Mapping[int, Iterable[int]], names: Mapping[int, str], stage: int) -> Neighbours:
    """Neighbours of a stage. `sources`, `names`: sources of requests and names, by stage number."""
    inner = {source for of in sources.values() for source in of}
    firsts = [one for one, of in sources.items() if not tuple(of)]
    lasts = [one for one in sources if one not in inner]
    after = [one for one, of in sources.items() if stage in of] or firsts
    before = list(sources.get(stage, ())) or lasts
    return Neighbours(
        tuple(names[one] for one in after if one != stage),
        tuple(names[one] for one in before if one != stage and one not in after),
    )
