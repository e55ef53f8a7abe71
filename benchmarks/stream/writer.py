"""Writes records as a daemon does: `python -m benchmarks.stream.writer FOLDER RATE SECONDS`.

A process of its own, with a daemon's loop, publisher and file. The first line on stdin starts it,
the second ends the writing, the third closes; it prints its cost.
"""

import asyncio
import resource
import sys
import time
from pathlib import Path

import msgspec
import uvloop

from swapd.core import Rules, actions, events
from swapd.daemon.publisher import Publisher
from swapd.log.records import Start
from swapd.log.swap_log import SwapLog, SwapLogFile
from swapd.shared.protocol import Acquire, Placement

#: Seconds between two batches of records; a daemon makes them as events come.
STEP_S = 0.005


class Took(msgspec.Struct, frozen=True):
    """`late_s`: the longest delay of the loop's own timer."""

    records: int
    wall_s: float
    cpu_s: float
    peak_bytes: int
    late_s: float


async def write(folder: Path, rate: int, seconds: float) -> Took:
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()
    publisher = Publisher(loop, folder / "events.sock", failed.set_exception)
    file = SwapLogFile(folder / "swap-log.jsonl", 64 << 20, 1e9)
    log = SwapLog(file, publisher.publish, loop)
    log.start(Start("", "host", 1, 1, Rules()))
    print("ready", flush=True)  # noqa: T201
    await loop.run_in_executor(None, sys.stdin.readline)
    cpu, began = time.process_time(), time.monotonic()
    late, written = 0.0, 0
    for step in range(int(seconds / STEP_S)):
        due = began + step * STEP_S
        await asyncio.sleep(max(due - time.monotonic(), 0))
        late = max(late, time.monotonic() - due)
        while written < (step + 1) * STEP_S * rate:
            _two(log, time.monotonic(), written)
            written += 2
    log.flush()
    took = time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    wall = time.monotonic() - began
    print("written", flush=True)  # noqa: T201
    ending = loop.run_in_executor(None, sys.stdin.readline)
    while not ending.done():  # few, so that the stopped one catches up
        _two(log, time.monotonic(), written)
        await asyncio.wait((ending,), timeout=STEP_S)
    log.event(events.Stopping(time.monotonic()), 0)
    log.close()
    await loop.run_in_executor(None, sys.stdin.readline)
    publisher.close()
    return Took(written + 2, wall, took, peak, late)


def _two(log: SwapLog, now: float, number: int) -> None:
    """A request and its grant."""
    asked = log.event(events.Asked(now, 1, Acquire(number, ("talker",))), 0)
    placements = (Placement("talker", 1, ((0, 4),)),)
    log.action(actions.Grant(1, number, placements, 0.0, False), asked, now)


if __name__ == "__main__":
    took = uvloop.run(write(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
    print(msgspec.json.encode(took).decode())  # noqa: T201
