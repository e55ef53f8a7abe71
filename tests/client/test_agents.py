"""A thread or task that is over may have left its lease to others. A later one, to which Python
gives the same ident or address, is another all the same: it holds nothing, and may wait.
"""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import swapd_client
from swapd import spawn
from swapd_client import AsyncLease, Lease, SwapdError

#: Enough that a later one has the ident, or address, of an earlier one.
MANY = 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """That of a daemon with room for one of two components, "a" and "b"."""
    with spawn.daemon(budget="4MiB") as daemon, swapd_client.connect(daemon.folder) as owner:
        for name in ("a", "b"):
            owner.register(name, {"x": name.encode() * (3 << 20)})
        yield daemon.folder


def test_a_thread_may_wait_for_what_an_earlier_thread_has_left_to_others(folder: Path) -> None:
    with swapd_client.connect(folder) as client:
        leases: list[Lease] = []
        errors: list[SwapdError] = []

        def acquire(name: str) -> None:
            try:
                leases.append(client.acquire(name))
            except SwapdError as exc:
                errors.append(exc)

        def started(name: str) -> list[threading.Thread]:
            threads = [threading.Thread(target=acquire, args=(name,)) for _ in range(MANY)]
            for thread in threads:
                thread.start()
            return threads

        for thread in started("a"):
            thread.join()
        later = started("b")
        while client.status().waiting + len(errors) < MANY:
            """Until the daemon has all requests."""
        for lease in leases.copy():
            lease.release()
        for thread in later:
            thread.join()
        assert not errors
        assert len(leases) == 2 * MANY
        for lease in leases:
            lease.release()


async def test_a_task_may_wait_for_what_an_earlier_task_has_left_to_others(folder: Path) -> None:
    """As `gather` and, before Python 3.12, `wait_for` do: they acquire in tasks of their own."""
    async with await swapd_client.connect_async(folder) as client:
        leases: list[AsyncLease] = []

        async def acquire(name: str) -> None:
            leases.append(await client.acquire(name))

        await asyncio.gather(*(acquire("a") for _ in range(MANY)))
        await client.status()  # the earlier tasks are garbage then
        later = asyncio.gather(*(acquire("b") for _ in range(2 * MANY)))
        while not later.done() and (await client.status()).waiting < 2 * MANY:
            """Until the daemon has all requests."""
        for lease in leases.copy():
            lease.release()
        await later
        for lease in leases:
            lease.release()
