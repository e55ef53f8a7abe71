"""Pictures with vllm-omni's caches between steps, with and without offloading.

The table of the pull request that brought `enable_cpu_offload` to vLLM-Omni, measured with its own
offloader and with swapd. Both copy at the bandwidth at which its offloader, without a cache, slows
pictures down as much as it did there.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.vllm.rows import Row, Section, median, ratios
from swapd.plan import sizes
from tests.guarantees.harness import Daemon
from tests.vllm.engine import DRIVES
from tests.vllm.engines import MIB, Engine, Nursery, Scene, scene

DRIVEN: Any = {DRIVES: "benchmarks.vllm.own_offloading:Stage"}
PIPELINE = "QwenImagePipeline"
EXTENSION = "swapd_client.vllm.diffusion.DiffusionExtension"
#: The size of its DiT and of its encoder: 14 and 7 MiB.
LAYERS, TEXT_INNER = 6, 4096
STEPS = 20
#: Seconds of a picture in the pull request: without offloading, and with it.
THERE: Mapping[str, tuple[float, float]] = {
    "no cache": (4.06, 14.20),
    "Cache-DiT": (2.51, 10.70),
    "TeaCache": (3.22, 11.63),
}
#: The weights are random, so that thresholds of real models mean nothing here: these caches leave
#: out about as many steps as there.
CACHES: Mapping[str, Mapping[str, Any]] = {
    "no cache": {},
    "Cache-DiT": {
        "cache_backend": "cache_dit",
        "cache_config": {"residual_diff_threshold": 10.0, "max_cached_steps": 8},
    },
    "TeaCache": {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 0.08}},
}
IN_TURN: Mapping[str, Any] = {"enable_cpu_offload": True}
ALONE, OWN, OURS = "without offloading", "vLLM-Omni's offloading", "swapd"
#: Bounds of swapd over vLLM-Omni's offloading: of a picture's copied bytes, and of its time, which
#: depends on the machine's other work.
BYTES_BOUND, BOUND = 0.55, 1.0


def measure(nursery: Nursery, rounds: int) -> Section:
    """Seconds of a picture, all sides in turn."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, PIPELINE)
        model.mkdir()
        nursery.call("tests.vllm.pipelines:write_qwen_image", str(model), LAYERS, TEXT_INNER)
        with scene(Path(folder), nursery) as made:
            return _measured(made, model, rounds)


def _measured(made: Scene, model: Path, rounds: int) -> Section:
    stages = {(cache, ALONE): _begin(made, model, cache) for cache in CACHES}
    base = min(_picture(stages["no cache", ALONE], number)[1] for number in range(-1, 4))
    sizes_of = {one.name: one.nbytes for one in sizes.of_path(model)}
    in_turn = sizes_of["transformer"] + sizes_of["text_encoder"]
    before, after = THERE["no cache"]
    rate = 2 * in_turn / (base * (after / before - 1))
    budget = int(1.05 * (sizes_of["transformer"] + sizes_of["vae"])) + 8 * MIB
    daemons = {}
    for cache in CACHES:
        stages[cache, OWN] = _begin(made, model, cache, bandwidth=rate, **IN_TURN)
        daemon = made.daemon(budget=budget, bandwidth=f"{rate:.0f}/s")
        swapd = {"endpoint": str(daemon.folder), "component": "dit"}
        ours = {"worker_extension_cls": EXTENSION, "additional_config": {"swapd": swapd}}
        stages[cache, OURS] = _begin(made, model, cache, **ours, **IN_TURN)
        daemons[cache] = daemon
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in stages}
    copied: dict[tuple[str, str], int] = {}
    for number in range(-1, rounds):  # the first picture is no steady state
        drawn: dict[str, set[str]] = {}
        if number == 0:
            copied = {key: -_copied(*key, stages, daemons) for key in stages}
        for key, stage in stages.items():
            digest, seconds = _picture(stage, number)
            drawn.setdefault(key[0], set()).add(digest)
            taken[key] += [seconds] if number >= 0 else []
        assert all(len(digests) == 1 for digests in drawn.values()), drawn
    each = {key: (n + _copied(*key, stages, daemons)) // rounds for key, n in copied.items()}
    raw = {f"{cache}, {side}": seconds for (cache, side), seconds in taken.items()}
    return Section(tuple(_rows(taken, each)), raw)


def _rows(
    taken: Mapping[tuple[str, str], list[float]], copied: Mapping[tuple[str, str], int]
) -> Iterator[Row]:
    for cache, (before, after) in THERE.items():
        base = median(taken[cache, ALONE])
        yield Row(f"s a picture, {cache}", base, note=f"{before} s there")
        for side in (OWN, OURS):
            over = median(ratios(taken[cache, side], taken[cache, ALONE]))
            note = f"{base * over:.2f} s; {copied[cache, side] / MIB:.0f} MiB copied"
            there = f"; {after / before:.2f} there" if side == OWN else ""
            yield Row(f"the same over that, with {side}", over, note=note + there)
        less = median(ratios(taken[cache, OURS], taken[cache, OWN]))
        yield Row("swapd over vLLM-Omni's offloading", less, "at most", BOUND)
        moved = copied[cache, OURS] / copied[cache, OWN]
        yield Row("the same, bytes copied", moved, "at most", BYTES_BOUND)


def _begin(made: Scene, model: Path, cache: str, **given: Any) -> Engine:
    """A stage, ready."""
    stage = made.process(cache, multiprocessing=False, **DRIVEN)
    stage.start(model=str(model), known=model.name, **CACHES[cache], **given)
    return stage


def _picture(stage: Engine, seed: int) -> tuple[str, float]:
    digest, seconds = stage.picture(seed + 1, STEPS)
    return digest, seconds


def _copied(
    cache: str, side: str, stages: Mapping[tuple[str, str], Engine], daemons: Mapping[str, Daemon]
) -> int:
    if side == OURS:
        status = daemons[cache].status()
        return status.bytes_in + status.bytes_out
    return int(stages[cache, side].copied()) if side == OWN else 0
