"""Prints a plan as settings to paste: deploy files, lines of Python, the daemon's command line."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from typing import Any

from swapd.plan.advice import Advice, Treatment
from swapd.plan.chunks import Isolation
from swapd.plan.deploy import INNER, WORKERS, Deploy, cuda_stages
from swapd.plan.omni import Kind
from swapd.plan.sizes import DITS, STAGES


def worker(kind: Kind) -> dict[str, Any]:
    if kind == "diffusion":
        return {"worker_extension_cls": WORKERS[kind]}
    if kind == "generation":  # it would capture graphs before swapd has its weights
        return {"worker_cls": WORKERS[kind], "enforce_eager": True}
    return {"worker_cls": WORKERS[kind]}


def overlay(deploy: Deploy, changes: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the text of the file with `changes` to its stages, and its base file by full path.

    A change is repeated in a stage's own dictionaries and for CUDA if these set the key, as they
    override the rest.
    """
    import yaml

    whole, own = deploy.whole, {**deploy.own, "async_chunk": deploy.async_chunk}
    own["stages"] = _changed(own.get("stages"), whole.get("stages"), changes, everywhere=True)
    cuda = cuda_stages(whole)
    if changed := _changed(cuda_stages(own), cuda, changes, everywhere=False):
        platforms = {**(own.get("platforms") or {})}
        platforms["cuda"] = {**(platforms.get("cuda") or {}), "stages": changed}
        own["platforms"] = platforms
    return str(yaml.safe_dump(own, sort_keys=False, default_flow_style=None, width=100))


def _changed(
    mine: list[dict[str, Any]] | None,
    whole: list[dict[str, Any]] | None,
    changes: Mapping[int, Mapping[str, Any]],
    *,
    everywhere: bool,
) -> list[dict[str, Any]]:
    """Apply `changes` to a file's own stages: `everywhere`, or only where `whole` sets the key."""
    by_id = {stage["stage_id"]: dict(stage) for stage in mine or ()}
    before = {stage["stage_id"]: stage for stage in whole or ()}
    for number, values in changes.items():
        if again := _again(before.get(number, {}), values, everywhere=everywhere):
            by_id[number] = {"stage_id": number, **by_id.get(number, {}), **again}
    return [by_id[number] for number in sorted(by_id)]


def _again(
    before: Mapping[str, Any], values: Mapping[str, Any], *, everywhere: bool
) -> dict[str, Any]:
    again = {key: value for key, value in values.items() if everywhere or key in before}
    for inner in INNER:
        own = before.get(inner)
        if isinstance(own, dict) and not own.keys().isdisjoint(values):
            again[inner] = {key: values.get(key, value) for key, value in own.items()}
    return again


_GIB = 1 << 30
_MIB = 1 << 20
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("thinker", "talker"), "ar"),
    **dict.fromkeys(("code2wav", "token2wav"), "generation"),
}


def stage_file(advice: Advice) -> str:
    """Return a deploy file of vLLM-Omni, without the base file, which belongs to the model.

    Components that are stages become stages; all others share one stage.
    """
    stages = [[p] for p in advice.placements if p.name in STAGES]
    stages += [rest] if (rest := [p for p in advice.placements if p.name not in STAGES]) else []
    lines = ["# base_config: the model's own deploy file, whose stages have these ids", "stages:"]
    for number, placements in enumerate(stages):
        lines += [f"  - stage_id: {number}", *_stage_lines(placements)]
    return "\n".join(lines) + "\n"


def _stage_lines(placements: list[Treatment]) -> Iterator[str]:
    names = [p.name for p in placements]
    kind = _KINDS.get(names[0]) if set(DITS).isdisjoint(names) else "diffusion"
    if kind:
        yield from (f"    {key}: {json.dumps(value)}" for key, value in worker(kind).items())
    yield "    additional_config:"
    yield "      swapd:"
    if len(placements) == 1 and placements[0].name in STAGES:
        yield f"        component: {placements[0].name}"
    yield from (f"        {line}" for line in _settings(placements))


def _settings(placements: list[Treatment]) -> list[str]:
    moved = [p for p in placements if p.how != "keep"]
    ways = Counter(p.how for p in moved)
    if not moved:
        return ["cpu_offload_enabled: false"]
    if ways == {"stream": 1}:
        gib = (moved[0].nbytes - moved[0].kept_bytes) / _GIB
        lines = [f"cpu_offload_gb: {ceil(gib * 10) / 10}"]
    elif ways["stream"]:
        lines = ["enable_layerwise_offload: true"]
    else:
        lines = ["cpu_offload_enabled: true", "cpu_offload_strategy: alternating"]
    if len(placements) > 1:
        lines.append(f"cpu_offload_components: {_listed(moved)}")
    if ways["stream"] and len(moved) > 1:
        lines.append("# a stage has one option only: the Python lines below are more exact")
    return lines


def python(advice: Advice) -> str:
    lines = []
    if kept := advice.treated("keep"):
        lines.append(f'client.attach(model, {_listed(kept)}, policy="permanent")')
    if alternating := advice.treated("alternate"):
        how = "cpu_offload_enabled=True"
        if any(p.kept_bytes for p in advice.treated("stream")):
            # kept blocks are less recently used than the last component, which must leave first
            how += ', cpu_offload_strategy="sequential"'
        lines.append(f"client.attach(model, {_listed(alternating)}, {how})")
    lines += [
        f'client.attach(model, {_listed([p])}, resident="{amount(p.kept_bytes)}")'
        for p in advice.treated("stream")
    ]
    return "\n".join(lines) + "\n"


def _listed(placements: Iterable[Treatment]) -> str:
    return json.dumps([p.name for p in placements])


def serve(device: str, budget: int, chunk: int, isolation: Isolation = "relaxed") -> str:
    """Return the daemon's command line; `budget` is in whole chunks already.

    It always names the chunk, because the plan counts in that unit.
    """
    line = f"swapd serve --device {device} --budget {amount(budget)} --chunk {amount(chunk)}"
    return line if isolation == "relaxed" else f"{line} --isolation {isolation}"


def amount(nbytes: int) -> str:
    """Format `nbytes` for `--budget` and `resident=`, rounded down."""
    return f"{nbytes // _GIB}GiB" if nbytes % _GIB == 0 else f"{nbytes // _MIB}MiB"
