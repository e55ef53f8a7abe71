"""The last use in a status survives an acquire without effect."""

from swapd.core import Residency, status
from swapd.core.events import (
    CopiedIn,
    HostCopyMade,
    HostCopySealed,
    SessionGone,
    SessionOpened,
    SessionRequest,
    Tick,
)
from swapd.shared.protocol import Acquire, Commit, Register, Release
from tests.core.check import check


def _two_that_do_not_fit() -> Residency:
    core = Residency(chunks=1, chunk_bytes=10)
    for session, name in ((1, "vae"), (2, "dit")):
        core.handle(SessionOpened(0.0, session, name))
        core.handle(SessionRequest(0.0, session, Register(1, name, 10)))
        core.handle(HostCopyMade(0.0, session))
        core.handle(SessionRequest(0.0, session, Commit(2, name)))
        core.handle(HostCopySealed(0.0, session))
    return core


def _idle_s(core: Residency, name: str, now: float) -> float | None:
    return status.component_status(core.ledger, core.ledger.components[name], now).idle_s


def test_an_acquire_that_timed_out_leaves_the_last_use_as_it_was() -> None:
    core = _two_that_do_not_fit()
    assert _idle_s(core, "vae", 1.0) is None
    core.handle(SessionRequest(1.0, 1, Acquire(3, ("vae",))))
    core.handle(CopiedIn(1.0, 1))
    assert _idle_s(core, "vae", 1.5) is None
    core.handle(SessionRequest(2.0, 1, Release(4, 3)))
    core.handle(SessionRequest(3.0, 2, Acquire(3, ("dit",))))
    core.handle(CopiedIn(3.0, 2))
    core.handle(SessionRequest(4.0, 1, Acquire(4, ("vae",), timeout_s=1.0)))
    core.handle(Tick(5.0))
    assert _idle_s(core, "vae", 6.0) == 4.0
    check(core)


def test_a_holder_that_dies_used_it_until_then() -> None:
    core = _two_that_do_not_fit()
    core.handle(SessionRequest(1.0, 2, Acquire(3, ("vae",))))
    core.handle(CopiedIn(1.0, 1))
    core.handle(SessionGone(3.0, 2))
    assert _idle_s(core, "vae", 4.0) == 1.0
    check(core)
