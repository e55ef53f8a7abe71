"""The plugin knows each public method of vLLM's and vllm-omni's workers, and treats it as it says.

With a new version of vLLM these tests come first: a method that reads weights without a lease is a
fault, and one that writes to them is worse.
"""

from importlib.util import find_spec
from typing import Any

import pytest

from tests.vllm.engines import Nursery
from tests.vllm.method_table import DIFFUSION, WORKER, WorkerMethods

OURS = {"swapd_client.vllm.worker:SwapdWorkerMixin": WORKER}
THEIRS = {
    "vllm.v1.worker.gpu_worker:Worker": WORKER,
    "vllm.v1.worker.cpu_worker:CPUWorker": WORKER,
}
#: Classes of swapd, each with those of vLLM that it is put before.
WHOLE: list[tuple[str, ...]] = [
    ("swapd_client.vllm.worker:Worker",),
    ("swapd_client.vllm.cpu:CPUWorker",),
    ("swapd_client.vllm.scheduler:Scheduler",),
    ("swapd_client.vllm.scheduler:AsyncScheduler",),
]
if find_spec("vllm_omni"):  # there is none for each version of vLLM
    _DIFFUSION = "swapd_client.vllm.diffusion:DiffusionExtension"
    _WORKERS = "vllm_omni.diffusion.worker.diffusion_worker"
    OURS[_DIFFUSION] = DIFFUSION
    THEIRS |= {
        "vllm_omni.worker.gpu_ar_worker:GPUARWorker": WORKER,
        "vllm_omni.worker.gpu_generation_worker:GPUGenerationWorker": WORKER,
        f"{_WORKERS}:DiffusionWorker": DIFFUSION,
        f"{_WORKERS}:CustomPipelineWorkerExtension": DIFFUSION,
    }
    WHOLE += [
        ("swapd_client.vllm.omni:ARWorker",),
        ("swapd_client.vllm.omni:GenerationWorker",),
        (_DIFFUSION, f"{_WORKERS}:DiffusionWorker"),
    ]


def unknown(kind: str, public: list[str], calls: WorkerMethods) -> list[str]:
    return [
        f"{kind} has the public method {name}, and the plugin does not know whether it uses "
        "weights: read it and its callers, and add it to tests/vllm/method_table.py"
        for name in public
        if name not in calls.known
    ]


@pytest.fixture(scope="module")
def said(nursery: Nursery) -> dict[str, Any]:
    found: dict[str, Any] = nursery.call("tests.vllm.worker_methods:said_of", *OURS, *THEIRS)
    return found


@pytest.mark.parametrize(("kind", "calls"), THEIRS.items())
def test_every_public_method_is_known(
    said: dict[str, Any], kind: str, calls: WorkerMethods
) -> None:
    assert said[kind]
    assert unknown(kind, said[kind], calls) == []


def test_a_new_method_is_named_with_what_to_do() -> None:
    (problem,) = unknown("vllm:Worker", ["execute_model", "melt_weights"], WORKER)
    assert "vllm:Worker has the public method melt_weights" in problem


@pytest.mark.parametrize("kinds", WHOLE, ids=str)
def test_each_override_can_be_called_as_vllms_own(nursery: Nursery, kinds: tuple[str, ...]) -> None:
    assert nursery.call("tests.vllm.worker_methods:misfits", *kinds) == []


def test_a_steps_later_output_answers_all_that_a_version_asks_of_it(nursery: Nursery) -> None:
    said = nursery.call("tests.vllm.worker_methods:passed_on")
    assert said.keys() >= {"get_output", "get_more"}
    assert all(answer == name for name, answer in said.items())


@pytest.mark.parametrize(("kind", "calls"), OURS.items())
@pytest.mark.parametrize("group", ["leased", "changing", "refused", "without"])
def test_each_is_called_as_is_said_of_it(
    said: dict[str, Any], kind: str, calls: WorkerMethods, group: str
) -> None:
    names = {name for name, what in said[kind].items() if what == group}
    assert names == getattr(calls, group)
