"""A process that has much, or asks much. `worker.py FOLDER`, then commands on standard input.

Each is a line: `own N` registers N components of 4 KiB, `big BYTES` one of so many bytes,
`status N` asks as often. Says `ok` after each.
"""

import mmap
import os
import sys

import swapd_client


def main(folder: str) -> None:
    client = swapd_client.connect(folder, label="much")
    print("ok", flush=True)  # noqa: T201
    for number, line in enumerate(sys.stdin):
        command, _, argument = line.strip().partition(" ")
        _run(client, command, int(argument), number)
        print("ok", flush=True)  # noqa: T201


def _run(client: swapd_client.Client, command: str, argument: int, number: int) -> None:
    if command == "own":
        for i in range(argument):
            client.register(f"much-{os.getpid()}-{i}", {"data": bytearray(4096)})
    elif command == "big":
        memory = memoryview(mmap.mmap(-1, argument))
        client.register(f"big-{os.getpid()}-{number}", {"data": memory})
    elif command == "status":
        for _ in range(argument):
            client.status()


if __name__ == "__main__":
    main(sys.argv[1])
