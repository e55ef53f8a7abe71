"""The measured sides, their order, and their figures."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch

from benchmarks.offload import ours, rivals
from benchmarks.offload.model import build, modules, nbytes, paint
from benchmarks.offload.stand_in import StandIn
from swapd.shared.units import size

#: Offloads until the block ends; yields the counts.
Side: TypeAlias = Callable[[Any], AbstractContextManager[Callable[[], ours.Counts]]]

#: Chunk of the host device: components take multiples of it.
CHUNK = 2 << 20


class Row(msgspec.Struct, frozen=True):
    """One side. All but the peak is for one picture in steady state; seconds are medians."""

    name: str
    seconds: float
    #: Seconds without computing, because weights were being copied.
    waited_s: float
    bytes_in: int
    bytes_back: int
    #: Most bytes of weights at once.
    peak_bytes: int
    #: Whether every picture equals that of the pipeline alone, bit for bit.
    identical: bool


class Report(msgspec.Struct, frozen=True):
    """One run. `bandwidth` in bytes a second, None: not throttled."""

    steps: int
    pictures: int
    bandwidth: float | None
    sizes: dict[str, int]
    budget_bytes: int
    rows: list[Row]


class Plan(msgspec.Struct, frozen=True):
    """Size, length and speed of a run, and the offloaders' code."""

    width: int = 512
    steps: int = 20
    #: Measured pictures of each side in a round; one more comes first, unmeasured.
    pictures: int = 2
    rounds: int = 3
    bandwidth: float | None = None
    #: Folder with an unpacked wheel of vllm-omni, to run its own code too.
    vllm_omni: Path | None = None


def run(plan: Plan, say: Callable[[str], None]) -> Report:
    """Measure every side in turn, `rounds` times. `say` gets the name of the next one. Blocks
    throughout.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pipeline = build(plan.width)
        sizes = {name: nbytes(part) for name, part in modules(pipeline).items()}
        budget = _budget(sizes)
        sides = _sides(plan, budget)
        expected = paint(pipeline, plan.steps)
        seen: dict[str, list[Row]] = {name: [] for name in sides}
        for number in range(plan.rounds):
            for name, side in sides.items():
                say(f"round {number + 1}: {name}")
                with side(pipeline) as count:
                    seen[name].append(_measure(name, pipeline, count, expected, plan))
    finally:
        torch.set_num_threads(threads)
    rows = [_merged(rounds) for rounds in seen.values()]
    return Report(plan.steps, plan.pictures, plan.bandwidth, sizes, budget, rows)


def _budget(sizes: dict[str, int]) -> int:
    """Room for the DiT and the VAE, and 5 % for chunks that are not full."""
    return int(1.05 * (sizes["transformer"] + sizes["vae"])) // CHUNK * CHUNK + CHUNK


def _sides(plan: Plan, budget: int) -> dict[str, Side]:
    def rival(installed: rivals.Installed) -> Side:
        @contextmanager
        def side(pipeline: Any) -> Iterator[Callable[[], ours.Counts]]:
            device = StandIn(plan.bandwidth)
            with installed(pipeline, device):
                yield lambda: ours.Counts(
                    device.bytes_in, device.bytes_back, device.peak_bytes, device.waited_s
                )

        return side

    def swapd(**settings: Any) -> Side:
        return lambda pipeline: ours.attached(pipeline, budget, plan.bandwidth, **settings)

    sides = {
        "all on the device": rival(rivals.nothing),
        "diffusers enable_model_cpu_offload": rival(rivals.diffusers_model),
        "diffusers enable_group_offload": rival(rivals.diffusers_groups),
        "vLLM-Omni enable_cpu_offload (rule)": rival(rivals.vllm_omni_rule),
        "swapd lru": swapd(),
        "swapd cpu_offload_strategy=alternating": swapd(cpu_offload_enabled=True),
        "swapd enable_cpu_offload": swapd(enable_cpu_offload=True),
        "swapd lru, DiT in blocks": swapd(resident={"transformer": budget}),
        "swapd enable_layerwise_offload": swapd(enable_layerwise_offload=True),
    }
    if plan.vllm_omni is not None:
        sides["vLLM-Omni enable_cpu_offload (its code)"] = rival(
            rivals.vllm_omni_code(plan.vllm_omni)
        )
    return sides


def _measure(
    name: str, pipeline: Any, count: Callable[[], ours.Counts], expected: torch.Tensor, plan: Plan
) -> Row:
    painted = [paint(pipeline, plan.steps)]
    before = count()
    times = []
    for _ in range(plan.pictures):
        started = time.perf_counter()
        painted.append(paint(pipeline, plan.steps))
        times.append(time.perf_counter() - started)
    after = count()
    return Row(
        name=name,
        seconds=statistics.median(times),
        waited_s=(after.waited_s - before.waited_s) / plan.pictures,
        bytes_in=(after.bytes_in - before.bytes_in) // plan.pictures,
        bytes_back=(after.bytes_back - before.bytes_back) // plan.pictures,
        peak_bytes=after.peak_bytes,
        identical=all(torch.equal(one, expected) for one in painted),
    )


def _merged(rounds: list[Row]) -> Row:
    return msgspec.structs.replace(
        rounds[-1],
        seconds=statistics.median(row.seconds for row in rounds),
        waited_s=statistics.median(row.waited_s for row in rounds),
        peak_bytes=max(row.peak_bytes for row in rounds),
        identical=all(row.identical for row in rounds),
    )


def table(report: Report) -> str:
    """The report as a Markdown table."""
    lines = [
        "| | s a picture | waiting | in | back | peak on the device |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in report.rows:
        figures = " | ".join(size(n) for n in (row.bytes_in, row.bytes_back, row.peak_bytes))
        verdict = "" if row.identical else " **WRONG PICTURE**"
        lines.append(
            f"| {row.name}{verdict} | {row.seconds:.2f} | {row.waited_s:.2f} | {figures} |"
        )
    return "\n".join(lines)
