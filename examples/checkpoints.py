"""Three checkpoints on a device that holds one, used in random order.

    python examples/checkpoints.py

`client.load` reads safetensors straight into swapd: one host copy, and no private one beside it.
A checkpoint that is on the device already is used at once.
"""

import random
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import swapd

NAMES = ("base", "code", "math")


def build() -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(5)])  # 80 MiB


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        swapd.connect(start=True, budget="96MiB") as client,
        torch.inference_mode(),
    ):
        models = {}
        for name in NAMES:
            checkpoint = Path(folder, f"{name}.safetensors")
            save_file(build().state_dict(), checkpoint)
            with torch.device("meta"):
                models[name] = build()
            client.load(name, checkpoint, models[name], progress=False)
        device = next(models["base"].parameters()).device  # the daemon's
        for name in random.choices(NAMES, k=10):
            before = time.perf_counter()
            with client.acquire(name):
                waited = time.perf_counter() - before
                y = models[name](torch.ones(1, 2048, device=device))
            print(f"{name}: came in within {waited * 1e3:.1f} ms, answered {float(y.sum()):+.3f}")
        status = client.status()
        print(f"{status.loads} loads of 10 acquires, {status.bytes_out} bytes copied back")


if __name__ == "__main__":
    main()
