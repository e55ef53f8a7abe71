"""Garbage that holds a lease releases it, at any point of the collecting thread."""

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from swapd_client import Client, SessionFenced, connect
from swapd_client.offload.scope import here
from tests import threads
from tests.guarantees.harness import Daemon
from tests.guarantees.relay import Relay
from tests.offload.modules import TOKENS, Encoder, await_none_leased, leases, seeded


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
            threads.started(run).join()
            threading.Thread(target=collect, daemon=True).start()
            assert collected.wait(60)
        finally:
            gc.enable()
        hook.remove()
        await_none_leased(client)


class Decoding(torch.nn.Module):
    """Yields a token at a time, and holds its weights in between."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        while True:
            yield (x := self.head(x))


def ask_for_ever(client: Client) -> None:
    while True:
        client.status()


def test_garbage_whose_release_fails_keeps_no_other_from_its_release(
    client: Client, daemon: Daemon
) -> None:
    """The release raises in a session that has ended, in a thread without a caller."""
    fenced_model, model = seeded(Decoding), seeded(Decoding)
    x = torch.ones(1, 4)
    with (
        Relay(daemon.folder.with_name("relay"), daemon.folder) as relay,
        connect(relay.folder) as fenced,
        client.attach({"other": model}),
    ):
        fenced.attach({"dit": fenced_model})
        steps = fenced_model(x)
        next(steps)
        relay.send_garbage()
        with pytest.raises(SessionFenced):
            ask_for_ever(fenced)
        del steps
        gc.collect()

        steps = model(x)
        next(steps)
        assert leases(client)["other"] == 1
        del steps
        gc.collect()
        await_none_leased(client)
