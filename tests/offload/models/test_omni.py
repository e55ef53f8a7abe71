"""Qwen2.5-Omni and Qwen3-Omni-MoE: thinker, talker and vocoder on a device for the largest."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.guarantees.harness import Daemon
from tests.offload.models import omni
from tests.offload.models.twin import check_swapped, twin

Device = Callable[[int], Daemon]

STRATEGIES: dict[str, dict[str, Any]] = {
    "least recently used": {},
    "alternating": {"cpu_offload_enabled": True},
    "sequential": {"cpu_offload_enabled": True, "cpu_offload_strategy": "sequential"},
    "layer by layer": {"enable_layerwise_offload": True},
    "partly resident": {"resident": "4MiB"},
    "towers on their own": {
        "components": ["thinker", "*.visual", "*.audio_tower", "talker", "*2wav"]
    },
}

# the models' own generate() causes it, by arguments of its own
pytestmark = pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`:UserWarning")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_qwen2_5_omni(device: Device, strategy: str) -> None:
    subject = twin(omni.qwen2_5)
    status = check_swapped(device(22), subject, **STRATEGIES[strategy])
    assert status.peak_bytes <= subject.weights_bytes / 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_qwen3_omni_moe(device: Device, strategy: str) -> None:
    check_swapped(device(24), twin(omni.qwen3), **STRATEGIES[strategy])
