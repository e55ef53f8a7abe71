"""The end of an unused daemon, by the setting `linger` as it is now."""

import asyncio

from swapd.daemon.timers import Linger


async def test_a_new_time_counts_from_when_it_is_set() -> None:
    stopped = asyncio.Event()
    linger = Linger(asyncio.get_running_loop(), 3600.0, stopped.set)
    linger.count(1)
    linger.count(0)
    linger.set(0.0)
    await stopped.wait()


async def test_a_daemon_that_is_used_again_in_time_stays() -> None:
    stopped = asyncio.Event()
    linger = Linger(asyncio.get_running_loop(), 0.0, stopped.set)
    linger.count(1)
    linger.count(0)
    linger.count(1)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not stopped.is_set()


async def test_without_a_time_an_unused_daemon_stays() -> None:
    stopped = asyncio.Event()
    linger = Linger(asyncio.get_running_loop(), 0.0, stopped.set)
    linger.count(1)
    linger.count(0)
    linger.set(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not stopped.is_set()
    linger.close()
