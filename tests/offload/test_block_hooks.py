"""Hooks of blocks are removed during passes that hold all of it, and present in all others."""

from collections.abc import Iterator

import pytest

from swapd_client import Client
from swapd_client.offload.attachment import Attachment
from swapd_client.offload.hooks import BlockHooks, _compile_begins, _compile_ends, hook_of
from tests.offload.modules import Encoder, seeded

MODEL = seeded(Encoder)


def are_there() -> bool:
    return "_call_impl" in vars(MODEL.layers[0])


@pytest.fixture
def attachment(client: Client) -> Iterator[Attachment]:
    with client.attach({"text": MODEL}, blocks=["layers"]) as attachment:
        assert are_there()
        yield attachment
    assert not are_there()


@pytest.fixture
def hooks(attachment: Attachment) -> BlockHooks:
    hook = hook_of(MODEL.layers[0])
    assert hook is not None
    assert hook.aside is not None
    return hook.aside


def test_hooks_stay_while_any_thread_goes_block_by_block(hooks: BlockHooks) -> None:
    hooks.begin(whole=False)
    hooks.begin(whole=True)
    assert are_there()
    hooks.end(whole=False)
    assert not are_there()
    hooks.begin(whole=False)
    assert are_there()
    hooks.end(whole=False)
    hooks.end(whole=True)
    assert are_there()


def test_hooks_removed_for_good_during_a_pass_do_not_come_back(
    attachment: Attachment, hooks: BlockHooks
) -> None:
    hooks.begin(whole=True)
    attachment.detach()
    hooks.end(whole=True)
    assert not are_there()


def test_hooks_are_there_during_compilations_which_begin_within_others(hooks: BlockHooks) -> None:
    hooks.begin(whole=True)
    for _ in range(2):
        _compile_begins()
    _compile_ends()
    assert are_there()
    for _ in range(2):  # once more than began: one may have registered in between
        _compile_ends()
    assert not are_there()
    hooks.end(whole=True)
