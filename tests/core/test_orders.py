"""The guarantees hold after every order of a few events; `tests.core.orders` goes deeper."""

import pytest

from tests.core.orders import explore


@pytest.mark.parametrize("strict", [False, True], ids=["relaxed", "strict"])
@pytest.mark.parametrize(("more", "depth"), [(False, 4), (True, 2)], ids=["deep", "wide"])
def test_the_guarantees_hold_after_every_order_of_events(
    more: bool, depth: int, strict: bool
) -> None:
    assert all(explore(depth, strict=strict, more=more, workers=1))
