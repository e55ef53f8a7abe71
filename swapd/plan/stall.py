"""How long weights that are not all on the device make a model wait. Closed forms, pure.

A component is used once in a request, in `passes` passes over its weights (denoising steps,
tokens). Its transfer takes `transfer_s`; one pass computes for `compute_s`. One copy at a time.
"""

from collections.abc import Sequence

from swapd.core.policy import victims

#: Requests after which what is in no longer depends on how it began, and those that are counted.
_WARM_UP = 3
_COUNTED = 12


def lru_bytes(sizes: Sequence[int], room: int, copied: Sequence[int] | None = None) -> int | None:
    """Loaded as wholes, least recently used out, request after request: the bytes of one.

    What swapd does if nothing is planned. None if one of them is larger than `room`. `copied` is
    what loading each takes, where that is not its size.
    """
    if max(sizes) > room:
        return None
    there: dict[str, int] = {}
    loads = {str(i): n for i, n in enumerate(copied or sizes)}
    moved = 0
    for request in range(_WARM_UP + _COUNTED):
        for name, nbytes in ((str(i), n) for i, n in enumerate(sizes)):
            if name not in there:
                short = nbytes - (room - sum(there.values()))
                for victim in victims(short, list(there.items())) or ():
                    del there[victim]
                moved += loads[name] if request >= _WARM_UP else 0
            there[name] = there.pop(name, nbytes)
    return moved // _COUNTED


def loaded_s(transfer_s: float) -> float:
    """Loaded as a whole when its turn comes: the wait of one request."""
    return transfer_s


def step_s(transfer_s: float, share: float, compute_s: float) -> float:
    """Streamed, with `share` of it kept: the wait of one pass.

    The copies of a pass run beside its computing, so only what outlasts it is waited for.
    Neglects the first block, whose copy has nothing to hide behind.
    """
    return max(0.0, (1.0 - share) * transfer_s - compute_s)


def streamed_s(transfer_s: float, share: float, compute_s: float, passes: int) -> float:
    """Streamed, with `share` of it kept: the wait of one request."""
    return passes * step_s(transfer_s, share, compute_s)
