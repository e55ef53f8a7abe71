"""A device that fails on demand: real memory, but the nth call of a verb raises."""

from collections.abc import Mapping
from typing import Any

from swapd.device import DeviceError, HostDevice
from swapd.shared.protocol import Runs


class FailingDevice(HostDevice):
    """`fail_on={"copy_in": 2}`: the second copy in raises DeviceError, all others work."""

    def __init__(
        self,
        budget: int,
        chunk: int,
        bandwidth: float | None = None,
        *,
        fail_on: Mapping[str, int],
    ) -> None:
        super().__init__(budget, chunk, bandwidth)
        self._left = dict(fail_on)

    def copy_in(self, runs: Runs, source: int, nbytes: int, **told: Any) -> None:
        self._count("copy_in")
        super().copy_in(runs, source, nbytes, **told)

    def copy_out(self, runs: Runs, target: int, nbytes: int, **told: Any) -> None:
        self._count("copy_out")
        super().copy_out(runs, target, nbytes, **told)

    def _count(self, verb: str) -> None:
        self._left[verb] = self._left.get(verb, 0) - 1
        if self._left[verb] == 0:
            raise DeviceError(f"injected: {verb}")
