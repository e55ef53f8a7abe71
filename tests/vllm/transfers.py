"""vLLM's weight transfer by CUDA IPC, from files to a CPU. Importing this puts it there.

CUDA IPC hands over tensors of a trainer's GPU; here they are read from a checkpoint. What vLLM does
with them, before and afterwards is its own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine


@dataclass
class Tensors(WeightTransferUpdateInfo):  # type: ignore[misc]
    """These tensors of a checkpoint."""

    folder: str
    names: list[str]


class FileTransfer(IPCWeightTransferEngine):  # type: ignore[misc]
    """Its end fails if not all tensors of the checkpoint have come."""

    update_info_cls = Tensors

    def start_weight_update(self) -> None:
        self._came: set[str] = set()
        super().start_weight_update()

    def receive_weights(self, update_info: Any) -> None:
        with safe_open(Path(update_info.folder, "model.safetensors"), "pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in update_info.names)
            self._came.update(update_info.names)
            self._all = set(file.keys())

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        if lacking := self._all - self._came:
            raise ValueError(f"{len(lacking)} tensors have not come")


WeightTransferEngineFactory._registry["ipc"] = lambda: FileTransfer
