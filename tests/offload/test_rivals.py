"""The rivals of the benchmarks work as described, on memory that stands in for a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.offload import rivals
from benchmarks.offload.model import build, modules, nbytes, paint
from benchmarks.offload.stand_in import DEVICE, HOST, StandIn

STEPS = 2


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield build(width=64)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def expected(pipeline: Any) -> torch.Tensor:
    return paint(pipeline, STEPS)


@pytest.fixture(scope="module")
def sizes(pipeline: Any) -> dict[str, int]:
    held = {}
    for name, part in modules(pipeline).items():
        held[name] = nbytes(part) + sum(b.numel() * b.element_size() for b in part.buffers())
    return held


def test_a_module_is_copied_there_and_back() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).eval()
    given = torch.randn(4, 8)
    expected = module(given)
    device = StandIn()
    with device.installed():
        module.to("cpu:0")
        assert next(module.parameters()).device == DEVICE
        moved = device.bytes_in
        assert moved == device.live_bytes == (8 * 8 + 8 + 4 * 8) * 4 + 8
        assert torch.equal(module(given), expected)
        module.to("cpu:0")
        assert device.bytes_in == moved
        module.to("cpu")
    assert next(module.parameters()).device == HOST
    assert (device.bytes_back, device.live_bytes, device.peak_bytes) == (moved, 0, moved)
    assert torch.equal(module(given), expected)


def test_diffusers_copies_every_component_in_and_back_for_every_picture(
    pipeline: Any, expected: torch.Tensor, sizes: dict[str, int]
) -> None:
    device = StandIn()
    with rivals.diffusers_model(pipeline, device):
        for number in (1, 2):
            assert torch.equal(paint(pipeline, STEPS), expected)
            assert device.bytes_in == device.bytes_back == number * sum(sizes.values())
    assert device.peak_bytes == max(sizes.values())
    assert torch.equal(paint(pipeline, STEPS), expected)


def test_diffusers_groups_come_and_go_at_every_step(
    pipeline: Any, expected: torch.Tensor, sizes: dict[str, int]
) -> None:
    device = StandIn()
    with rivals.diffusers_groups(pipeline, device):
        assert torch.equal(paint(pipeline, STEPS), expected)
    assert device.bytes_in == device.bytes_back > STEPS * sizes["transformer"]
    assert device.peak_bytes < sizes["transformer"]
    assert torch.equal(paint(pipeline, STEPS), expected)


def test_vllm_omni_copies_encoders_and_dit_in_and_back_for_every_picture(
    pipeline: Any, expected: torch.Tensor, sizes: dict[str, int]
) -> None:
    device = StandIn()
    with rivals.vllm_omni_rule(pipeline, device):
        paint(pipeline, STEPS)
        before = device.bytes_in, device.bytes_back
        assert torch.equal(paint(pipeline, STEPS), expected)
        exchanged = sum(sizes.values()) - sizes["vae"]
        assert device.bytes_in - before[0] == device.bytes_back - before[1] == exchanged
    assert device.peak_bytes == sizes["vae"] + sizes["transformer"]
    assert torch.equal(paint(pipeline, STEPS), expected)
