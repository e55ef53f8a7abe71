"""Whole pipelines and an omni model, on a device that holds no two large parts of them."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.guarantees.harness import Daemon
from tests.offload.models import omni, pictures
from tests.offload.models.twin import check_swapped, twin

Device = Callable[[int], Daemon]

STRATEGIES: dict[str, dict[str, Any]] = {
    "least recently used": {},
    "alternating": {"cpu_offload_enabled": True},
    "sequential": {"cpu_offload_enabled": True, "cpu_offload_strategy": "sequential"},
    "layer by layer": {"enable_layerwise_offload": True},
    "partly resident": {"resident": "4MiB"},
}
#: A pipeline of two DiTs.
OF_WAN: dict[str, dict[str, Any]] = {
    "least recently used": {},
    "DiTs against encoders": {"enable_cpu_offload": True},
    "partly on the host": {"cpu_offload_gb": 0.008},
}
OF_OMNI: dict[str, dict[str, Any]] = {
    "least recently used": {},
    "layer by layer": {"enable_layerwise_offload": True},
    "towers on their own": {
        "components": ["thinker", "*.visual", "*.audio_tower", "talker", "*2wav"]
    },
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pipeline_of_pictures(device: Device, strategy: str) -> None:
    check_swapped(device(26), twin(pictures.flux), **STRATEGIES[strategy])


@pytest.mark.parametrize("strategy", OF_WAN)
def test_a_pipeline_of_videos(device: Device, strategy: str) -> None:
    check_swapped(device(20), twin(pictures.wan), **OF_WAN[strategy])


# the model's own generate() causes it, by arguments of its own
@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`:UserWarning")
@pytest.mark.parametrize("strategy", OF_OMNI)
def test_thinker_talker_and_vocoder(device: Device, strategy: str) -> None:
    subject = twin(omni.qwen2_5)
    status = check_swapped(device(22), subject, **OF_OMNI[strategy])
    assert status.peak_bytes <= subject.weights_bytes / 2
