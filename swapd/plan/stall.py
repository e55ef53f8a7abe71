"""Waiting times of a model whose weights are not all on the device. Closed forms, pure.

A request uses a component once, in `passes` passes over its weights (denoising steps,
tokens). Its transfer takes `transfer_s`; one pass computes for `compute_s`. One copy at a time.
"""

from collections.abc import Sequence

from swapd.core.victims import victims

#: Requests that are skipped, until the start state no longer matters; and requests that count.
_WARM_UP = 3
_COUNTED = 12


def lru_bytes(sizes: Sequence[int], room: int, copied: Sequence[int] | None = None) -> int | None:
    """Bytes of one request if whole components are loaded and the least recently used one leaves.

    That is swapd without a plan. None if a component is larger than `room`. `copied`: the bytes of
    loading each, if not its size.
    """
    if max(sizes) > room:
        return None
    there: dict[str, int] = {}
    order = [(str(i), *both) for i, both in enumerate(zip(sizes, copied or sizes, strict=True))]
    moved = 0
    for request in range(_WARM_UP + _COUNTED):
        for name, nbytes, load in order:
            if name not in there:
                short = nbytes - (room - sum(there.values()))
                for victim in victims(short, list(there.items())) or ():
                    del there[victim]
                moved += load if request >= _WARM_UP else 0
            there[name] = there.pop(name, nbytes)
    return moved // _COUNTED


def step_s(transfer_s: float, share: float, compute_s: float) -> float:
    """The wait of one pass for a streamed component, of which `share` is kept.

    The copies overlap the computing of a pass, so only the rest of their time is a wait.
    Neglects the first block, whose copy overlaps nothing.
    """
    return max(0.0, (1.0 - share) * transfer_s - compute_s)
