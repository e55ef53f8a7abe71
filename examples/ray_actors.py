"""Ray actors that share a device which holds one of them.

    pip install 'ray[default]'
    python examples/ray_actors.py

Each actor is a process of its own. With `@ray.remote(num_gpus=0.5)` two of them share a GPU: see
deploy/ray for the folder that tells the daemons of several GPUs apart.
"""

from typing import Any

import ray
import torch

import swapd


@ray.remote
class Stage:
    def __init__(self, name: str, folder: str | None) -> None:
        self.name = name
        self.model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(5)])  # 80 MiB
        self.client = swapd.connect(folder, start=True, budget="96MiB", label=name)
        self.client.register(name, self.model)

    def run(self, x: list[float]) -> list[float]:
        with torch.inference_mode(), self.client.acquire(self.name):
            there = torch.tensor(x, device=next(self.model.parameters()).device)
            y: list[float] = self.model(there).tolist()
            return y

    def evictions(self) -> int:
        return self.client.status().evictions

    def close(self) -> None:
        self.client.close()


def main(folder: str | None = None) -> None:
    """`folder`: of the daemon; None: $SWAPD_ENDPOINT, or that of this user."""
    actor: Any = Stage  # the decorator's result, which its type does not tell
    stages = [actor.remote(name, folder) for name in ("encoder", "decoder")]
    for _ in range(4):
        x = torch.randn(2048).tolist()
        for stage in stages:
            x = ray.get(stage.run.remote(x))
        print("answer of", len(x), "numbers")
    print(ray.get(stages[0].evictions.remote()), "evictions")
    ray.get([stage.close.remote() for stage in stages])


if __name__ == "__main__":
    ray.init()
    main()
    ray.shutdown()
