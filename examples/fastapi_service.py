"""A web service with two models on a device that holds one, called by 8 clients at once.

    pip install fastapi uvicorn
    python examples/fastapi_service.py            # serves http://127.0.0.1:8000
    curl -X POST 'http://127.0.0.1:8000/summarise?n=3'

Requests for one model share its residency. Once a request waits for the other model, new requests
queue behind it, and the models change places when the last one under way is done.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
from fastapi import FastAPI, HTTPException
from starlette.concurrency import run_in_threadpool

import swapd

MODELS = {
    name: torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(5)])  # 80 MiB
    for name in ("summarise", "translate")
}


@asynccontextmanager
async def connected(app: FastAPI) -> AsyncIterator[None]:
    async with await swapd.connect_async(start=True, budget="128MiB") as client:
        for name, model in MODELS.items():
            await client.register(name, model)
        app.state.client = client
        yield


app = FastAPI(lifespan=connected)


def compute(model: torch.nn.Module, n: float) -> float:
    with torch.inference_mode():
        x = torch.full((1, 2048), n, device=next(model.parameters()).device)
        return float(model(x).sum())


@app.post("/{name}")
async def call(name: str, n: float) -> float:
    if name not in MODELS:
        raise HTTPException(404, f"no model {name!r}; there are {', '.join(MODELS)}")
    try:
        async with app.state.client.acquire(name, timeout=30):
            return await run_in_threadpool(compute, MODELS[name], n)
    except swapd.Timeout as exc:  # says who holds the memory
        raise HTTPException(503, str(exc)) from exc


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=8000)
