"""Whisper and a plain decoder: generate() swaps the models that it calls, whole or in layers."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.guarantees.harness import Daemon
from tests.offload.models import speech
from tests.offload.models.twin import check_swapped, twin

Device = Callable[[int], Daemon]


@pytest.mark.parametrize(
    "strategy",
    [
        {"components": ["model.encoder", "model.decoder"]},
        {"components": ["model.encoder", "model.decoder"], "policy": "alternating"},
        {"components": ["model.encoder.layers.*", "model.decoder.layers.*"]},
        {"components": ["model.encoder", "model.decoder"], "enable_layerwise_offload": True},
    ],
    ids=str,
)
def test_whisper(device: Device, strategy: dict[str, Any]) -> None:
    check_swapped(device(22), twin(speech.whisper), **strategy)


@pytest.mark.parametrize(
    "strategy",
    [
        {"components": ["model.layers.*"]},
        {"components": ["model.layers.*"], "policy": "sequential"},
        {"enable_layerwise_offload": True},
        {"resident": "6MiB"},
    ],
    ids=str,
)
def test_decoder(device: Device, strategy: dict[str, Any]) -> None:
    check_swapped(device(14), twin(speech.decoder), **strategy)
