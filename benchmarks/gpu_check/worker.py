"""A worker process: `python -m benchmarks.gpu_check.worker SETTINGS ENDPOINT LABEL`.

Its commands are the methods of `Work`.
"""

import gc
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import swapd_client
from benchmarks.gpu_check import torchish
from benchmarks.gpu_check.commands import Commands
from benchmarks.gpu_check.rig import comes_true, footprint
from benchmarks.gpu_check.settings import Settings
from benchmarks.gpu_check.torchish import Stack
from swapd_client import Client, Component, Lease, SwapdError
from swapd_client.weights.safetensors import SETTLED_NS


class Work(Commands):
    """A client, its models, leases and graphs by name."""

    def __init__(self, settings: Settings, endpoint: Path, label: str) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._label = label
        self._models: dict[str, Stack] = {}
        self._kept: dict[str, list[torch.Tensor]] = {}
        self._leases: dict[str, Lease] = {}
        self._loaded: dict[str, Component] = {}
        self._graphs: dict[str, tuple[Callable[[], None], torch.Tensor]] = {}

    # --- to begin with -------------------------------------------------------------------

    def start(self, **options: Any) -> str:
        """Create a context and a session; `options`: those of `connect`."""
        torchish.start(self._settings)
        self._streams = torchish.StreamWaits(self._settings)
        options = {"label": self._label, "reconnect": 0, **options}
        self.client: Client = swapd_client.connect(self._endpoint, **options)
        return torch.__version__

    def build(self, name: str, nbytes: int, layers: int, seed: int) -> str:
        """Make a model in ordinary memory; return the digest of its output there."""
        model = self._models[name] = Stack(self._settings, nbytes, layers, seed)
        return torchish.digest(model())

    def register(self, name: str, *, segmented: bool = False, **options: Any) -> int:
        """Register its weights; return their bytes."""
        model = self._models[name]
        if segmented:
            options["segments"] = model.segments()
        torchish.register(self.client, self._settings, name, model, **options)
        return model.nbytes

    def keep(self, name: str) -> None:
        """Remember the current weights, in private memory, under a lease."""
        with self.client.acquire(name):
            self._kept[name] = [p.detach().clone() for p in self._models[name].parameters()]
            torchish.synchronize(self._settings)

    # --- turns ---------------------------------------------------------------------------

    def turn(self, name: str) -> dict[str, Any]:
        """Acquire, compute, release."""
        with self.client.acquire(name) as lease:
            out = self._run(name)
        self._give_back_kept()
        return {"digest": out, "loaded": lease.loaded, **self._where(name)}

    def hold(self, name: str) -> dict[str, Any]:
        """Acquire and keep the lease."""
        self._leases[name] = self.client.acquire(name)
        return self._where(name)

    def drop(self, name: str) -> None:
        self._leases.pop(name).release()

    def compute(self, name: str) -> str:
        """Compute under a held lease."""
        return self._run(name)

    def _run(self, name: str) -> str:
        return torchish.digest(self._models[name]())

    def _where(self, name: str) -> dict[str, Any]:
        """Addresses, and the chunks behind them as far as a lease tells."""
        lease = self._leases.get(name)
        runs = [p.runs for p in lease._granted.placements] if lease else []
        return {"addresses": self._models[name].addresses(), "runs": runs}

    def work(self, name: str, expected: str) -> dict[str, int]:
        """Compute under one lease until there is another command; count wrong results."""
        steps = wrong = 0
        with self.client.acquire(name):
            self.say({"event": "working"})
            # the next command comes after this event, so none is buffered
            asked = False
            while not asked:  # the last step begins after the command, so there is one
                asked = bool(select.select([sys.stdin], [], [], 0)[0])
                wrong += self._run(name) != expected
                steps += 1
        return {"steps": steps, "wrong": wrong}

    def cycle(self, names: list[str], times: int) -> None:
        for _ in range(times):
            for name in names:
                self.client.acquire(name).release()

    # --- graphs --------------------------------------------------------------------------

    def capture(self, name: str) -> str:
        """Capture the model's work under a lease; return the digest of one replay."""
        model = self._models[name]
        with self.client.acquire(name):
            out = model()
            torchish.synchronize(self._settings)
            replay = torchish.graph_of(self._settings, lambda: out.copy_(model()))
            self._graphs[name] = replay, out
            return self._replay(name)

    def replay(self, name: str) -> dict[str, Any]:
        """Replay under a new lease."""
        self._leases[name] = self.client.acquire(name)
        try:
            return {"digest": self._replay(name), **self._where(name)}
        finally:
            self._leases.pop(name).release()
            self._give_back_kept()

    def _give_back_kept(self) -> None:
        """Then the component may be evicted at once: any other request gives back what is kept."""
        self.client.status()

    def replay_held(self, name: str) -> str:
        """Replay under the lease that is held, or was when the daemon died."""
        return self._replay(name)

    def _replay(self, name: str) -> str:
        replay, out = self._graphs[name]
        out.zero_()
        replay()
        torchish.synchronize(self._settings)
        return torchish.digest(out)

    # --- mutable components --------------------------------------------------------------

    def add(self, name: str, what: float) -> None:
        """Change every weight under a lease, and remember the expected value."""
        with self.client.acquire(name):
            for weight, kept in zip(self._models[name].parameters(), self._kept[name], strict=True):
                weight.add_(what)
                kept.add_(what)
            torchish.synchronize(self._settings)

    def write_on(self, name: str) -> None:
        """Write to every weight under a lease, without end, and report the beginning.

        On a GPU there is always work for a second or so in its queue.
        """
        with self.client.acquire(name):
            self.say({"event": "writing"})
            while True:
                for weight in self._models[name].parameters():
                    weight.fill_(-1.0)

    def is_as_kept(self, name: str) -> bool:
        with self.client.acquire(name):
            same = torchish.same_bits(list(self._models[name].parameters()), self._kept[name])
        return same

    # --- segments ------------------------------------------------------------------------

    def early(self, name: str, *, on_host: bool = False) -> dict[str, Any]:
        """Acquire early, and compute each layer when its segment has arrived."""
        model = self._models[name]
        with self.client.acquire(name, early=True) as lease:
            y = model.x
            for number in range(len(model.layers)):
                if on_host:
                    lease.wait(number)
                else:
                    self._streams.wait(lease, number)
                y = model.step(number, y)
            return {"digest": torchish.digest(y), "loaded": lease.loaded}

    def early_then_kill(self, name: str, daemon: int) -> dict[str, Any]:
        """Make the stream wait for all segments, kill the daemon, and return the outcome."""
        model = self._models[name]
        lease = self.client.acquire(name, early=True)
        os.kill(daemon, signal.SIGKILL)
        errors = []
        for step in (
            partial(self._streams.wait, lease),
            partial(torchish.synchronize, self._settings),
            lease.wait,
        ):
            errors += self._error_of(step)
        arrived = not errors and torchish.digest(model())
        errors += self._error_of(lease.release)
        return {"arrived": arrived, "errors": errors}

    def _error_of(self, what: Callable[[], object]) -> list[str]:
        try:
            what()
        except (SwapdError, RuntimeError) as exc:
            return [f"{type(exc).__name__}: {str(exc).splitlines()[0]}"]
        return []

    # --- files ---------------------------------------------------------------------------

    def write_file(self, path: str, nbytes: int) -> str:
        """Make a file of weights, old enough to be trusted; return the digest of their bytes."""
        weights = torch.arange(nbytes // 8)
        safetensors.torch.save_file({"x": weights}, path)
        written = os.stat(path).st_ctime_ns
        comes_true(lambda: time.time_ns() - written > SETTLED_NS)
        return torchish.digest(weights)

    def load(self, name: str, path: str) -> dict[str, Any]:
        """Load it: whether the file was read, the seconds, and the digest of its bytes then."""
        told: list[int] = []
        began = time.perf_counter()
        self._loaded[name] = torchish.load(
            self.client, self._settings, name, path, progress=lambda done, _: told.append(done)
        )
        took = time.perf_counter() - began
        return {"read": bool(told), "seconds": took, "digest": self.loaded(name)}

    def loaded(self, name: str) -> str:
        """The digest of its bytes, under a lease."""
        part = self._loaded[name]
        with self.client.acquire(name):
            return torchish.digest(torchish.bytes_at(part.address, part.nbytes, self._settings))

    # --- memory --------------------------------------------------------------------------

    def borrow(self, nbytes: int) -> dict[str, Any]:
        """Take a workspace, use it with torch's own allocator, and give it back."""
        free = self.client.status().device_free_bytes
        with self.client.acquire_workspace(nbytes):
            comes_true(lambda: self.client.status().device_free_bytes >= free + nbytes)
            granted = self.client.status().device_free_bytes
            where = torchish.device_of(self._settings)
            own = torch.full((nbytes * 7 // 8,), 7, dtype=torch.uint8, device=where)
            right = own.min().item() == own.max().item() == 7  # takes no more memory
            taken = self.client.status().device_free_bytes
            del own
            gc.collect()
            if not self._settings.stub:
                torch.cuda.empty_cache()
        return {"free": free, "granted": granted, "taken": taken, "right": right}

    def footprint(self) -> dict[str, int]:
        return footprint(os.getpid())

    # --- what must not be done -----------------------------------------------------------

    def stray(self, name: str, access: str) -> str:
        """Access a component without a lease; return the outcome, if this process survives."""
        weight = next(iter(self._models[name].parameters()))
        try:
            if access == "write":
                weight.add_(1)
            found = float(weight.float().sum())
            torchish.synchronize(self._settings)
        except RuntimeError as exc:
            return f"fault: {str(exc).splitlines()[0]}"
        return f"no fault: {found}"

    # --- the end -------------------------------------------------------------------------

    def acquire_fails(self, name: str) -> str:
        """The error that ends an acquire."""
        try:
            self.client.acquire(name, timeout=20).release()
        except SwapdError as exc:
            return type(exc).__name__
        return ""

    def close(self) -> list[str]:
        """Close the client; return each model's output from private memory afterwards."""
        self._leases.clear()
        self.client.close()
        return [self._run(name) for name in self._models]

    def addresses(self, name: str) -> list[int]:
        return self._models[name].addresses()


if __name__ == "__main__":
    Work(Settings.decode(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]).serve()
