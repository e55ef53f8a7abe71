"""The plugin knows every public method of vLLM's workers, and treats each as it declares.

With a new version of vLLM these tests come first: a method that reads weights without a lease is a
fault, and one that writes to them is worse.
"""

from typing import Any

import pytest

from tests.vllm.engines import Nursery
from tests.vllm.method_table import WORKER, WorkerMethods

OURS = "swapd_client.vllm.worker:SwapdWorkerMixin"
THEIRS = ("vllm.v1.worker.gpu_worker:Worker", "vllm.v1.worker.cpu_worker:CPUWorker")


def said_of(nursery: Nursery, *classes: str) -> dict[str, Any]:
    """The output of `calls` about them."""
    said: dict[str, Any] = nursery.call("tests.vllm.worker_methods:said_of", *classes)
    return said


def unknown(kind: str, public: list[str], calls: WorkerMethods) -> list[str]:
    return [
        f"{kind} has the public method {name}, and the plugin does not know whether it uses "
        "weights: read it and its callers, and add it to tests/vllm/method_table.py"
        for name in public
        if name not in calls.known
    ]


def check_does(does: dict[str, str], calls: WorkerMethods) -> None:
    for group in ("leased", "changing", "refused", "without"):
        names = {name for name, what in does.items() if what == group}
        assert names == getattr(calls, group), group


@pytest.fixture(scope="module")
def said(nursery: Nursery) -> dict[str, Any]:
    return said_of(nursery, OURS, *THEIRS)


@pytest.mark.parametrize("kind", THEIRS)
def test_every_public_method_is_known(said: dict[str, Any], kind: str) -> None:
    assert len(said[kind]) > 30
    assert unknown(kind, said[kind], WORKER) == []


def test_a_new_method_is_named_with_what_to_do() -> None:
    (problem,) = unknown("vllm:Worker", ["execute_model", "melt_weights"], WORKER)
    assert "vllm:Worker has the public method melt_weights" in problem


@pytest.mark.parametrize(
    "kinds",
    [
        ("swapd_client.vllm.worker:Worker",),
        ("swapd_client.vllm.cpu:CPUWorker",),
        ("swapd_client.vllm.scheduler:Scheduler",),
        ("swapd_client.vllm.scheduler:AsyncScheduler",),
    ],
    ids=str,
)
def test_each_override_can_be_called_as_vllms_own(nursery: Nursery, kinds: tuple[str, ...]) -> None:
    assert nursery.call("tests.vllm.worker_methods:misfits", *kinds) == []


def test_a_steps_later_output_answers_all_that_a_version_asks_of_it(nursery: Nursery) -> None:
    said = nursery.call("tests.vllm.worker_methods:passed_on")
    assert said.keys() >= {"get_output", "get_more"}
    assert all(answer == name for name, answer in said.items())


def test_each_is_called_as_is_said_of_it(said: dict[str, Any]) -> None:
    check_does(said[OURS], WORKER)
