"""A daemon that dies under an attached model: calls raise, or a callback lets them go on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import swapd_client
from swapd import spawn
from swapd_client import Client, DaemonGone
from swapd_client.offload.scope import here
from tests.offload.modules import TOKENS, Model, seeded


@contextmanager
def swapd() -> Iterator[tuple[spawn.Spawned, Client]]:
    with (
        spawn.daemon(budget=16 << 20, isolation="strict") as daemon,
        swapd_client.connect(daemon.folder) as client,
    ):
        yield daemon, client


def kill(daemon: spawn.Spawned) -> None:
    daemon.process.kill()
    daemon.process.wait()


HOW: list[dict[str, Any]] = [{}, {"blocks": ["0", "1", "2"], "resident": 0}]


@pytest.mark.parametrize("how", HOW, ids=["whole", "streamed"])
def test_a_model_whose_daemon_dies_in_a_call_goes_on_if_somebody_lets_go(
    how: dict[str, Any],
) -> None:
    model = seeded(Model)
    wanted = model(TOKENS)
    with swapd() as (daemon, client):
        attachment = client.attach(model, **how)
        attachment.when_gone = lambda _: client.close()
        assert torch.equal(model(TOKENS), wanted)
        model.transformer[1].register_forward_hook(lambda *_: kill(daemon))
        assert torch.equal(model(TOKENS), wanted)  # finds it gone at the next block, or at the VAE
        assert client.session.error is not None
        assert here().entries == []
        assert "_call_impl" not in vars(model.transformer[0])
        assert torch.equal(model(TOKENS), wanted)


def test_without_that_the_call_says_so() -> None:
    model = seeded(Model)
    with swapd() as (daemon, client):
        client.attach(model)
        kill(daemon)
        with pytest.raises(DaemonGone, match="the daemon is gone"):
            model(TOKENS)
