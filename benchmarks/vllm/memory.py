"""Device memory of stages that take turns, with KV caches, over their memory without turns.

The files alone give the needed arena: the components that stay, and the largest turn. The smallest
arena with which real engines start is the one that swapd asks for if it gets less.
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
#: By number of stages: their names, and their settings for weights.
STAGES: tuple[Mapping[str, Mapping[str, object]], ...] = (
    {"deep": TURNS, "less-deep": TURNS},
    {"talker": STAYS, "deep": TURNS, "third": TURNS},
)

#: Of Qwen3-Omni on a GPU of 80 GiB: a stage's room for KV cache and activations while its cache
#: stayed, and the least ratio of its room now to that.
OVERLAY = Path(__file__).parents[2] / "deploy" / "vllm-omni" / "swapd_qwen3_omni.yaml"
CARD_BYTES = 80 * GIB
BYTES_PER_S = 25e9
ROOM_BEFORE = {"thinker": 4 * GIB, "talker": 4 * GIB}
TIMES = 2

_ASKED = re.compile(r"a --budget of (\d+)MiB at least")


class Needs(NamedTuple):
    """Bytes of device memory."""

    #: All weights and caches at once, as without turns.
    together: int
    #: The components that stay, and the largest turn.
    computed: int
    #: The arena that swapd asks for; and the peak use in that arena.
    least: int
    peak: int
    #: Tolerance of `least`: a chunk for each part of the largest stage.
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
    """The room of each stage that has a KV cache, from the plan: no weights are needed."""
    found, model = deploy.read(OVERLAY), omni.qwen3(folder / "Qwen3-Omni")
    total = {0: CARD_BYTES}
    known = claims.DeployFacts(found, sizes.of_path(model), config=omni.QWEN3)
    wanted, _ = claims.of(known, total)
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
    """Measure it; then all engines answer, and their answers equal those of plain vLLM."""
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
    """Start one after the other, so that staying components are there before others check for
    room."""
    engines: list[Engine] = []
    for name, said in stages.items():
        settings = {"kv": "auto", **said}
        engines += made.start(on_swapd(made.models / name, daemon.folder, settings, **OF_CACHE))
    return engines


def _asked_for(made: Scene, stages: Mapping[str, Mapping[str, object]], budget: int) -> int:
    """The arena that swapd asks for if stages get one of `budget` bytes; `budget` if that is
    enough.
    """
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
