"""A decode loop that acquires and releases at every step, besides its own work.

A step works for a fixed time: the measurement is the time that swapd adds.
"""

import statistics
import time

import msgspec

import swapd_client
from swapd import spawn

STEP_S = 0.005
STEPS = 400
WARM_UP = 20


class Decode(msgspec.Struct, frozen=True):
    """Medians over `steps`. `share`: acquire and release as a share of a step."""

    share: float
    acquire_s: float
    release_s: float
    step_s: float
    steps: int
    #: Uses that the daemon counted, warm-up included: every use is reported in the end.
    uses: int


def measure(device: str = "host", steps: int = STEPS) -> Decode:
    acquires, releases = [], []
    with (
        spawn.daemon(device=device, budget="64MiB") as daemon,
        swapd_client.connect(daemon.folder, label="bench") as client,
    ):
        client.register("talker", {"weights": bytearray(1 << 20)})
        with swapd_client.connect(daemon.folder, label="observer") as observer:
            hits = observer.status().hits
            for _ in range(steps + WARM_UP):
                started = time.perf_counter()
                lease = client.acquire("talker")
                acquired = time.perf_counter()
                while time.perf_counter() - acquired < STEP_S:
                    pass
                stepped = time.perf_counter()
                lease.release()
                releases.append(time.perf_counter() - stepped)
                acquires.append(acquired - started)
            client.status()  # a request reports the uses before it
            uses = observer.status().hits - hits
    acquire_s = statistics.median(acquires[WARM_UP:])
    release_s = statistics.median(releases[WARM_UP:])
    share = (acquire_s + release_s) / STEP_S
    return Decode(share, acquire_s, release_s, STEP_S, steps, uses)
