"""The daemon asks NVML, believes it, and never needs it."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from swapd.device.base import ProcessUse
from swapd.device.nvml import Nvml

UUID = "GPU-01020304-0506-0708-090a-0b0c0d0e0f10"


class NVMLError(Exception):
    pass


class FakeNvml:
    """The part of pynvml that is in use. `knows` are the uuids of existing cards."""

    NVMLError = NVMLError

    def __init__(self, knows: str = UUID, mig: bool = False) -> None:
        self.knows = knows
        self.mig = mig
        self.names: dict[int, str | bytes] = {}
        self.compute: list[Any] = []
        self.graphics: list[Any] = []
        self.mps: list[Any] = []
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.knows:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> int:
        return int(handle.startswith("MIG-"))

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if not self.mig:
            raise NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return self.compute

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        return self.graphics

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: str) -> list[Any]:
        return self.mps

    def nvmlSystemGetProcessName(self, pid: int) -> str | bytes:
        try:
            return self.names[pid]
        except KeyError:
            raise NVMLError("Not Found") from None


def process(pid: int, nbytes: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=nbytes)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    api = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", api)
    return api


def test_the_other_processes_are_told_largest_first(api: FakeNvml) -> None:
    api.compute = [process(7, 100), process(8, 300), process(os.getpid(), 999), process(9, None)]
    api.graphics = [process(8, 200), process(6, 50)]
    api.names = {7: "/usr/bin/python3 -m vllm", 8: b"/opt/train", 6: "Xorg"}
    nvml = Nvml(UUID)
    assert nvml.processes() == (
        ProcessUse(8, "train", 300),
        ProcessUse(7, "python3", 100),
        ProcessUse(6, "Xorg", 50),
        ProcessUse(9, "a process", 0),
    )
    assert nvml.notes(mps=False) == ()


def test_a_process_of_any_name_is_told_in_one_harmless_line(api: FakeNvml) -> None:
    api.compute = [SimpleNamespace(pid=1234, usedGpuMemory=7)]
    for name in ("\x1b]0;owned\a", "a\nb", "\u202egnp.exe", "x" * 5000):
        api.names = {1234: f"/tmp/{name}"}
        (use,) = Nvml(UUID).processes()
        assert use.name.isprintable()
        assert str(use).isprintable()
        assert len(use.name) <= 1000


def test_mig_is_said_also_of_an_instance_that_has_a_name_of_its_own(api: FakeNvml) -> None:
    api.knows = UUID.replace("GPU-", "MIG-")
    nvml = Nvml(UUID)
    (note,) = nvml.notes(mps=False)
    assert "MIG is on" in note
    assert not nvml.missing
    api.knows, api.mig = UUID, True
    assert Nvml(UUID).notes(mps=False) == (note,)


def test_mps_is_said_whoever_knows_of_it(api: FakeNvml) -> None:
    (note,) = Nvml(UUID).notes(mps=True)
    assert "MPS is running" in note
    api.mps = [process(5, 1)]
    assert Nvml(UUID).notes(mps=False) == (note,)
    api.mps, api.compute, api.names = [], [process(5, 1)], {5: "nvidia-cuda-mps-server"}
    assert Nvml(UUID).notes(mps=False) == (note,)


def test_what_nvml_does_not_say_is_left_out(api: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    api.graphics = [process(6, 50)]
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetMPSComputeRunningProcesses")  # an older pynvml

    def refused(self: FakeNvml, handle: str) -> None:
        raise NVMLError("Insufficient Permissions")

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetComputeRunningProcesses", refused)
    assert Nvml(UUID).processes() == (ProcessUse(6, "a process", 50),)


def test_a_gpu_that_nvml_does_not_know_is_a_note(api: FakeNvml) -> None:
    api.knows = "GPU-another"
    nvml = Nvml(UUID)
    assert nvml.processes() == ()
    (note,) = nvml.notes(mps=False)
    assert "not known" in note
    assert "Not Found" in note
    nvml.close()
    assert api.open == 0


def test_a_missing_library_is_a_note(api: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: FakeNvml) -> None:
        raise NVMLError("NVML Shared Library Not Found")

    monkeypatch.setattr(FakeNvml, "nvmlInit", missing)
    nvml = Nvml(UUID)
    assert nvml.processes() == ()
    (note,) = nvml.notes(mps=False)
    assert note.endswith("NVML Shared Library Not Found")
    nvml.close()


def test_missing_bindings_are_a_note_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml = Nvml(UUID)
    assert nvml.processes() == ()
    *_, note = nvml.notes(mps=False)
    assert "pip install 'swapd[cuda]'" in note
    nvml.close()


def test_close_lets_go_of_nvml_once(api: FakeNvml) -> None:
    nvml = Nvml(UUID)
    assert api.open == 1
    nvml.close()
    nvml.close()
    assert api.open == 0
    assert nvml.processes() == ()


def test_nvml_that_cannot_begin_is_a_note_and_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise NVMLError("Driver Not Loaded")

        def nvmlShutdown(self) -> None:
            raise NVMLError("Uninitialized")

    monkeypatch.setitem(sys.modules, "pynvml", Broken())
    nvml = Nvml(UUID)
    assert "Driver Not Loaded" in nvml.notes(mps=False)[0]
    assert nvml.processes() == ()
    nvml.close()
