"""The sections of `make gpu-check` for real engines run on swapd's host device, with tiny sizes,
and report the features that this vLLM lacks.
"""

import io
import json
import os
import subprocess
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_check import engines, kernels, rig
from benchmarks.gpu_check.pipeline import RESIDENT, SWAPD
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import SMALL
from tests import forked
from tests.vllm.engine import PRELOADED
from tests.vllm.environment import environment
from tests.vllm.second_runner import VARIABLES

HOST = replace(SMALL, device="host", requests=1)


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes have the same environment as in all these tests."""
    for name in list(os.environ):  # noqa: TID251
        if name.startswith(("VLLM_", "SWAPD_")):
            monkeypatch.delenv(name)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines' processes need not import vLLM anew, which takes longer than all else they do."""
    popen = partial(forked.Popen, imported=("torch", *PRELOADED))
    monkeypatch.setattr(rig, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))


def told(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(row) for row in out.getvalue().splitlines()]


@pytest.mark.usefixtures("_alone")
def test_an_engine_with_the_second_runner_is_compared_with_a_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    out = io.StringIO()
    check = Check("engines", out)
    model = engines.dense(HOST, 2)
    eager = {"enforce_eager": True}
    engines.same(check, HOST, engines.SECOND, model, eager, engines.second_runner)
    (row,) = told(out)
    assert row["verdict"] == "ok"
    assert "2 of 2 requests" in row["note"]


@pytest.mark.usefixtures("_alone", "_forked")
def test_what_vllm_has_chosen_instead_is_said_and_is_no_failure() -> None:
    out = io.StringIO()
    model = engines.with_experts(HOST)
    eager = {"enforce_eager": True}
    check = Check("engines", out)
    engines.same(check, HOST, engines.EXPERTS, model, eager, engines.experts_by_triton)
    (row,) = told(out)
    assert row["verdict"] == "missing"
    assert "vLLM has chosen otherwise: " in row["note"]


@pytest.mark.usefixtures("_alone", "_forked")
def test_kernels_that_keep_weights_their_own_way_are_compared_where_vllm_has_them() -> None:
    """On a CPU that is MLA, whose products of weights are views of a parameter."""
    out = io.StringIO()
    latent = next(one for one in kernels.kinds(HOST) if one.name == kernels.LATENT)
    kernels.compare(Check("kernels", out), HOST, latent)
    (row,) = told(out)
    assert row["verdict"] == "ok", row["note"]


@pytest.mark.usefixtures("_alone", "_forked")
def test_three_engines_say_the_same_resident_and_in_turns() -> None:
    out = io.StringIO()
    found = dict(engines.ways(Check("engines", out), HOST, 0, RESIDENT, SWAPD))
    assert out.getvalue() == "", "nothing went wrong"
    assert found[RESIDENT].made == found[SWAPD].made
    assert len(found[SWAPD].made[0][0]) == 18
