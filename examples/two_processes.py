"""Two stages in two processes share a device that holds only one of them.

    python examples/two_processes.py

The encoder and the decoder have 160 MiB of weights each, and the device has 256 MiB. Each process
registers its own stage; swapd moves the stages in and out as they are acquired.
"""

import multiprocessing
from multiprocessing.connection import Connection

import torch

import swapd

REQUESTS = 5


def stage(name: str, requests: Connection, answers: Connection) -> None:
    model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(10)])
    client = swapd.connect(start=True, budget="256MiB")  # starts a daemon if none is there
    with client, torch.inference_mode():
        client.register(name, model)
        addresses = [p.data_ptr() for p in model.parameters()]
        device = next(model.parameters()).device  # the daemon's
        for _ in range(REQUESTS):
            x = torch.tensor(requests.recv(), device=device)
            with client.acquire(name):  # on the device until the block ends
                y = model(x)
            answers.send(y.tolist())
        assert [p.data_ptr() for p in model.parameters()] == addresses, "tensors never move"
        status = client.status()
        said = f"{status.evictions} evictions, {status.bytes_out} bytes copied back"
        print(f"{name}: {said}", flush=True)
        requests.recv()  # until all is answered


def main() -> None:
    start = multiprocessing.get_context("spawn")
    x_in, x_out = start.Pipe(duplex=False)
    y_in, y_out = start.Pipe(duplex=False)
    z_in, z_out = start.Pipe(duplex=False)
    stages = [
        start.Process(target=stage, args=("encoder", x_in, y_out)),
        start.Process(target=stage, args=("decoder", y_in, z_out)),
    ]
    for process in stages:
        process.start()
    for _ in range(REQUESTS):
        x_out.send(torch.randn(2048).tolist())
        print("answer of", len(z_in.recv()), "numbers", flush=True)
    for pipe in (x_out, y_out):
        pipe.send(None)
    for process in stages:
        process.join()


if __name__ == "__main__":
    main()
