"""Writes a deploy file of vLLM-Omni with changes to the settings of its stages."""

from collections.abc import Mapping
from typing import Any

from swapd.plan.deploy import INNER, WORKERS, Deploy, cuda_stages
from swapd.plan.omni import Kind


def worker(kind: Kind) -> dict[str, Any]:
    """What a stage of this kind says to use swapd's worker."""
    if kind == "diffusion":
        return {"worker_extension_cls": WORKERS[kind]}
    if kind == "generation":  # it would capture graphs before its weights are in swapd
        return {"worker_cls": WORKERS[kind], "enforce_eager": True}
    return {"worker_cls": WORKERS[kind]}


def overlay(deploy: Deploy, changes: Mapping[int, Mapping[str, Any]], async_chunk: bool) -> str:
    """The text of the file with `changes` to its stages, and its base file by full path.

    A change is also made in a stage's own dictionaries and for CUDA, if these set the key: they
    override the rest.
    """
    import yaml

    whole, own = deploy.whole, {**deploy.own, "async_chunk": async_chunk}
    own["stages"] = _changed(own.get("stages"), whole.get("stages"), changes, everywhere=True)
    cuda = cuda_stages(whole)
    if changed := _changed(cuda_stages(own), cuda, changes, everywhere=False):
        platforms = {**(own.get("platforms") or {})}
        platforms["cuda"] = {**(platforms.get("cuda") or {}), "stages": changed}
        own["platforms"] = platforms
    text = yaml.safe_dump(own, sort_keys=False, default_flow_style=None, width=100)
    return str(text)


def _changed(
    mine: list[dict[str, Any]] | None,
    whole: list[dict[str, Any]] | None,
    changes: Mapping[int, Mapping[str, Any]],
    *,
    everywhere: bool,
) -> list[dict[str, Any]]:
    """A file's own stages with `changes`: `everywhere`, or only where `whole` says the same."""
    by_id = {stage["stage_id"]: dict(stage) for stage in mine or ()}
    before = {stage["stage_id"]: stage for stage in whole or ()}
    for number, values in changes.items():
        if again := _again(before.get(number, {}), values, everywhere=everywhere):
            by_id[number] = {"stage_id": number, **by_id.get(number, {}), **again}
    return [by_id[number] for number in sorted(by_id)]


def _again(
    before: Mapping[str, Any], values: Mapping[str, Any], *, everywhere: bool
) -> dict[str, Any]:
    """What a stage's entry must say so that the values count."""
    again = {key: value for key, value in values.items() if everywhere or key in before}
    for inner in INNER:
        own = before.get(inner)
        if isinstance(own, dict) and not own.keys().isdisjoint(values):
            again[inner] = {key: values.get(key, value) for key, value in own.items()}
    return again
