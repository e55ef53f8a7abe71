"""A model attached by an async client behaves like one attached by the other client."""

import asyncio

import pytest
import torch

import swapd_client
from swapd import spawn
from swapd_client import InUse
from swapd_client.offload.attachment import Attachment
from swapd_client.offload.hooks import hook_of
from tests.client.test_cancelled import each_cancelled
from tests.guarantees.harness import Daemon
from tests.offload.modules import TOKENS, Model, computed, seeded


async def test_its_components_take_turns_and_are_its_own_again_when_the_client_is_closed() -> None:
    model, twin = seeded(Model), seeded(Model)
    for each in (model, twin):
        each.requires_grad_(requires_grad=False)
    x = TOKENS
    with spawn.daemon(budget="16MiB") as daemon:
        async with await swapd_client.connect_async(daemon.folder) as client:
            attachment = await client.attach(model)
            assert torch.equal(await asyncio.to_thread(model, x), twin(x))
            assert torch.equal(model(x), twin(x)), "in the loop's own thread, too"
            with attachment.use("vae"), pytest.raises(InUse):
                await asyncio.to_thread(attachment.detach)
            values = {key: value + 1 for key, value in twin.state_dict().items()}
            twin.load_state_dict(values)
            await asyncio.to_thread(model.load_state_dict, values)
            assert torch.equal(await asyncio.to_thread(model, x), twin(x))
        assert torch.equal(model(x), twin(x))


async def test_a_cancelled_attach_has_attached_nothing(daemon: Daemon) -> None:
    model, expected = computed(TOKENS, Model)
    async with await swapd_client.connect_async(daemon.folder) as client:

        async def attach() -> None:
            attached.append(await client.attach(model))
            detach()

        def detach() -> None:
            while attached:
                attached.pop().detach()

        attached: list[Attachment] = []
        async for _ in each_cancelled(attach):
            detach()
            assert not client.session.components
            assert not any(map(hook_of, model.modules()))
            assert torch.equal(model(TOKENS), expected)
            await attach()
