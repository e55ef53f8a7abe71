"""Pipelines of diffusers: encoders, DiTs and VAE on a device that holds no two large ones."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.guarantees.harness import Daemon
from tests.offload.models import pictures
from tests.offload.models.twin import check_swapped, twin

Device = Callable[[int], Daemon]

STRATEGIES: dict[str, dict[str, Any]] = {
    "least recently used": {},
    "alternating": {"cpu_offload_enabled": True},
    "sequential": {"cpu_offload_enabled": True, "cpu_offload_strategy": "sequential"},
    "DiTs against encoders": {"enable_cpu_offload": True},
    "layer by layer": {"enable_layerwise_offload": True},
    "partly resident": {"resident": "6MiB"},
    "partly on the host": {"cpu_offload_gb": 0.008},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_flux(device: Device, strategy: str) -> None:
    check_swapped(device(24), twin(pictures.flux), **STRATEGIES[strategy])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stable_diffusion_3(device: Device, strategy: str) -> None:
    check_swapped(device(28), twin(pictures.stable_diffusion_3), **STRATEGIES[strategy])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_wan(device: Device, strategy: str) -> None:
    check_swapped(device(20), twin(pictures.wan), **STRATEGIES[strategy])
