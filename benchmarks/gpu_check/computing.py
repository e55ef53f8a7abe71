"""Compute with swapd: it starts before the last bytes arrive, and costs little when resident.

In this process, with torch.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_check import torchish
from benchmarks.gpu_check.raw import chain, seconds
from benchmarks.gpu_check.rig import chunks_of, room_for, serving, watching
from benchmarks.gpu_check.rows import Check, spread
from benchmarks.gpu_check.settings import GIB, Settings
from benchmarks.gpu_check.torchish import Stack
from swapd.bench import swap_in
from swapd_client import Client

SEGMENTS = 16
EARLY_AT_MOST = 1.15
HIT_PERCENT_AT_MOST = 1.0
#: Rows of the input: enough for the layers to have work, few enough to divide it finely.
ROWS = 512


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    torchish.start(settings)
    with check.part("a decode loop"):
        _decode(check, settings)
    with check.part("compute that starts on segment 0"):
        _early(check, settings)


# --- early -------------------------------------------------------------------------------


class Pipeline:
    """A model of many segments, and work on each that takes as long as its copy."""

    def __init__(self, settings: Settings, client: Client, nbytes: int) -> None:
        self.settings = settings
        self.client = client
        self._streams = torchish.StreamWaits(settings)
        self.model = Stack(settings, nbytes, SEGMENTS, 1)
        times = 1 if settings.stub else ROWS // self.model.rows
        self.input = self.model.x.repeat(times, 1)
        torchish.register(client, settings, "model", self.model, segments=self.model.segments())
        client.register("other", {"weights": bytearray(nbytes)})
        self.repeats = 1

    def away(self) -> None:
        """Evict the model."""
        self.client.acquire("other").release()

    def copy(self) -> None:
        self.client.acquire("model").release()

    def compute(self) -> None:
        with self.client.acquire("model"):
            y = self.input
            for number in range(SEGMENTS):
                y = self._segment(number, y)
            torchish.synchronize(self.settings)

    def early(self) -> None:
        with self.client.acquire("model", early=True) as lease:
            y = self.input
            for number in range(SEGMENTS):
                self._streams.wait(lease, number)
                y = self._segment(number, y)
            torchish.synchronize(self.settings)

    def _segment(self, number: int, y: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repeats):
            y = self.model.step(number, y)
        return y

    def calibrate(self, wanted_s: float) -> None:
        """Make `compute` take about `wanted_s`."""
        self.compute()
        one = seconds(self.compute)
        self.repeats = 9
        nine = seconds(self.compute)
        each = max((nine - one) / 8, 1e-6)
        self.repeats = max(round((wanted_s - one) / each) + 1, 1)


def _early(check: Check, settings: Settings) -> None:
    nbytes = room_for(settings, settings.swap_bytes, of=2.5, host_copies=3)
    with (
        serving(settings, chunks_of(nbytes, settings)) as daemon,
        watching(daemon) as client,
    ):
        pipeline = Pipeline(settings, client, nbytes)
        swap_in.until_pinned(client, 2 * nbytes, chain(pipeline.away, pipeline.copy))
        copies = [_after_away(pipeline, pipeline.copy) for _ in range(3)]
        pipeline.calibrate(statistics.median(copies))
        copies, computes, earlies = [], [], []
        for _ in range(settings.rounds):
            copies.append(_after_away(pipeline, pipeline.copy))
            computes.append(seconds(pipeline.compute))
            earlies.append(_after_away(pipeline, pipeline.early))
    longer = max(statistics.median(copies), statistics.median(computes))
    note = f"{nbytes / GIB:.3g} GiB; ms: " + "; ".join(
        f"{what} {spread(times, 1e3)}"
        for what, times in (("copy", copies), ("compute", computes), ("overlapped", earlies))
    )
    name = "compute that starts on segment 0 of 16, over the longer of copy and compute"
    check.slower(name, statistics.median(earlies) / longer, EARLY_AT_MOST, "", note)


def _after_away(pipeline: Pipeline, what: Callable[[], None]) -> float:
    pipeline.away()
    return seconds(what)


# --- a resident component ----------------------------------------------------------------


def _decode(check: Check, settings: Settings) -> None:
    nbytes = room_for(settings, settings.model_bytes, of=4, host_copies=3)
    with (
        serving(settings, chunks_of(nbytes, settings)) as daemon,
        watching(daemon) as client,
    ):
        loop = Loop(settings, client, nbytes)
        loop.calibrate()
        for told, waits in (("that waits for each step", True), ("that runs ahead", False)):
            times = settings.steps if waits else max(settings.rounds // 3, 2)
            steps = 1 if waits else settings.steps
            bare, leased, kept = [], [], []
            for _ in range(times):  # in turn: the GPU's clock changes meanwhile
                bare.append(loop.bare(steps))
                leased.append(loop.leased(steps))
                kept.append(loop.kept(steps))
            _loop_rows(check, told, waits, bare, leased, kept)
        with check.part("the calls alone"):
            idle, busy = (loop.calls_s(settings.steps, work) for work in (False, True))
            note = f"{idle * 1e6:.3g} us on an idle stream"
            check.row("acquire and release, on a stream with work", busy * 1e6, "us", note)


def _loop_rows(
    check: Check,
    told: str,
    waits: bool,
    bare: list[float],
    leased: list[float],
    kept: list[float],
) -> None:
    step = statistics.median(bare)
    note = f"a step takes {step * 1e3:.3g} ms without, {spread(leased, 1e3)} with"
    name = f"acquire and release at every step of a decode loop {told}, of a step"
    percent = (statistics.median(leased) / step - 1) * 100
    if waits:
        check.slower(name, percent, HIT_PERCENT_AT_MOST, "%", note)
    else:
        check.row(name, percent, "%", note)
    percent = (statistics.median(kept) / step - 1) * 100
    check.row(f"one lease, and a look at `wanted` at every step {told}", percent, "%")


class Loop:
    """A decode loop: steps of about `settings.step_s` on one resident component."""

    def __init__(self, settings: Settings, client: Client, nbytes: int) -> None:
        self.settings = settings
        self.client = client
        self.model = Stack(settings, nbytes, 4, 3)
        torchish.register(client, settings, "decoder", self.model)
        self.repeats = 1

    def calibrate(self) -> None:
        """Make a step take about `step_s`, once the GPU's clock has risen."""
        with self.client.acquire("decoder"):
            once = chain(self._work, partial(torchish.synchronize, self.settings))
            self.repeats = 8
            until = time.monotonic() + 100 * self.settings.step_s
            while time.monotonic() < until:
                once()
            each = statistics.median(seconds(once) for _ in range(9)) / 8
        self.repeats = max(round(self.settings.step_s / each), 1)

    def bare(self, steps: int) -> float:
        """Seconds a step, without calls of swapd."""
        with self.client.acquire("decoder"):
            return self._block(steps, self._work)

    def leased(self, steps: int) -> float:
        def step() -> None:
            with self.client.acquire("decoder"):
                self._work()

        return self._block(steps, step)

    def kept(self, steps: int) -> float:
        with self.client.acquire("decoder") as lease:

            def step() -> None:
                self._work()
                assert not lease.wanted

            return self._block(steps, step)

    def calls_s(self, times: int, busy: bool) -> float:
        """Seconds of an acquire and its release, the median; if `busy`, with work on the stream."""
        took = []
        for _ in range(times):
            if busy:
                self._work()
            took.append(seconds(lambda: self.client.acquire("decoder").release()))
            torchish.synchronize(self.settings)
        return statistics.median(took)

    def _work(self) -> None:
        for _ in range(self.repeats):
            self.model()

    def _block(self, steps: int, step: Callable[[], None]) -> float:
        """Seconds a step; it waits for the GPU at the end."""
        started = time.perf_counter()
        for _ in range(steps):
            step()
        torchish.synchronize(self.settings)
        return (time.perf_counter() - started) / steps
