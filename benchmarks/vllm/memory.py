"""Device memory that stages need which take turns, KV caches and all, over what they need together.

What an arena must hold is said by the files alone: what stays, and the largest turn. The least that
real engines start with is what swapd asks for where there is less.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.vllm.rows import Row, Section
from swapd.plan import claims, deploy, shares, sizes
from tests.guarantees.harness import Daemon
from tests.plan import omni
from tests.vllm.engines import (
    MIB,
    REQUESTS,
    TOKENS,
    Engine,
    EngineFailed,
    Nursery,
    Scene,
    by_component,
    on_swapd,
    plain,
    scene,
)

GIB = 1 << 30
FILE = "model.safetensors"
CACHE = 32 * MIB
OF_CACHE: Mapping[str, object] = {"kv_cache_memory_bytes": CACHE}
STAYS: Mapping[str, object] = {"cpu_offload_enabled": False}
TURNS: Mapping[str, object] = {}
#: By how many there are, stages and what they say of their weights.
STAGES: tuple[Mapping[str, Mapping[str, object]], ...] = (
    {"deep": TURNS, "less-deep": TURNS},
    {"talker": STAYS, "deep": TURNS, "third": TURNS},
)

#: Of Qwen3-Omni on a GPU of 80 GiB: what a stage had for KV cache and activations while its cache
#: stayed, and what it is to have at least, over that.
OVERLAY = Path(__file__).parents[2] / "deploy" / "vllm-omni" / "swapd_qwen3_omni.yaml"
CARD_BYTES = 80 * GIB
BYTES_PER_S = 25e9
ROOM_BEFORE = {"thinker": 4 * GIB, "talker": 4 * GIB}
TIMES = 2

_ASKED = re.compile(r"a --budget of (\d+)MiB at least")


class Needs(NamedTuple):
    """Bytes of device memory."""

    #: All weights and caches at once, as they are without turns.
    together: int
    #: What stays, and the largest turn.
    computed: int
    #: What swapd asks for; and the most that was in use with so much.
    least: int
    peak: int
    #: By how much the least may be more: a chunk for each part of the largest.
    rounding: int


def measure(models: Path, nursery: Nursery) -> Section:
    rows: list[Row] = []
    for stages in STAGES:
        with scene(models, nursery) as made:
            needs = of(made, stages)
        what = f"{len(stages)} stages"
        note = (
            f"{needs.computed / MIB:.1f} MiB computed, {needs.least / MIB:.0f} the least, "
            f"{needs.peak / MIB:.0f} in use at most, {needs.together / MIB:.1f} at once"
        )
        over = (needs.least - needs.computed) / needs.rounding
        rows += [
            Row(f"arena of {what} over all they have", needs.least / needs.together, note=note),
            Row(f"{what}: more than computed, over a chunk for each part", over, "at most", 1),
        ]
    return Section((*rows, *_qwen3(models)), {})


def _qwen3(folder: Path) -> list[Row]:
    """The room of each stage that has a KV cache, by the plan: no weights are needed."""
    found, model = deploy.read(OVERLAY), omni.qwen3(folder / "Qwen3-Omni")
    total = {0: CARD_BYTES}
    wanted, _ = claims.of(found, sizes.of_path(model), {}, total, omni.QWEN3)
    (plan,) = shares.divide_all(wanted, total, BYTES_PER_S)
    rows = []
    for share in plan.shares:
        if (before := ROOM_BEFORE.get(share.name)) is None:
            continue
        room = share.cache_bytes + share.room_bytes
        note = (
            f"{share.cache_bytes / GIB:.2f} GiB of KV cache, {share.cache_tokens} tokens; with "
            f"activations {room / GIB:.2f} GiB, where it had {before / GIB:.0f}"
        )
        what = f"room of Qwen3-Omni's {share.name} on 80 GiB over what it had"
        rows.append(Row(what, room / before, "at least", TIMES, note))
    return rows


def of(made: Scene, stages: Mapping[str, Mapping[str, object]]) -> Needs:
    """Measure it; all of them are asked then, and say what plain vLLM says."""
    files = {name: (made.models / name / FILE).stat().st_size for name in stages}
    staying = sum(files[name] for name, said in stages.items() if said is STAYS)
    turns = [(said is not STAYS) * files[name] + CACHE for name, said in stages.items()]
    computed = staying + max(turns)
    least = computed - CACHE // 2
    while (more := _asked_for(made, stages, least)) > least:
        least = more
    expected = _said(made.start(*(plain(made.models / name, **OF_CACHE) for name in stages)))
    daemon = made.daemon(budget=least)
    engines = _start(made, stages, daemon)
    parts = by_component(daemon)
    assert _said(engines) == expected
    status = daemon.status()
    return Needs(
        together=sum(files.values()) + len(files) * CACHE,
        computed=computed,
        least=least,
        peak=status.peak_bytes,
        rounding=status.chunk_bytes * sum(len(parts[name]) for name in stages),
    )


def _start(made: Scene, stages: Mapping[str, Mapping[str, object]], daemon: Daemon) -> list[Engine]:
    """One after the other: what stays is there before others ask whether they have room."""
    engines: list[Engine] = []
    for name, said in stages.items():
        settings = {"kv": "auto", **said}
        engines += made.start(on_swapd(made.models / name, daemon.folder, settings, **OF_CACHE))
    return engines


def _asked_for(made: Scene, stages: Mapping[str, Mapping[str, object]], budget: int) -> int:
    """The arena that swapd asks for where stages have one of `budget` bytes; that if it does."""
    daemon = made.daemon(budget=budget)
    try:
        _start(made, stages, daemon)
    except EngineFailed as exc:
        asked = _ASKED.search(exc.message)
        if asked is None:
            raise
        return int(asked[1]) * MIB
    finally:
        made.close()
    return budget


def _said(engines: list[Engine]) -> dict[str, list[list[int]]]:
    said = {one.label: one.generate(REQUESTS[0], TOKENS) for one in engines}
    for one in engines:
        one.close()
    return said
