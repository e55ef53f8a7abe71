"""One rank of a stage, as a process: `python rank.py ORDERS`, where ORDERS is JSON.

It registers its component with its daemon, meets the other rank through stdin and stdout, and makes
steps: its turn, a lease, a collective, a check of all bytes. It reports on stdout, one JSON object
a line. With `stop`, it waits for a line on stdin after each lease; with `together`, also before
the first step.
"""

import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swapd_client import Lease, SwapdError, connect
from swapd_client.vllm import ranks


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201


def share(mine: str) -> Sequence[str]:
    say(seat=mine)
    return list(json.loads(sys.stdin.readline()))


class Rank:
    def __init__(self, orders: dict[str, Any]) -> None:
        self._orders = orders
        self._name = f"{orders['stage']}.tp{orders['rank']}"
        self._bytes = bytearray(f"{self._name}.".encode() * orders["nbytes"])[: orders["nbytes"]]
        self._peer = socket.socket(fileno=orders["peer"])
        if orders["backwards"]:
            right = ranks.in_order
            ranks.in_order = lambda seats, stage: right(seats, stage)[::-1]
        folder = Path(orders["folder"])
        self._ranks = ranks.Ranks(orders["rank"], folder, share, stage=orders["stage"])
        self._client = connect(folder, label=self._name)
        self._client.session.told.when_wanted(self._ranks.wake)
        self._part = self._client.register(self._name, {"weight": bytearray(self._bytes)})
        self._lease: Lease | None = None
        self._since = 0
        #: Start and end of each lease, in ns of the machine's clock.
        self._had: list[tuple[int, int]] = []

    def run(self) -> None:
        if self._orders["together"]:
            say(ready=self._name)
            sys.stdin.readline()
        for step in range(self._orders["steps"]):
            with self._ranks.acquiring(self._wanted, self._give_back):
                if self._lease is None:
                    self._take()
                if self._orders["stop"]:
                    say(got=step)
                    sys.stdin.readline()
            self._collective(step)
            # the view is on the right: as the left operand it would compare byte by byte
            assert self._bytes == self._part.view("weight")
            self._collective(step)
            if self._wanted():
                self._give_back()
        self._give_back()
        self._client.close()
        self._ranks.close()
        say(had=self._had)

    def _wanted(self) -> bool:
        return self._lease is not None and self._lease.wanted

    def _take(self) -> None:
        self._ranks.waits()
        self._lease = self._client.acquire(self._name, timeout=self._orders["timeout"])
        self._since = time.monotonic_ns()

    def _give_back(self) -> None:
        if self._lease is not None:
            self._had.append((self._since, time.monotonic_ns()))
            self._lease.release()
            self._lease = None

    def _collective(self, step: int) -> None:
        """Wait for the other rank to come here too."""
        self._peer.send(str(step).encode())
        if self._peer.recv(100) != str(step).encode():
            raise ConnectionResetError("the other rank ended in a collective")


if __name__ == "__main__":
    try:
        Rank(json.loads(sys.argv[1])).run()
    except (SwapdError, OSError) as problem:
        say(error=type(problem).__name__, message=str(problem))
        sys.exit(1)
