"""`swapd status` shows what is kept for no session, and `swapd forget` drops it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import swapd_client
from swapd_client.weights import safetensors

from .conftest import Running, serve, swapd


@pytest.fixture
def kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A daemon that keeps the host copies of two components."""
    monkeypatch.setattr(safetensors, "SETTLED_NS", -(10**9))
    daemon = serve(folder, **{"keep-host": "64MiB"})
    for name in ("talker", "vae"):
        save_file({"a": torch.ones(1 << 18)}, tmp_path / name)
        with swapd_client.connect(daemon.folder) as client:
            client.load(name, tmp_path / name)
    with swapd_client.connect(daemon.folder) as client:
        while len(client.status().kept) < 2:
            pass
    yield daemon
    daemon.stop()


def test_they_are_shown_and_forgotten(kept: Running) -> None:
    shown = swapd("status", "-e", kept.folder).stdout
    assert "2 MiB of them without a session, 2 contents" in shown
    found = json.loads(swapd("status", "-e", kept.folder, "--json").stdout)["kept"]
    assert [one["name"] for one in found] == ["talker", "vae"]
    refused = swapd("forget", "talker", "dit", "-e", kept.folder, status=1).stderr
    assert "no host copy of 'dit' is kept; kept: talker, vae" in refused
    told = swapd("forget", found[0]["content"], "-e", kept.folder).stdout
    assert told == "1 MiB dropped: talker\n"
    assert swapd("forget", "-e", kept.folder).stdout == "1 MiB dropped: vae\n"
    assert swapd("forget", "-e", kept.folder).stdout == "0 B dropped: nothing was kept\n"
    assert json.loads(swapd("status", "-e", kept.folder, "--json").stdout)["kept"] == []
