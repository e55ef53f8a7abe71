"""Ray Serve: two deployments of two replicas each share a device that holds two of the four.

docs/guides/ray-serve.md explains it.
    pip install 'ray[serve]'
    python examples/ray_serve.py
"""

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

import torch
from ray import serve
from ray.exceptions import RayActorError

import swapd


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.4})
class Stage:
    def __init__(self, folder: str | None, seed: int, before: Any = None) -> None:
        torch.manual_seed(seed)  # replicas of one deployment have the same weights
        self.model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(5)])  # 80 MiB
        self.before, replica = before, serve.get_replica_context().replica_id
        self.name = f"{replica.deployment_id.name}-{replica.unique_id}"
        self.client = swapd.connect(folder, start=True, budget="192MiB")
        self.client.register(self.name, self.model)

    async def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.before is None else await self.before.remote(x)  # not under a lease
        return await asyncio.to_thread(self.compute, x)

    def compute(self, x: torch.Tensor) -> Any:
        with self.client.acquire(self.name, timeout=30), torch.inference_mode():
            return self.model(x.to(next(self.model.parameters()).device)).cpu()

    def about(self) -> tuple[int, set[str]]:
        return os.getpid(), {c.name for c in self.client.status().components}


def main(folder: str | None = None) -> None:
    """`folder`: of the daemon; None: $SWAPD_ENDPOINT, or that of this user."""
    stage: Any = Stage  # the decorator's result, which its type does not tell
    encoder = stage.options(name="encoder").bind(folder, 1)
    app = serve.run(stage.options(name="decoder").bind(folder, 2, encoder))
    x, alike, now = torch.ones(1, 2048), [], set[str]()
    first, (killed, replicas) = app.remote(x).result(), app.about.remote().result()
    os.kill(killed, signal.SIGKILL)
    while now == replicas or len(now) < len(replicas):  # Serve starts another
        with suppress(RayActorError):  # the request that it had is the caller's to repeat
            alike.append(torch.equal(app.remote(x).result(), first))
            now = app.about.remote().result()[1]
    print(f"{len(now - replicas)} of {len(now)} replicas is new; answers are alike: {all(alike)}")


if __name__ == "__main__":
    main()
