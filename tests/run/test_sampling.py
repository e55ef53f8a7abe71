"""Samples of the memory that a command uses."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from swapd.run.sampling import Sampler, descendants, host_bytes

MIB = 1 << 20
_HOLDS = """
import os, sys
own = bytearray(os.urandom(1) * (32 << 20))
if os.fork():
    print("holds", flush=True)
sys.stdin.read()
"""


def test_private_memory_of_all_processes_counts_and_shared_memory_once() -> None:
    shared = os.memfd_create("shared")
    os.write(shared, bytes(64 * MIB))
    before = host_bytes(descendants(os.getpid()))
    sampler = Sampler(["host"])
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[shared],
    )
    os.close(shared)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == b"holds\n"
        assert len(descendants(process.pid)) == 1
        sampler.sample()
        assert sampler.host_bytes is not None
        took = sampler.host_bytes - before
        assert 32 * MIB + 64 * MIB <= took < 2 * 32 * MIB + 2 * 64 * MIB
        assert sampler.pause_s > 0
        assert sampler.device_bytes is None, "measured without a GPU"
    process.wait(60)


def test_of_a_gpu_it_is_what_is_used_on_top_of_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {0: [100, 300, 250], 1: [10, 10, 40]}
    nvml = SimpleNamespace(
        NVMLError=IndexError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetMemoryInfo=lambda number: SimpleNamespace(used=used[number].pop(0)),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sampler = Sampler(["cuda:0", "cuda:1"])
    for _ in range(2):
        sampler.sample()
    assert sampler.device_bytes == 200
    sampler.sample()  # the library fails: earlier samples stay
    assert sampler.device_bytes == 200
