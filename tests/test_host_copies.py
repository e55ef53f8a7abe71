"""Host copies as the core orders them: each order is answered, even if its session has ended."""

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from swapd.core.actions import MakeHostCopy
from swapd.core.events import AnyEvent, HostCopyMade
from swapd.daemon.host_copies import HostCopies
from swapd.daemon.masters import Masters
from swapd.device import HostDevice

NBYTES = 4096
CHUNK = 2 << 20


@pytest.fixture
def masters() -> Iterator[Masters]:
    with closing(HostDevice(CHUNK, CHUNK)) as device:
        made = Masters(None, device)
        yield made
        made.close()
        assert len(made) == made.total_bytes == 0


async def test_what_a_session_shares_that_has_ended_can_be_shared_on(masters: Masters) -> None:
    """The core may order that before it hears of the end."""
    posted: list[AnyEvent] = []
    crashes: list[BaseException] = []
    loop = asyncio.get_running_loop()
    copies = HostCopies(masters, {}, 0, loop, lambda: 0.0, posted.append, crashes.append)
    masters.make(1, NBYTES, mutable=False)
    masters.seal(1)
    for uid, original in ((2, 1), (3, 2)):
        copies.make(MakeHostCopy(7, uid, f"c{uid}", NBYTES, mutable=False, original=original))
        copies.drop(original)
    assert posted == [HostCopyMade(0.0, 2), HostCopyMade(0.0, 3)]
    await copies.finish()
    copies.shutdown()
    assert masters.address(3)
    assert not crashes
