"""Ways to run one model on several GPUs that do not go with swapd."""

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.vllm.environment import environment

#: Says what is wrong with a configuration, of which it has as much as is looked at.
PROGRAM = """
import json, sys
from types import SimpleNamespace as Some
from swapd_client.vllm.worker import Unsupported, _refuse

def said(experts, sizes):
    nothing = Some(cpu_offload_gb=0, offload_group_size=0)
    config = Some(
        model_config=Some(enable_sleep_mode=False, is_moe=experts),
        parallel_config=Some(enable_eplb=False, **sizes),
        offload_config=Some(uva=nothing, prefetch=nothing),
    )
    try:
        _refuse(config, "thinker")
    except Unsupported as exc:
        return str(exc)
    return ""

print(json.dumps([said(*one) for one in json.loads(sys.argv[1])]))
"""

ONE_EACH = {
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "data_parallel_size": 1,
}
EXPERTS, DENSE = True, False

CASES: Mapping[str, tuple[bool, dict[str, int]]] = {
    "pipeline_parallel_size: 1": (DENSE, {"pipeline_parallel_size": 2}),
    "prefill_context_parallel_size: 1": (DENSE, {"prefill_context_parallel_size": 2}),
    "data_parallel_size: 1": (EXPERTS, {"data_parallel_size": 2}),
    "": (DENSE, {"data_parallel_size": 2}),  # these replicas do not wait for each other
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    asked = json.dumps([(experts, ONE_EACH | sizes) for experts, sizes in CASES.values()])
    command = [sys.executable, "-c", PROGRAM, asked]
    done = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("what", [what for what in CASES if what])
def test_ranks_outside_the_order_are_refused_with_what_to_set(
    said: dict[str, str], what: str
) -> None:
    assert said[what].startswith("stage 'thinker': ")
    assert f"set {what}" in said[what]


def test_replicas_by_themselves_are_not(said: dict[str, str]) -> None:
    assert said[""] == ""
