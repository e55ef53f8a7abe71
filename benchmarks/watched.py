"""Cost of watching a daemon: `python -m benchmarks.watched [--blocks N] [--out FILE]`.

Acquires and releases two resident components in turn, so that each use is a request, at three
daemons in turn in one run. One records nothing at all, one has its swap log, and one has swap log,
page and metrics, with an open page and one read of `/metrics` a second. Then it measures a scrape
of 200 components, in time and in CPU time, which a busy machine changes less; and the longest time
for which the daemon's loop works on a status.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

import swapd_client
from swapd import spawn
from swapd.core import Residency, events, status
from swapd.core.records import Rules
from swapd.shared import protocol

NAMES = ("small", "other")
#: Acquires and releases of a block, and blocks before those that count.
CALLS = 100
WARM_UP = 20
#: Components of a scrape; and seconds for which a status is reused.
COMPONENTS = 200
FRESH_S = 0.6

#: A `swapd serve` that records nothing.
SILENT = """\
from swapd.log import swap_log
swap_log.SwapLog.event = lambda self, event, cause: 0
swap_log.SwapLog.action = lambda self, action, cause, now: 0
from swapd.cli import main
main()
"""

#: Asks as an open page does, and for `/metrics` once a second.
WATCHER = """\
import sys, threading, time, urllib.request
url = sys.argv[1]
def page():
    while True:
        urllib.request.urlopen(url + "status").read()
        urllib.request.urlopen(url + "records").read()
        time.sleep(0.5)
threading.Thread(target=page, daemon=True).start()
print("ready", flush=True)
while True:
    urllib.request.urlopen(url + "metrics").read()
    time.sleep(1)
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watched", description=__doc__)
    parser.add_argument("--blocks", type=int, default=200, help="of 100 calls, each side (200)")
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    given = parser.parse_args()
    taken = measure(given.blocks)
    medians = {side: statistics.median(times) for side, times in taken.items()}
    for side, median in medians.items():
        ratio = median / medians["nothing"]
        sys.stdout.write(f"{side:22} {median * 1e6:7.1f} us   {ratio:.3f}\n")
    (scraped, computed), steps = scrapes(), loop_steps()
    for what, times in (
        ("scrape of 200 components", scraped),
        ("CPU time of it, both sides", computed),
        ("one step of the loop for it", steps),
    ):
        middle, most = statistics.median(times) * 1e3, max(times) * 1e3
        sys.stdout.write(f"{what:28} {middle:7.2f} ms   at most {most:.2f}\n")
    if given.out:
        everything = {**taken, "scrape": scraped, "loop step": steps}
        given.out.write_text(json.dumps(everything, indent=2), encoding="utf-8")
    return 0


def measure(blocks: int) -> dict[str, list[float]]:
    """Seconds of an acquire and release, a figure for each block."""
    taken: dict[str, list[float]] = {"nothing": [], "swap log": [], "log, page, metrics": []}
    with ExitStack() as stack:
        endings = (
            spawn.daemon(("-c", SILENT, "serve"), budget="64MiB"),
            spawn.daemon(budget="64MiB"),
            _watched(),
        )
        clients = [
            stack.enter_context(swapd_client.connect(stack.enter_context(each).folder))
            for each in endings
        ]
        for client in clients:
            for name in NAMES:
                client.register(name, {"weights": name.encode().ljust(1 << 20)})
        for at in range(blocks + WARM_UP):
            sides = list(zip(taken.values(), clients, strict=True))
            for times, client in (*sides[at % 3 :], *sides[: at % 3]):  # rotates the first
                one = _block(client)
                if at >= WARM_UP:
                    times.append(one)
    return taken


def scrapes(rounds: int = 20) -> tuple[list[float], list[float]]:
    """Seconds of each scrape of so many components; none reuses a status.

    And seconds of CPU time, of the daemon and its page together.
    """
    address, taken, computed = _address(), [], []
    with (
        spawn.daemon(budget="64MiB", http=address) as daemon,
        swapd_client.connect(daemon.folder) as client,
    ):
        for at in range(COMPONENTS):
            client.register(f"component-{at}", {"weights": bytearray(4096)})
        _get(f"http://{address}/metrics")  # it has begun, and has all its imports
        both = (daemon.pid, *_children(daemon.pid))
        for _ in range(rounds):
            time.sleep(FRESH_S)
            before, started = sum(map(_cpu_s, both)), time.perf_counter()
            _get(f"http://{address}/metrics")
            taken.append(time.perf_counter() - started)
            computed.append(sum(map(_cpu_s, both)) - before)
    return taken, computed


def loop_steps(rounds: int = 200) -> list[float]:
    """Seconds that the daemon's loop works at a time to answer a status of so many components."""
    core = Residency(1024, 1 << 20, Rules())
    core.handle(events.SessionOpened(0.0, 1, "bench"))
    for at in range(COMPONENTS):
        name = f"component-{at}"
        core.handle(events.SessionRequest(0.0, 1, protocol.Register(2 * at, name, 1 << 20)))
        core.handle(events.HostCopyMade(0.0, at + 1))
    ledger, taken = core.ledger, []
    for _ in range(rounds):
        started = time.perf_counter()
        listed = [status.component_status(ledger, c, 1.0) for c in ledger.components.values()]
        taken.append(time.perf_counter() - started)
        started = time.perf_counter()
        msgspec.msgpack.encode(listed)
        taken.append(time.perf_counter() - started)
    return taken


def _get(url: str) -> None:
    with urllib.request.urlopen(url) as answer:
        answer.read()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _cpu_s(pid: int) -> float:
    """CPU time of a process so far, all threads: in ns, because `/proc/PID/stat` counts in 10
    ms."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@contextmanager
def _watched() -> Iterator[spawn.Spawned]:
    address = _address()
    with (
        spawn.daemon(budget="64MiB", http=address) as daemon,
        subprocess.Popen(
            [sys.executable, "-c", WATCHER, f"http://{address}/"], stdout=subprocess.PIPE
        ) as watcher,
    ):
        assert watcher.stdout is not None
        watcher.stdout.readline()
        try:
            yield daemon
        finally:
            watcher.kill()


def _block(client: swapd_client.Client) -> float:
    started = time.perf_counter()
    for _ in range(CALLS // len(NAMES)):
        for name in NAMES:
            client.acquire(name).release()
    return (time.perf_counter() - started) / CALLS


if __name__ == "__main__":
    sys.exit(main())
