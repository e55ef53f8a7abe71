"""The tests of `test_worker_methods.py`, for vllm-omni's workers."""

from typing import Any

import pytest

from tests.vllm.engines import Nursery
from tests.vllm.method_table import DIFFUSION, WORKER, WorkerMethods
from tests.vllm.test_worker_methods import check_does, said_of, unknown

OURS = "swapd_client.vllm.diffusion:DiffusionExtension"
WORKERS = "vllm_omni.diffusion.worker.diffusion_worker"
THEIRS = {
    "vllm_omni.worker.gpu_ar_worker:GPUARWorker": WORKER,
    "vllm_omni.worker.gpu_generation_worker:GPUGenerationWorker": WORKER,
    f"{WORKERS}:DiffusionWorker": DIFFUSION,
    f"{WORKERS}:CustomPipelineWorkerExtension": DIFFUSION,
}


@pytest.fixture(scope="module")
def said(nursery: Nursery) -> dict[str, Any]:
    return said_of(nursery, OURS, *THEIRS)


@pytest.mark.parametrize(("kind", "calls"), THEIRS.items())
def test_every_public_method_is_known(
    said: dict[str, Any], kind: str, calls: WorkerMethods
) -> None:
    assert said[kind]
    assert unknown(kind, said[kind], calls) == []


@pytest.mark.parametrize(
    "kinds",
    [
        ("swapd_client.vllm.omni:ARWorker",),
        ("swapd_client.vllm.omni:GenerationWorker",),
        (OURS, f"{WORKERS}:DiffusionWorker"),
    ],
    ids=str,
)
def test_each_override_can_be_called_as_vllm_omnis_own(
    nursery: Nursery, kinds: tuple[str, ...]
) -> None:
    assert nursery.call("tests.vllm.worker_methods:misfits", *kinds) == []


def test_each_is_called_as_is_said_of_it(said: dict[str, Any]) -> None:
    check_does(said[OURS], DIFFUSION)
