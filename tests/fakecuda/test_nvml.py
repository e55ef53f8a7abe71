"""The fake NVML lists the users of a card, through the real nvidia-ml-py."""

import sys

import pytest

from tests import fakecuda
from tests.processes import output_of, start_python

PRELUDE = """
import pynvml
def code_of(call, *arguments):
    try: return call(*arguments)
    except pynvml.NVMLError as error: return f"{error.value} {error}"
"""
START = PRELUDE + "pynvml.nvmlInit(); card = pynvml.nvmlDeviceGetHandleByIndex(0)\n"

HOLD = """
import sys
from tests.fakecuda.calls import *
start()
held = [create(), create()]
print("ready", flush=True)
sys.stdin.read()
"""


def test_cards_are_found_by_index_and_uuid_whatever_is_visible() -> None:
    program = """
print(pynvml.nvmlDeviceGetCount())
uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(1))
print(uuid, pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByUUID(uuid)))
print(code_of(pynvml.nvmlDeviceGetHandleByIndex, 2))
print(code_of(pynvml.nvmlDeviceGetHandleByUUID, "GPU-0"))
print(pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion())
"""
    with fakecuda.machine(devices=2, driver="570.86.15") as fake:
        env = {**fake.environment(), "CUDA_VISIBLE_DEVICES": "0"}
        assert output_of(START + program, env=env).splitlines() == [
            "2",
            "GPU-fa4ec0da-0013-4000-8000-5a5a5a5a5a01 Fake GPU 1",
            "2 Invalid Argument",
            "6 Not Found",
            "570.86.15 13000",
        ]


def test_the_driver_and_nvml_call_a_card_by_the_same_uuid() -> None:
    program = """
from tests.fakecuda.calls import call, start
start()
uuid = bytes(call("cuDeviceGetUuid", 0).bytes).hex()
print(uuid == pynvml.nvmlDeviceGetUUID(card).removeprefix("GPU-").replace("-", ""))
"""
    with fakecuda.machine() as fake:
        assert output_of(START + program, env=fake.environment()) == "True\n"


def test_memory_and_the_processes_that_hold_it() -> None:
    program = """
memory, newer = pynvml.nvmlDeviceGetMemoryInfo(card), pynvml.nvmlDeviceGetMemoryInfo(
    card, version=pynvml.nvmlMemory_v2)
assert (memory.total, memory.used, memory.free) == (newer.total, newer.used, newer.free)
print(memory.total >> 20, memory.used >> 20, memory.free >> 20)
for each in pynvml.nvmlDeviceGetComputeRunningProcesses(card):
    print(each.pid, each.usedGpuMemory >> 20, pynvml.nvmlSystemGetProcessName(each.pid))
"""
    with fakecuda.machine(total=256 << 20, context=10 << 20) as fake:
        assert output_of(START + program, env=fake.environment()) == "256 0 256\n"
        with (
            start_python(HOLD, env=fake.environment()) as child,
            fake.occupied(64 << 20, pid=4000001, name="/usr/bin/ollama serve"),
        ):
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            lines = output_of(START + program, env=fake.environment()).splitlines()
            child.kill()
        assert lines[0] == "256 78 178"
        assert sorted(lines[1:]) == sorted(
            [f"{child.pid} 14 {sys.executable}", "4000001 64 /usr/bin/ollama serve"]
        )
        assert output_of(START + program, env=fake.environment()) == "256 0 256\n"


def test_what_others_hold_is_missing_for_the_driver_too() -> None:
    program = """
from tests.fakecuda.calls import *
start()
print(call("cuMemGetInfo")[0] >> 20, code_of("cuMemCreate", 64 << 20, properties(), 0))
"""
    with fakecuda.machine(total=64 << 20) as fake:
        with fake.occupied(16 << 20):
            assert output_of(program, env=fake.environment()) == "48 2\n"
        assert output_of(program, env=fake.environment()) == "64 0\n"


def test_clients_of_mps_are_listed_apart() -> None:
    program = """
print([each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(card)],
      [each.pid for each in pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(card)])
"""
    with fakecuda.machine() as fake:
        assert output_of(START + program, env=fake.environment()) == "[] []\n"
        with (
            fake.occupied(1 << 20, pid=4000001, name="nvidia-cuda-mps-server"),
            fake.occupied(1 << 20, pid=4000002, mps=True),
        ):
            found = output_of(START + program, env=fake.environment())
    assert found == "[4000001] [4000002]\n"


@pytest.mark.parametrize(
    ("knob", "expected"), [("0", "[0, 0]"), ("1", "[1, 1]"), ("none", "3 Not Supported")]
)
def test_a_card_may_be_split(knob: str, expected: str) -> None:
    with fakecuda.machine(mig=knob) as fake:
        program = START + "print(code_of(pynvml.nvmlDeviceGetMigMode, card))"
        assert output_of(program, env=fake.environment()) == f"{expected}\n"


def test_nvml_may_not_know_what_processes_use() -> None:
    program = "print([p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(card)])"
    with fakecuda.machine(nvml_use=0) as fake, fake.occupied(1 << 20):
        assert output_of(START + program, env=fake.environment()) == "[None]\n"


@pytest.mark.parametrize(("code", "text"), [(9, "Driver Not Loaded"), (18, "mismatch")])
def test_nvml_may_not_start(code: int, text: str) -> None:
    with fakecuda.machine(nvml=code) as fake:
        found = output_of(PRELUDE + "print(code_of(pynvml.nvmlInit))", env=fake.environment())
    assert found.startswith(str(code))
    assert text in found
