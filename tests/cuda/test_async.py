"""The asyncio client on the GPU: its loop never waits for the driver, nor for the GPU's work."""

from pathlib import Path

from tests.cuda.gpu_world import World
from tests.processes import output_of

PRELUDE = """
import asyncio, ctypes, os, sys, threading
from pathlib import Path
import swapd_client
from swapd.device.driver import Driver

FAULTS = Path(os.environ["FAKECUDA_FAULTS"])
MIB = 1 << 20
inside = []
real = Driver.call
def call(self, function, *arguments):
    "Calls that map or wait, and the thread they are made in."
    if function.__name__ in ("cuMemMap", "cuMemCreate", "cuEventSynchronize"):
        inside.append((function.__name__, threading.current_thread() is threading.main_thread()))
    return real(self, function, *arguments)
Driver.call = call

class Work:
    "Copies out of a component, held back until `go_on`."
    def __init__(self, client):
        self.driver = Driver.by_uuid(client.session.welcome.uuid)
        with self.driver.current():
            self.stream = self.driver.stream()
            self.target = self.driver.call(self.driver.api.cuMemAlloc, MIB)
    def start(self, part):
        FAULTS.write_text("cuMemcpyDtoDAsync hold async")
        with self.driver.current():
            copy = self.driver.api.cuMemcpyDtoDAsync
            self.driver.call(copy, self.target, part.address, MIB, self.stream)
    def go_on(self):
        FAULTS.write_text("")

async def leases(client, name):
    return next(c.leases for c in (await client.status()).components if c.name == name)

async def connected():
    return await swapd_client.connect_async(sys.argv[1])
"""


def run(world: World, program: str, folder: Path) -> None:
    output_of(f"{PRELUDE}{program}\nasyncio.run(main())", folder, env=world.fake.environment())


def test_it_swaps_and_maps_in_threads(world: World) -> None:
    daemon = world.daemon()
    run(
        world,
        """
async def main():
    async with await connected() as client:
        parts = [await client.register(n, {"x": n.encode() * (10 * MIB)}) for n in "ab"]
        for _ in range(3):
            for name in "ab":
                async with client.acquire(name) as lease:
                    await lease.wait()
                    lease.check()
        await client.unregister("a")
    assert ("cuMemMap", False) in inside and ("cuMemCreate", False) in inside
    assert ("cuMemMap", True) not in inside
""",
        daemon.folder,
    )


def test_a_release_never_blocks_and_waits_for_the_work(world: World) -> None:
    daemon = world.daemon()
    run(
        world,
        """
async def main():
    async with await connected() as client:
        part = await client.register("a", {"x": b"a" * (10 * MIB)})
        await client.register("b", {"x": b"b" * (10 * MIB)})
        work = Work(client)
        lease = await client.acquire("a")
        work.start(part)
        lease.uses(int(work.stream))
        lease.release()
        assert await leases(client, "a") == 1
        waiting = asyncio.ensure_future(asyncio.wait_for(client.acquire("b"), 60))
        while not (await client.status()).waiting:
            pass
        work.go_on()
        (await waiting).release()
        assert await leases(client, "a") == 0
""",
        daemon.folder,
    )


def test_a_task_that_holds_another_lease_waits_and_the_loop_does_not(world: World) -> None:
    daemon = world.daemon()
    run(
        world,
        """
async def main():
    async with await connected() as client:
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
""",
        daemon.folder,
    )


def test_a_stream_waits(world: World) -> None:
    daemon = world.daemon()
    run(
        world,
        """
async def main():
    async with await connected() as client:
        part = await client.register("a", {"x": b"a" * (8 * MIB)})
        work = Work(client)
        FAULTS.write_text("cuMemcpyHtoDAsync hold async")
        lease = await client.acquire("a", early=True)
        await lease.wait(stream=int(work.stream))
        with work.driver.current():
            assert not work.driver.is_idle(work.stream)
        lease.release()
        assert await leases(client, "a") == 1
        work.go_on()
        while await leases(client, "a"):
            pass
""",
        daemon.folder,
    )


def test_an_acquire_cancelled_as_it_is_mapped_holds_nothing(world: World) -> None:
    daemon = world.daemon()
    run(
        world,
        """
async def main():
    loop = asyncio.get_running_loop()
    started = asyncio.Event()
    async with await connected() as client:
        await client.register("a", {"x": b"a" * (8 * MIB)})
        show = client.session.leases.show
        def slowly(*arguments):
            loop.call_soon_threadsafe(started.set)
            show(*arguments)
        client.session.leases.show = slowly
        async def acquire():
            return await client.acquire("a")
        task = loop.create_task(acquire())
        await started.wait()
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        while await leases(client, "a"):
            pass
""",
        daemon.folder,
    )


def test_closing_waits_for_what_is_pending(world: World) -> None:
    daemon = world.daemon()
    run(
        world,
        """
async def main():
    client = await connected()
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
""",
        daemon.folder,
    )
