"""Swapd's worker without some of its features, for comparison."""

import time
from typing import Any

from swapd_client.vllm import cpu, layers


class AllInWorker(cpu.CPUWorker):
    """A turn begins when the last layer is loaded."""

    def _find_segments(self) -> None:
        pass


class HookedWorker(cpu.CPUWorker):
    """A worker whose layers can be made to wait for their weights."""

    def forwards(self, rounds: int) -> list[tuple[float, float]]:
        """CPU seconds for a forward whose layers do not wait, and for one where each does."""
        stage, found = self._swapd, []
        segments = stage.turns.segments
        with stage.using():
            lease: Any = stage.turns._lease
            parts = [one for one in lease.placements if one.name in segments._layers]
            for number in range(rounds):
                taken = {}
                for waits in (False, True) if number % 2 else (True, False):
                    if waits:
                        segments.expect(parts)
                    taken[waits] = self._forward_s()
                    segments.drop()
                found.append((taken[False], taken[True]))
        return found

    def _forward_s(self) -> float:
        began = time.thread_time()  # it computes in this thread alone; others may have the cores
        self._dummy_forward()
        return time.thread_time() - began


class WholeWorker(AllInWorker):
    """A stage leaves as a whole, not by layers."""

    def load_model(self, **options: Any) -> None:
        before = layers.divide
        layers.divide = lambda *_: None
        try:
            super().load_model(**options)
        finally:
            layers.divide = before
