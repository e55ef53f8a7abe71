"""A core that stops."""

from tests.core.rules.common import blocked
from tests.core.world import Make


def test_stopping_refuses_who_waits_and_who_comes_and_leases_run_on(make: Make) -> None:
    w, held, (t, u, _) = blocked(make)
    queued = w.acquire(t, "c0")
    parked = w.acquire(u, "unborn", await_registration=True)
    w.stop()
    late = [w.acquire(t, "c0"), w.ask_register(t, "new"), w.prefetch(t, "c0")]
    for key in (queued, parked, *late):
        assert w.refusal(key).code == "stopping"
    assert w.granted(held)
    assert not w.core.quiet
    w.release(held)
    assert w.core.quiet
