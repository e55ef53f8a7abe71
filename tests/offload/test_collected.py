"""Garbage that holds a lease releases it, at any point of the collecting thread."""

import gc
import threading

import pytest
import torch

from swapd_client import Client
from swapd_client.offload.scope import here
from tests.offload.modules import TOKENS, Encoder, await_none_leased, seeded


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("resident", [None, 0], ids=["whole", "streamed"])
def test_whoever_collects_what_a_call_left_may_hold_any_lock(
    client: Client, resident: int | None
) -> None:
    model = seeded(Encoder, 4)

    def run() -> None:
        """Is interrupted. Its lease and its holder form a cycle, as errors make them."""
        with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
            model(TOKENS)
        cycle: list[object] = [here()]
        cycle.append(cycle)

    collected = threading.Event()

    def collect() -> None:
        with client.session.life.lock:
            gc.collect()
        collected.set()

    with client.attach({"dit": model}, resident=resident):
        hook = model.layers[1].register_forward_hook(interrupted)
        gc.disable()
        try:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            threading.Thread(target=collect, daemon=True).start()
            assert collected.wait(60)
        finally:
            gc.enable()
        hook.remove()
        await_none_leased(client)
