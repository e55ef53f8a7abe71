"""The process of one stage: `python -m benchmarks.gpu_check.stage SETTINGS ENDPOINT LABEL`.

The label is the stage's name. Its commands are the methods of `Stage`.
"""

import gc
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import swapd_client
from benchmarks.gpu_check import omni, torchish
from benchmarks.gpu_check.commands import Commands
from benchmarks.gpu_check.settings import Settings
from swapd_client import Client


class Stage(Commands):
    """One stage's model: resident, in swapd, or on the host between its turns."""

    def __init__(self, settings: Settings, endpoint: Path, label: str) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._name = label
        self._client: Client | None = None
        self._moved: torchish.Moved | None = None

    def start(self) -> None:
        """Create a context."""
        torchish.start(self._settings)

    def build(self, nbytes: int) -> int:
        """Make the model on the device; return the bytes of its weights. `nbytes`: of all three
        stages.
        """
        self._make(nbytes)
        if self._settings.stub:
            self._home().come()
        return self._nbytes()

    def build_aside(self, nbytes: int) -> None:
        """Make it, and keep it on the host until its turn."""
        self._make(nbytes)
        self._moved = self._home()
        if not self._settings.on_cpu:  # there it is made on the host
            self._moved.leave()

    def lend(self, nbytes: int, room: int) -> None:
        """Make it in a workspace of `room` bytes, and register it."""
        client = self._client = swapd_client.connect(self._endpoint, label=self._name)
        with client.acquire_workspace(room):
            self._make(nbytes)
            torchish.register(client, self._settings, self._name, self._model)
            gc.collect()

    def turn(self, tokens: list[int]) -> dict[str, Any]:
        """Its output for the tokens, the device's free memory meanwhile, and whether weights were
        loaded.
        """
        if self._moved is not None:
            self._moved.come()
        with self._client.acquire(self._name) if self._client else nullcontext() as lease:
            made = omni.run(self._name, self._model, self._size, tokens)
            free = torchish.free_bytes(self._settings)
        if self._moved is not None:
            self._moved.leave()
        came = self._moved is not None or bool(lease and lease.loaded)
        return {**made._asdict(), "free": free, "came": came}

    def weights(self) -> list[list[int]]:
        """Sums of their bits: of each parameter, one for each piece of some MiB."""
        with self._client.acquire(self._name) if self._client else nullcontext():
            return [torchish.sums(weight) for weight in self._model.parameters()]

    def _make(self, nbytes: int) -> None:
        self._size = omni.size_for(nbytes)
        where = torchish.device_of(self._settings)
        self._model = omni.make(self._name, self._size, where)

    def _home(self) -> torchish.Moved:
        return torchish.Moved(self._settings, self._model)

    def _nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._model.parameters())


if __name__ == "__main__":
    Stage(Settings.decode(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]).serve()
