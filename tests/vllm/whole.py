"""Swapd's worker with stages that leave as a whole, not by layers: to be compared with."""

from typing import Any

from swapd_client.vllm import cpu, layers


class WholeWorker(cpu.CPUWorker):
    def load_model(self, **options: Any) -> None:
        before = layers.divide
        layers.divide = lambda *_: None
        try:
            super().load_model(**options)
        finally:
            layers.divide = before
