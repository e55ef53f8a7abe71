"""An `attach` of the asyncio client that is cancelled at any `await` has attached nothing."""

import torch

import swapd_client
from swapd_client.offload.attachment import Attachment
from swapd_client.offload.hooks import hook_of
from tests.client.test_cancelled import each_cancelled
from tests.guarantees.harness import Daemon
from tests.offload.modules import TOKENS, Model, computed


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
