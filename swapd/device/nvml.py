"""NVML's information about one GPU: other users of its memory, MIG, MPS.

If NVML is missing or gives no answer, that is a note for people, never an error.
"""

import importlib
import os
from typing import Any

from swapd.device.base import ProcessUse
from swapd.shared.text import TEXT_MAX_CHARS, plain

_MPS_SERVER = "nvidia-cuda-mps-server"


class Nvml:
    """Methods block briefly; call them in any thread, but one at a time."""

    #: Why NVML does not know this GPU; "" if it does.
    missing: str

    def __init__(self, name: str) -> None:
        """`name`: the CUDA driver's uuid, "GPU-...", which NVML calls "MIG-..." under MIG; or the
        number on the machine."""
        self._api: Any = None
        self._gpu: Any = None
        try:
            self._api = importlib.import_module("pynvml")
            self._api.nvmlInit()
        except ImportError as exc:
            self.missing = f"{exc}; pip install 'swapd[cuda]'"
        except self._api.NVMLError as exc:
            self.missing = str(exc)
            self._api = None
        else:
            self._find(name)

    def close(self) -> None:
        """May be called more than once."""
        if self._api is not None:
            api, self._api = self._api, None
            self._gpu = None
            api.nvmlShutdown()

    def processes(self) -> tuple[ProcessUse, ...]:
        """Return the other processes with memory on this GPU, largest first; () without NVML."""
        used: dict[int, int] = {}
        for list_them in ("Compute", "Graphics", "MPSCompute"):
            for process in self._ask(f"nvmlDeviceGet{list_them}RunningProcesses") or ():
                # None if the system does not let NVML count
                used[process.pid] = max(used.get(process.pid, 0), process.usedGpuMemory or 0)
        used.pop(os.getpid(), None)
        uses = (ProcessUse(pid, self._name(pid), nbytes) for pid, nbytes in used.items())
        return tuple(sorted(uses, key=lambda use: (-use.nbytes, use.pid)))

    def notes(self, *, mps: bool) -> tuple[str, ...]:
        """Return facts for people. `mps`: the CUDA driver says that MPS is running."""
        notes = []
        if self._gpu is None:
            notes.append(f"other processes' use of the GPU is not known: NVML: {self.missing}")
        if self._mig():
            notes.append(
                "MIG is on: this is one instance of the GPU, with its own memory; run one "
                "daemon for each instance"
            )
        if mps or self._mps():
            notes.append("MPS is running: a fault of one of its clients ends the work of all")
        return tuple(notes)

    def uuid(self) -> str:
        """Return "" without NVML."""
        return str(self._ask("nvmlDeviceGetUUID") or "")

    def memory(self) -> Any:
        """Return the GPU's memory, with `used` and `free` bytes; None without NVML."""
        return self._ask("nvmlDeviceGetMemoryInfo")

    def _find(self, name: str) -> None:
        for one in dict.fromkeys((name, name.replace("GPU-", "MIG-", 1))):
            try:
                if one.isdecimal():
                    self._gpu = self._api.nvmlDeviceGetHandleByIndex(int(one))
                else:
                    self._gpu = self._api.nvmlDeviceGetHandleByUUID(one)
            except self._api.NVMLError as exc:
                self.missing = f"{exc} ({name})"
            else:
                self.missing = ""
                return

    def _mps(self) -> bool:
        if self._ask("nvmlDeviceGetMPSComputeRunningProcesses"):
            return True
        return any(_MPS_SERVER in use.name for use in self.processes())

    def _mig(self) -> bool:
        if self._ask("nvmlDeviceIsMigDeviceHandle"):
            return True
        modes = self._ask("nvmlDeviceGetMigMode")
        return modes is not None and bool(modes[0])

    def _ask(self, question: str) -> Any:
        if self._gpu is None:
            return None
        try:
            return getattr(self._api, question)(self._gpu)
        except (self._api.NVMLError, AttributeError):  # not supported, permitted, or known yet
            return None

    def _name(self, pid: int) -> str:
        try:
            # NVML's pids may be of another namespace: /proc would name other processes
            name = self._api.nvmlSystemGetProcessName(pid)
        except self._api.NVMLError:
            return "a process"
        text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        program = os.path.basename(text.split(" ", 1)[0])[:TEXT_MAX_CHARS]
        return plain(program) or "a process"  # any user may run a program, and name it
