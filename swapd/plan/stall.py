"""How long weights that are not all on the device make a model wait. Closed forms, pure.

A component is used once in a request, in `passes` passes over its weights (denoising steps,
tokens). Its transfer takes `transfer_s`; one pass computes for `compute_s`. One copy at a time.
"""


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
