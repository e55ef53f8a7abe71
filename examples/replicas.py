"""Replicas of one model in several processes share one host copy, and one copy on the device.

    python examples/replicas.py

Three processes load the same checkpoint of 80 MiB. Each compares the bytes with its file, and the
daemon keeps them once. All three compute at once on a device that has room for one.
"""

import multiprocessing
import tempfile
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from safetensors.torch import save_file

import swapd

REPLICAS = 3


def build() -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(5)])


def replica(number: int, checkpoint: str, together: Barrier) -> None:
    with torch.device("meta"):  # no memory: `load` puts the weights there
        model = build()
    with swapd.connect(start=True, budget="96MiB") as client, torch.inference_mode():
        client.load(f"model-{number}", checkpoint, model, progress=False)
        with client.acquire(f"model-{number}", timeout=30):
            y = model(torch.ones(1, 2048, device=next(model.parameters()).device))
            together.wait()
            if number == 0:
                s = client.status()
                host, device = s.host_copy_bytes >> 20, s.used_bytes >> 20
                print(f"{REPLICAS} share {host} MiB of memory, {device} of the device", flush=True)
            together.wait()
        print(f"replica {number} answers {float(y.sum()):.4f}\n", end="", flush=True)  # one write
        together.wait()


def main() -> None:
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "model.safetensors")
        save_file(build().state_dict(), checkpoint)
        together = start.Barrier(REPLICAS)
        told = [(number, str(checkpoint), together) for number in range(REPLICAS)]
        replicas = [start.Process(target=replica, args=args) for args in told]
        for process in replicas:
            process.start()
        for process in replicas:
            process.join()


if __name__ == "__main__":
    main()
