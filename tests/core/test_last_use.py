"""What status calls the last use survives an acquire that came to nothing."""

from swapd.core import Residency, explain
from swapd.core.check import check
from swapd.core.events import (
    Acquire,
    Commit,
    CopiedIn,
    MasterMade,
    MasterSealed,
    Register,
    Release,
    SessionGone,
    SessionOpened,
    Tick,
)


def _two_that_do_not_fit() -> Residency:
    core = Residency(chunks=1, chunk_bytes=10)
    for session, name in ((1, "vae"), (2, "dit")):
        core.handle(SessionOpened(0.0, session, name))
        core.handle(Register(0.0, session, 1, name, 10))
        core.handle(MasterMade(0.0, session))
        core.handle(Commit(0.0, session, 2, name))
        core.handle(MasterSealed(0.0, session))
    return core


def _idle_s(core: Residency, name: str, now: float) -> float | None:
    return explain.component_status(core.ledger, core.ledger.components[name], now).idle_s


def test_an_acquire_that_timed_out_leaves_the_last_use_as_it_was() -> None:
    core = _two_that_do_not_fit()
    assert _idle_s(core, "vae", 1.0) is None
    core.handle(Acquire(1.0, 1, 3, 7, ("vae",)))
    core.handle(CopiedIn(1.0, 1))
    assert _idle_s(core, "vae", 1.5) is None
    core.handle(Release(2.0, 1, 3))
    core.handle(Acquire(3.0, 2, 3, 7, ("dit",)))
    core.handle(CopiedIn(3.0, 2))
    core.handle(Acquire(4.0, 1, 4, 7, ("vae",), deadline=5.0))
    core.handle(Tick(5.0))
    assert _idle_s(core, "vae", 6.0) == 4.0
    check(core)


def test_a_holder_that_dies_used_it_until_then() -> None:
    core = _two_that_do_not_fit()
    core.handle(Acquire(1.0, 2, 3, 7, ("vae",)))
    core.handle(CopiedIn(1.0, 1))
    core.handle(SessionGone(3.0, 2))
    assert _idle_s(core, "vae", 4.0) == 1.0
    check(core)
