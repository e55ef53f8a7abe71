"""Swap-in of an absent component, an idle one of the same size evicted, call to grant.

The plain copy comes after the swap, not before: for some milliseconds after an operation
torch's threads spin on every core, and whatever is measured then is measured beside them.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

import swapd_client
from swapd import spawn

NBYTES = 256 << 20
ROUNDS = 51
WARM_UP = 3


class SwapIn(msgspec.Struct, frozen=True):
    """Seconds are medians of `rounds`; `first_touch_s` is the first full read after a grant."""

    ratio: float
    nbytes: int
    rounds: int
    swap_s: float
    copy_s: float
    first_touch_s: float
    later_touch_s: float
    copy_threads: int
    bytes_in: int
    bytes_back: int


def measure() -> SwapIn:
    """Two workers take turns; each swap is followed by a plain copy of as many bytes."""
    import torch

    source = torch.ones(NBYTES, dtype=torch.uint8)
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    swaps, copies, first, later = [], [], [], []
    with (
        spawn.daemon(budget=NBYTES + (32 << 20)) as daemon,
        _Rival(str(daemon.folder)) as rival,
        swapd_client.connect(daemon.folder, label="bench") as client,
    ):
        weights = torch.full((NBYTES // 8,), 3, dtype=torch.int64)
        client.register("mine", {"weights": weights})
        for _ in range(ROUNDS + WARM_UP):
            rival.take_turn()
            started = time.perf_counter()
            with client.acquire("mine") as lease:
                swaps.append(time.perf_counter() - started)
                assert lease.loaded
                first.append(_seconds(weights.sum))
                later.append(_seconds(weights.sum))
            copies.append(_seconds(lambda: target.copy_(source)))
        status = client.status()
    swap_s, copy_s = _median(swaps), _median(copies)
    return SwapIn(
        ratio=copy_s / swap_s,
        nbytes=NBYTES,
        rounds=ROUNDS,
        swap_s=swap_s,
        copy_s=copy_s,
        first_touch_s=_median(first),
        later_touch_s=_median(later),
        copy_threads=torch.get_num_threads(),
        bytes_in=status.bytes_in,
        bytes_back=status.bytes_out,
    )


class _Rival:
    """Another process with a component of the same size, which evicts ours at each turn."""

    def __init__(self, endpoint: str) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawned.Pipe()
        self._process = spawned.Process(target=_rival_main, args=(theirs, endpoint))

    def __enter__(self) -> "_Rival":
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()

    def take_turn(self) -> None:
        self._pipe.send_bytes(b"go")
        self._pipe.recv_bytes()


def _rival_main(pipe: Connection, endpoint: str) -> None:
    with swapd_client.connect(endpoint, label="rival") as client:
        client.register("theirs", {"weights": bytearray(NBYTES)})
        while True:
            try:
                pipe.recv_bytes()
            except EOFError:
                return
            with client.acquire("theirs"):
                pass
            pipe.send_bytes(b"done")


def _seconds(what: Callable[[], object]) -> float:
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


def _median(values: list[float]) -> float:
    return statistics.median(values[WARM_UP:])
