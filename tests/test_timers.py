"""The end of an unused daemon, by the setting `linger` as it is now."""

import asyncio

from swapd.daemon.daemon import Linger


def used(linger_s: float) -> tuple[Linger, asyncio.Event]:
    """Of a daemon whose only session has ended; and the event of its end."""
    stopped = asyncio.Event()
    linger = Linger(asyncio.get_running_loop(), linger_s, stopped.set)
    linger.count(1)
    linger.count(0)
    return linger, stopped


async def turns_of_the_loop() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_new_time_counts_from_when_it_is_set() -> None:
    linger, stopped = used(3600.0)
    linger.set(0.0)
    await stopped.wait()


async def test_a_daemon_that_is_used_again_in_time_stays() -> None:
    linger, stopped = used(0.0)
    linger.count(1)
    await turns_of_the_loop()
    assert not stopped.is_set()


async def test_without_a_time_an_unused_daemon_stays() -> None:
    linger, stopped = used(0.0)
    linger.set(None)
    await turns_of_the_loop()
    assert not stopped.is_set()
    linger.close()
