"""How long a worker's thread may take to answer: `python -m benchmarks.answering`.

A worker unmaps memory in a thread that needs the GIL, so it answers late while other threads keep
the GIL. Each line of the table is one activity of workers. It runs in a process of its own with a
thread that answers as the lifeline's does. The line has the time of the slowest answer, alone on
the machine and beside BUSY computing processes. This table sets the default of `ack_timeout`.
"""

import gc
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec

#: Number of computing processes beside it.
BUSY = 8
#: Time between two questions, in seconds.
EVERY_S = 0.02
LIMIT_S = 600.0


def import_torch() -> None:
    import torch
    import torch._dynamo  # noqa: F401


def compile_a_model() -> None:
    import torch

    layers = [torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256)] * 6
    compiled = torch.compile(torch.nn.Sequential(*layers))
    with torch.inference_mode():
        compiled(torch.randn(8, 256))


def from_pretrained() -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=12, n_embd=768, n_head=12)
    with tempfile.TemporaryDirectory() as folder:
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def collect_ten_million_objects() -> None:
    heap = [[i] for i in range(10_000_000)]
    gc.collect()
    del heap


def end_with_ten_million_objects() -> None:
    """One statement frees them one after the other."""
    heap = {i: [i] for i in range(10_000_000)}
    heap.clear()


DONE: dict[str, Callable[[], None]] = {
    "import torch, torch._dynamo": import_torch,
    "torch.compile, 18 layers": compile_a_model,
    "transformers, from_pretrained, 0.5 GB": from_pretrained,
    "gc.collect(), 10^7 objects": collect_ten_million_objects,
    "10^7 objects freed at once": end_with_ten_million_objects,
}


def answer(sock: socket.socket) -> None:
    while question := sock.recv(64):
        sock.send(question)


def work(name: str, fd: int) -> None:
    """Run it in this process, and answer meanwhile."""
    sock = socket.socket(fileno=fd)
    threading.Thread(target=answer, args=(sock,), daemon=True).start()
    DONE[name]()
    os._exit(0)


def slowest(name: str) -> tuple[float, float]:
    """Seconds of the slowest answer, and of the whole activity."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(LIMIT_S)
    command = [sys.executable, "-m", "benchmarks.answering", name, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as worker:
        theirs.close()
        longest = 0.0
        ours.send(b"?")
        ours.recv(64)  # it has begun
        began = time.monotonic()
        while True:
            asked = time.monotonic()
            try:
                ours.send(b"?")
                if not ours.recv(64):
                    break
            except (BrokenPipeError, ConnectionResetError):
                break
            longest = max(longest, time.monotonic() - asked)
            time.sleep(EVERY_S)
        took = time.monotonic() - began
        if worker.wait():
            raise SystemExit(f"{name} failed")
    return longest, took


def spin() -> None:
    while True:
        pass


def measure(busy: int) -> dict[str, tuple[float, float]]:
    with ExitStack() as stack:
        for _ in range(busy):
            process = multiprocessing.Process(target=spin, daemon=True)
            process.start()
            stack.callback(process.kill)
        names = [n for n in DONE if "transformers" not in n or find_spec("transformers")]
        return {name: slowest(name) for name in names}


def main() -> None:
    alone, beside = measure(0), measure(BUSY)
    print("| what the worker does | slowest answer, alone | beside 8 busy processes |")  # noqa: T201
    print("| --- | --- | --- |")  # noqa: T201
    for name, (longest, took) in alone.items():
        late, all_of_it = beside[name]
        print(  # noqa: T201
            f"| {name} | {longest:.2f} s of {took:.1f} | {late:.2f} s of {all_of_it:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        work(sys.argv[1], int(sys.argv[2]))
    main()
