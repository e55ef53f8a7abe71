"""The asyncio client in one process, against a real daemon."""

import asyncio
import threading

import pytest

import swapd_client
from swapd import spawn
from swapd_client.memory.part import Part


async def test_a_registration_that_is_cancelled_while_it_copies_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    with spawn.daemon(budget="16MiB") as daemon:
        async with await swapd_client.connect_async(daemon.folder) as client:
            fill = client.session.registry.fill

            def slowly(part: Part) -> None:
                loop.call_soon_threadsafe(started.set)
                go_on.wait()
                fill(part)

            with monkeypatch.context() as patch:
                patch.setattr(client.session.registry, "fill", slowly)
                registering = loop.create_task(client.register("a", {"x": b"first"}))
                await started.wait()
                registering.cancel()
                loop.call_later(0, go_on.set)
                with pytest.raises(asyncio.CancelledError):
                    await registering
            assert not client.session.components
            part = await client.register("a", {"x": b"second"})
            async with client.acquire("a"):
                assert bytes(part.view("x")) == b"second"
