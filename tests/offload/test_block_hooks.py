"""Hooks of blocks are removed during passes that hold all of it, and present in all others."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch

from swapd_client import Client
from swapd_client.offload.attachment import Attachment
from swapd_client.offload.hooks import BlockHooks, _compile_begins, _compile_ends, hook_of
from tests.offload.modules import TOKENS, Encoder, seeded

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
    hooks.begin("by block", whole=False)
    hooks.begin("whole", whole=True)
    assert are_there()
    hooks.end("by block")
    assert not are_there()
    hooks.begin("by block", whole=False)
    assert are_there()
    hooks.end("by block")
    hooks.end("whole")
    assert are_there()


def test_hooks_removed_for_good_during_a_pass_do_not_come_back(
    attachment: Attachment, hooks: BlockHooks
) -> None:
    hooks.begin("whole", whole=True)
    attachment.detach()
    hooks.end("whole")
    assert not are_there()


def test_hooks_are_there_during_compilations_which_begin_within_others(hooks: BlockHooks) -> None:
    hooks.begin("whole", whole=True)
    for _ in range(2):
        _compile_begins()
    _compile_ends()
    assert are_there()
    for _ in range(2):  # once more than began: one may have registered in between
        _compile_ends()
    assert not are_there()
    hooks.end("whole")


# --- the number of functions -------------------------------------------------------------


def functions(call: Callable[[], object]) -> list[str]:
    """The functions called around a module's forward, in order; without those for compiled code."""
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        where = frame.f_code.co_filename
        if event == "call" and "swapd_client/offload" in where and "dynamo" not in where:
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return called


def test_a_call_that_finds_all_of_it_there_calls_few_functions(client: Client) -> None:
    """On a machine under any load: each function is slow with cold caches."""

    def call() -> None:
        MODEL(TOKENS)

    with torch.inference_mode():
        with client.attach({"whole": MODEL}):
            call()
            assert functions(call).count("LeaseGate.run") == len(MODEL.layers) + 3
            assert len(functions(call)) < 30
        with client.attach({"streamed": MODEL}, blocks=["layers.0", "layers.1"]):
            client.acquire("streamed").release()
            call()
            assert functions(call).count("LeaseGate.run") == 1
