"""A pipeline of three stages in one asyncio process; requests overlap, stages take turns.

    python examples/asyncio_pipeline.py

Each stage has 80 MiB and the device 192 MiB, so two of the three fit. An acquire that waits blocks
its own task only: the event loop goes on.
"""

import asyncio

import torch

import swapd

STAGES = ("thinker", "talker", "code2wav")


def build() -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(5)])


def compute(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(x.to(next(model.parameters()).device))  # type: ignore[no-any-return]


async def run(
    client: swapd.AsyncClient,
    name: str,
    model: torch.nn.Module,
    requests: asyncio.Queue[torch.Tensor | None],
    answers: asyncio.Queue[torch.Tensor | None],
) -> None:
    while (x := await requests.get()) is not None:
        async with client.acquire(name):  # other tasks run while this one waits
            answers.put_nowait(await asyncio.to_thread(compute, model, x))
    answers.put_nowait(None)


async def main() -> None:
    async with await swapd.connect_async(start=True, budget="192MiB") as client:
        models = {name: build() for name in STAGES}
        for name, model in models.items():
            await client.register(name, model)
        queues: list[asyncio.Queue[torch.Tensor | None]] = [asyncio.Queue() for _ in range(4)]
        for _ in range(4):
            queues[0].put_nowait(torch.randn(1, 2048))
        queues[0].put_nowait(None)
        async with asyncio.TaskGroup() as tasks:
            for i, name in enumerate(STAGES):
                tasks.create_task(run(client, name, models[name], queues[i], queues[i + 1]))
        done = queues[3].qsize() - 1  # the last is the end
        status = await client.status()
        print(f"{done} requests, {status.evictions} evictions,", end=" ")
        print(status.bytes_out, "bytes copied back")


if __name__ == "__main__":
    asyncio.run(main())
