"""A diffusion stage for measurements, with swapd or with vllm-omni's own `enable_cpu_offload`.

vllm-omni's offloader moves modules to a device, and there is none: so its hooks move them to memory
that stands in for one (`benchmarks/offload/stand_in.py`). Blocks of its DiT take the same time by
the clock, whatever the machine does.
"""

import time
from functools import wraps
from typing import Any

from benchmarks.offload.stand_in import DEVICE, StandIn
from tests.vllm.diffusion import Diffusion

#: Seconds of a block: more than its kernels take.
BLOCK_S = 0.008


class Stage(Diffusion):
    """Its methods return values for JSON."""

    def start(self, *, bandwidth: float | None = None, **given: Any) -> None:
        """Build the stage. `bandwidth`: of the memory that stands in, in bytes a second."""
        _hold_blocks()
        if bandwidth is not None:
            self._device = StandIn(bandwidth)
            _stand_in(self._device)
        super().start(**given)

    def picture(self, seed: int, steps: int) -> tuple[str, float]:
        """A digest of a picture, and the seconds that it took."""
        began = time.perf_counter()
        digest = self.film(seed, steps)
        return digest, time.perf_counter() - began

    def copied(self) -> int:
        """The bytes that went to the memory that stands in, and back."""
        return self._device.bytes_in + self._device.bytes_back


def _hold_blocks() -> None:
    """Have each block of Qwen-Image's DiT take `BLOCK_S`, in this process."""
    from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import (
        QwenImageTransformerBlock,
    )

    forward = QwenImageTransformerBlock.forward

    @wraps(forward)  # Cache-DiT looks at its parameters
    def held(*args: Any, **kwargs: Any) -> Any:
        until = time.perf_counter() + BLOCK_S
        out = forward(*args, **kwargs)
        if (left := until - time.perf_counter()) > 0:
            time.sleep(left)  # as a kernel does, it leaves Python to other threads
        return out

    QwenImageTransformerBlock.forward = held


def _stand_in(device: StandIn) -> None:
    """Have vllm-omni's hooks move modules to this memory, in this process, for good."""
    from vllm_omni.diffusion.offloader import sequential_backend as own
    from vllm_omni.platforms import current_omni_platform

    type(current_omni_platform).supports_cpu_offload = classmethod(lambda cls: True)
    own.SequentialOffloadHook._move_params = staticmethod(
        lambda module, target, **_: device.move(module, target)
    )
    enable = own.ModelLevelOffloadBackend.enable

    def enable_there(backend: Any, pipeline: Any) -> None:
        backend.device = DEVICE
        with device.installed():
            enable(backend, pipeline)

    own.ModelLevelOffloadBackend.enable = enable_there
