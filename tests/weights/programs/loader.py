"""Loads files, and reports how; then acquires once for each line on stdin.

`python loader.py FOLDER NAME FILES STOP_AT`; with STOP_AT "filling" it waits for a line after each
read. It prints a digest, and whether it read the files itself.
"""

import hashlib
import json
import sys

import torch

import swapd_client


def say(what: str) -> None:
    print(what, flush=True)  # noqa: T201


def main(folder: str, name: str, files: str, stop_at: str) -> None:
    torch.set_num_threads(1)
    client = swapd_client.connect(folder, label=name)
    read: list[int] = []

    def progress(done: int, total: int) -> None:
        read.append(done)
        if stop_at == "filling":
            say("filling")
            sys.stdin.readline()

    say("here")
    part = client.load(name, files, progress=progress)
    say("loaded")
    for _ in sys.stdin:
        with client.acquire(name):
            values = b"".join(t.numpy().tobytes() for _, t in sorted(part.tensors.items()))
        say(json.dumps([hashlib.sha256(values).hexdigest(), bool(read)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
