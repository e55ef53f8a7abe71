"""A server that `swapd run --compare` measures: it answers on a unix socket until SIGTERM.

It takes the arguments of `vllm serve MODEL --uds PATH`. With swapd it loads a component first.
"""

import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

import swapd_client
from swapd.shared import config


def main(path: str) -> None:
    signal.signal(signal.SIGTERM, end)
    if config.endpoint_from_environment():
        with swapd_client.connect(label="worker") as client:
            client.register("model", {"w": bytearray(4 << 20)})
            with client.acquire("model"):
                pass
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("listens", flush=True)  # noqa: T201
        while True:
            connection = listener.accept()[0]
            with connection, suppress(OSError):
                connection.recv(1024)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nfine\n")


def end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[sys.argv.index("--uds") + 1])
