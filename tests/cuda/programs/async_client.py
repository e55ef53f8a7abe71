"""The asyncio client on a GPU. `python async_client.py CASE FOLDER` runs the function CASE with the
daemon in FOLDER, and records the calls of the driver in the loop's own thread.
"""

import asyncio
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import swapd_client
from swapd.device.driver import Driver
from swapd_client import AsyncClient, AsyncLease, Component
from tests.cuda.programs.lone_gpu import put

FAULTS = Path(os.environ["FAKECUDA_FAULTS"])  # noqa: TID251
MIB = 1 << 20

#: Calls that map or wait, and whether the main thread made them.
inside: list[tuple[str, bool]] = []


def watched(self: Driver, function: Callable[..., Any], *args: Any) -> Any:
    if function.__name__ in ("cuMemMap", "cuMemCreate", "cuEventSynchronize"):
        inside.append((function.__name__, threading.current_thread() is threading.main_thread()))
    return real_call(self, function, *args)


class Work:
    """Copies out of a component, held back until `go_on`."""

    def __init__(self, client: AsyncClient) -> None:
        self.driver = Driver.by_uuid(client.session.welcome.uuid)
        with self.driver.current():
            self.stream = self.driver.stream()
            self.target = self.driver.call(self.driver.api.cuMemAlloc, MIB)

    def start(self, part: Component) -> None:
        FAULTS.write_text("cuMemcpyDtoDAsync hold async")
        with self.driver.current():
            copy = self.driver.api.cuMemcpyDtoDAsync
            self.driver.call(copy, self.target, part.address, MIB, self.stream)

    def go_on(self) -> None:
        FAULTS.write_text("")

    @staticmethod
    def hold_loads() -> None:
        FAULTS.write_text("cuMemcpyHtoDAsync hold async")


def bytes_at(client: AsyncClient, address: int) -> bytes:
    """The first MiB there."""
    found, driver = ctypes.create_string_buffer(MIB), Driver.by_uuid(client.session.welcome.uuid)
    with driver.current():
        stream = driver.stream()
        driver.copy_to_host(ctypes.addressof(found), address, MIB, stream)
        driver.finish(stream)
        driver.destroy_stream(stream)
    driver.close()
    return found.raw


async def leases(client: AsyncClient, name: str) -> int:
    return next(c.leases for c in (await client.status()).components if c.name == name)


async def swaps(folder: str) -> None:
    async with await swapd_client.connect_async(folder) as client:
        for name in "ab":
            await client.register(name, {"x": name.encode() * (10 * MIB)})
        for _ in range(3):
            for name in "ab":
                async with client.acquire(name) as lease:
                    await lease.wait()
                    lease.check()
        await client.unregister("a")
    assert ("cuMemMap", False) in inside
    assert ("cuMemCreate", False) in inside
    assert ("cuMemMap", True) not in inside


async def a_release_with_work_pending(folder: str) -> None:
    async with await swapd_client.connect_async(folder) as client:
        part = await client.register("a", {"x": b"a" * (10 * MIB)})
        await client.register("b", {"x": b"b" * (10 * MIB)})
        work = Work(client)
        lease = await client.acquire("a")
        work.start(part)
        lease.uses(int(work.stream))
        lease.release()
        assert await leases(client, "a") == 1
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            waiting = group.create_task(acquired(client, "b"))
            while not (await client.status()).waiting:
                pass
            work.go_on()
        waiting.result().release()
        assert await leases(client, "a") == 0


async def acquired(client: AsyncClient, name: str) -> AsyncLease:
    return await client.acquire(name)


async def a_task_with_another_lease(folder: str) -> None:
    async with await swapd_client.connect_async(folder) as client:
        part = await client.register("a", {"x": b"a" * (8 * MIB)})
        await client.register("b", {"x": b"b" * (8 * MIB)})
        await client.register("kept", {"x": b"k" * (2 * MIB)})
        work = Work(client)
        async with client.acquire("kept"):
            lease = await client.acquire("a")
            work.start(part)
            lease.uses(int(work.stream))
            lease.release()
            asyncio.get_running_loop().call_soon(work.go_on)
            async with client.acquire("b"):
                pass


async def a_stream_that_waits(folder: str) -> None:
    async with await swapd_client.connect_async(folder) as client:
        await client.register("a", {"x": b"a" * (8 * MIB)})
        work = Work(client)
        work.hold_loads()
        lease = await client.acquire("a", early=True)
        await lease.wait(stream=int(work.stream))
        with work.driver.current():
            assert not work.driver.is_idle(work.stream)
        lease.release()
        assert await leases(client, "a") == 1
        work.go_on()
        while await leases(client, "a"):
            pass


async def an_acquire_cancelled(folder: str) -> None:
    loop = asyncio.get_running_loop()
    started = asyncio.Event()
    async with await swapd_client.connect_async(folder) as client:
        await client.register("a", {"x": b"a" * (8 * MIB)})
        bring_in = client.session.leases.bring_in
        work = Work(client)
        work.hold_loads()

        def slowly(*args: Any) -> None:
            loop.call_soon_threadsafe(started.set)
            bring_in(*args)

        vars(client.session.leases)["bring_in"] = slowly
        task = loop.create_task(acquired(client, "a"))
        await started.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task  # it does not wait for the copy
        while await leases(client, "a"):
            pass
        work.go_on()


async def closing_with_work_pending(folder: str) -> None:
    client = await swapd_client.connect_async(folder)
    part = await client.register("a", {"x": b"a" * (8 * MIB)}, mutable=True)
    work = Work(client)
    lease = await client.acquire("a")
    work.start(part)
    lease.uses(int(work.stream))
    lease.release()
    asyncio.get_running_loop().call_soon(work.go_on)
    await client.close()
    with work.driver.current():
        assert work.driver.is_idle(work.stream)
    assert [t.name for t in threading.enumerate() if t.name.startswith("swapd-life")] == []


async def a_restart(folder: str) -> None:
    """Use components that do not fit together, before and after another daemon starts."""
    async with await swapd_client.connect_async(folder) as client:
        for said in ("registered", "back"):
            for name in ("a", "b"):
                value = name.encode() * (16 * MIB)
                if said == "registered":
                    await client.register(name, {"x": value})
                async with client.acquire(name) as lease:
                    assert bytes_at(client, client.session.components[name].address) == value[:MIB]
                    assert lease.held
            sys.stdout.write(f"{said}\n")
            sys.stdout.flush()
            if said == "registered":
                await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    real_call = put(Driver, "call", watched)
    asyncio.run(globals()[sys.argv[1]](sys.argv[2]))
