"""Takes as many connections as it can from a daemon, and holds them until its stdin ends.

`python greedy.py connections PATH KIND COUNT` connects without a message; `python greedy.py
sessions PATH COUNT` says hello. Both print the number of connections.
"""

import socket
import sys

from swapd.shared import protocol


def connections(path: str, kind: str, count: str) -> None:
    held = []
    for _ in range(int(count)):
        sock = socket.socket(socket.AF_UNIX, int(kind))
        sock.connect(path)
        held.append(sock)
    hold(held)


def sessions(path: str, count: str) -> None:
    held = []
    for _ in range(int(count)):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(path)
        sock.send(protocol.encode(protocol.Hello(protocol.VERSION)))
        held.append((sock, sock.recv(1 << 16)))
    hold(held)


def hold(held: list[socket.socket] | list[tuple[socket.socket, bytes]]) -> None:
    print(len(held), flush=True)  # noqa: T201
    sys.stdin.read()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
