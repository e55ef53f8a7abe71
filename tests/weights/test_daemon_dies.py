"""The daemon is killed during a load, an update or a family: no weights are half changed."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import swapd_client
from swapd import spawn
from swapd.shared import protocol
from swapd_client import Client, DaemonGone
from swapd_client.session.registry import Registry
from tests import served


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def kill(daemon: spawn.Spawned, client: Client) -> None:
    """Returns when the client knows."""
    ended = threading.Event()
    client.session.life.when_ended(lambda _: ended.set())
    os.kill(daemon.pid, signal.SIGKILL)
    assert ended.wait(30)


@pytest.mark.parametrize("when", [protocol.Update, protocol.Commit])
@pytest.mark.parametrize("resident", [True, False])
def test_in_the_middle_of_an_update(
    monkeypatch: pytest.MonkeyPatch, when: type[protocol.Request], resident: bool
) -> None:
    module = model(0)
    before = values(module)
    with (
        spawn.daemon(budget="64MiB") as daemon,
        swapd_client.connect(daemon.folder, reconnect=0) as client,
    ):
        parts = {str(i): block for i, block in enumerate(module.children())}
        client.register_family("m", parts)
        if resident:
            client.acquire("m").release()
        call = client.leasing.call

        def dying(request: protocol.AnyRequest) -> protocol.AnyReply:
            if isinstance(request, when):
                kill(daemon, client)
            return call(request)

        monkeypatch.setattr(client.leasing, "call", dying)
        with pytest.raises(DaemonGone):
            client.update("m", values(model(1)))
        client.close()
        after = values(module)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_in_the_middle_of_a_load(tmp_path: Path) -> None:
    save_file(values(model(0)), tmp_path / "m.safetensors")
    with torch.device("meta"):
        module = model(1)
    with served.alone(budget="64MiB") as (daemon, client):

        def told(done: int, total: int) -> None:
            if client.session.error is None:
                kill(daemon, client)

        with pytest.raises(DaemonGone):
            client.load("m", tmp_path / "m.safetensors", module, progress=told)
        assert not client.session.components
    assert all(p.is_meta for p in module.parameters())


@pytest.mark.parametrize("which", [0, 1])
def test_in_the_middle_of_a_family(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    module = model(0)
    before, places = values(module), [p.data_ptr() for p in module.parameters()]
    with spawn.daemon(budget="64MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        fill: Callable[..., None] = Registry.fill

        def dying(registry: Registry, part: Any) -> None:
            if part.name == f"m/{which}":
                kill(daemon, client)
            fill(registry, part)

        monkeypatch.setattr(Registry, "fill", dying)
        parts = {str(i): block for i, block in enumerate(module.children())}
        with pytest.raises(DaemonGone):
            client.register_family("m", parts)
        assert not client.session.components
    after = values(module)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert places == [p.data_ptr() for p in module.parameters()]
