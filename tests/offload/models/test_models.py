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
OF_PICTURES: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    "DiTs against encoders": {"enable_cpu_offload": True},
    "partly on the host": {"cpu_offload_gb": 0.008},
}
OF_OMNI: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    "towers on their own": {
        "components": ["thinker", "*.visual", "*.audio_tower", "talker", "*2wav"]
    },
}


@pytest.mark.parametrize("strategy", OF_PICTURES)
@pytest.mark.parametrize(
    ("pipeline", "budget_mib"), [(pictures.flux, 26), (pictures.wan, 20)], ids=["flux", "wan"]
)
def test_pipelines_of_diffusers(
    device: Device, pipeline: Any, budget_mib: int, strategy: str
) -> None:
    check_swapped(device(budget_mib), twin(pipeline), **OF_PICTURES[strategy])


# the model's own generate() causes it, by arguments of its own
@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`:UserWarning")
@pytest.mark.parametrize("strategy", OF_OMNI)
def test_thinker_talker_and_vocoder(device: Device, strategy: str) -> None:
    subject = twin(omni.qwen2_5)
    status = check_swapped(device(22), subject, **OF_OMNI[strategy])
    assert status.peak_bytes <= subject.weights_bytes / 2
